"""The `openai` package as the judge: what it parses, and which of its exceptions it raises."""

from __future__ import annotations

import asyncio

import openai
import pytest
from live import Live, live, user

MODEL = "minifer-tiny"
PROMPT = "The for statement"


@pytest.fixture
def client(server: Live) -> openai.OpenAI:
    return server.openai


def test_case_114_a_completion_has_openais_shape(client):
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5, temperature=0)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert answer.model == MODEL and answer.created > 1_600_000_000
    (choice,) = answer.choices
    assert choice.index == 0 and choice.finish_reason == "length" and len(choice.text) == 5
    assert answer.usage.prompt_tokens == len(PROMPT)  # a byte a token
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == len(PROMPT) + 5


def test_case_114_a_chat_reply_has_openais_shape(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=user("hi"), max_tokens=5, temperature=0
    )
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and len(choice.message.content) == 5
    assert choice.message.tool_calls is None and choice.message.refusal is None
    assert choice.finish_reason == "length"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5


def test_a_completion_stream_joins_to_the_whole(client):
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=9, temperature=0)
    stream = list(
        client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=9, temperature=0, stream=True
        )
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in stream] == [None] * 8 + ["length"]
    assert all(chunk.object == "text_completion" and chunk.usage is None for chunk in stream)
    assert len({chunk.id for chunk in stream}) == 1


def test_a_chat_stream_begins_with_the_role_and_joins_to_the_whole(client):
    options = {"model": MODEL, "messages": user("hi"), "max_tokens": 9, "temperature": 0}
    whole = client.chat.completions.create(**options)
    stream = list(client.chat.completions.create(**options, stream=True))
    assert stream[0].choices[0].delta.role == "assistant"
    assert all(chunk.object == "chat.completion.chunk" for chunk in stream)
    assert all(chunk.choices[0].delta.role is None for chunk in stream[1:])
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in stream if c.choices[0].finish_reason] == ["length"]


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_case_111_usage_comes_when_asked_for(server, route):
    path = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}[route]
    body = {"prompt": "ab"} if route == "completions" else {"messages": user("hi")}
    for options, expected in (({}, False), ({"include_usage": False}, False)):
        chunks = server.stream(path, **body, max_tokens=3, stream_options=options)
        assert all(chunk["choices"] for chunk in chunks) is not expected
        assert all("usage" not in chunk for chunk in chunks)
    *chunks, last = server.stream(
        path, **body, max_tokens=3, stream_options={"include_usage": True}
    )
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"] is None for chunk in chunks)


def test_case_069_every_choice_finishes_once(client):
    """n sequences that end at different times, by different reasons."""
    for create, options in (
        (client.completions.create, {"prompt": ["a", "b"]}),
        (client.chat.completions.create, {"messages": user("hi")}),
    ):
        stream = create(model=MODEL, n=3, max_tokens=30, stop=["e"], seed=1, stream=True, **options)
        ends: dict[int, list[str]] = {}
        after_the_end = []
        for chunk in stream:
            (choice,) = chunk.choices
            if choice.index in ends:
                after_the_end.append(choice)
            if choice.finish_reason is not None:
                ends.setdefault(choice.index, []).append(choice.finish_reason)
        count = 6 if "prompt" in options else 3
        assert sorted(ends) == list(range(count))
        assert all(reasons in (["stop"], ["length"]) for reasons in ends.values())
        assert not after_the_end


def test_n_answers_are_those_of_the_engine_and_differ(client):
    answer = client.completions.create(
        model=MODEL, prompt=["a", "b"], n=3, max_tokens=12, seed=5, temperature=1.2
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert len({choice.text for choice in answer.choices}) > 3
    assert answer.usage.completion_tokens == 6 * 12 and answer.usage.prompt_tokens == 2


@pytest.mark.parametrize("how", ["id", "string", "length"])
def test_case_113_the_token_that_ends_an_answer_counts_once(server, how):
    """Whether it is shown or not: it was generated."""
    whole = server.complete(max_tokens=12)["choices"][0]["text"]
    end = whole[6]  # a byte a token
    at = whole.index(end)
    fields = {"id": {"stop_token_ids": [ord(end)]}, "string": {"stop": [end]}, "length": {}}[how]
    answer = server.complete(max_tokens=12, **fields)
    (choice,) = answer["choices"]
    expected = (12, whole, "length") if how == "length" else (at + 1, whole[:at], "stop")
    got = (answer["usage"]["completion_tokens"], choice["text"], choice["finish_reason"])
    assert got == expected
    assert choice["stop_reason"] == {"id": ord(end), "string": end, "length": None}[how]


def test_completion_logprobs_have_offsets_into_the_text(client):
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0, logprobs=2
    )
    logprobs, text = answer.choices[0].logprobs, answer.choices[0].text
    assert "".join(logprobs.tokens) == text
    assert logprobs.text_offset == list(range(6))
    for token, one, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert len(top) == 2 and one == max(top.values()) == top[token]  # greedy


def test_chat_logprobs_have_bytes_and_exactly_k_alternatives(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=user("hi"), max_tokens=6, seed=3, logprobs=True, top_logprobs=3
    )
    choice = answer.choices[0]
    assert len(choice.logprobs.content) == 6
    assert bytes(b for t in choice.logprobs.content for b in t.bytes).decode(errors="replace") == (
        choice.message.content
    )
    for token in choice.logprobs.content:
        values = [top.logprob for top in token.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)


def test_the_async_client_streams_many_at_once(server):
    async def one(client, i):
        stream = await client.chat.completions.create(
            model=MODEL, messages=user(f"hi {i}"), max_tokens=8, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def main():
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            return await asyncio.gather(*(one(client, i) for i in range(12)))

    texts = asyncio.run(main())
    alone = [server.chat(f"hi {i}")["choices"][0]["message"]["content"] for i in range(12)]
    assert texts == alone


def test_models_are_listed_and_found_by_name(client):
    (model,) = client.models.list().data
    assert model.id == MODEL and model.owned_by == "minifer" and model.max_model_len == 1024
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_errors_are_the_exceptions_openai_users_catch(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="a", temperature=3)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-4", prompt="a")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):  # before the stream begins
        client.completions.create(model=MODEL, prompt="", stream=True)


def fail_forward(server: Live, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The model breaks down after some more steps."""
    runner = server.llm.engine.runner
    forward, steps = runner.forward, iter(range(10**6))

    def broken(batch):
        if next(steps) >= after:
            raise FloatingPointError("torn")
        return forward(batch)

    monkeypatch.setattr(runner, "forward", broken)


def test_a_fault_of_the_engine_is_a_500_with_its_reason(server, client, monkeypatch):
    fail_forward(server, monkeypatch, after=2)
    with pytest.raises(openai.InternalServerError, match="FloatingPointError: torn") as caught:
        client.completions.create(model=MODEL, prompt="a", max_tokens=9)
    assert caught.value.code == "request_failed" and caught.value.type == "server_error"
    monkeypatch.undo()
    assert server.complete("a", max_tokens=2)["choices"][0]["finish_reason"] == "length"


def test_a_fault_in_the_middle_of_a_stream_is_an_error_event(server, client, monkeypatch):
    fail_forward(server, monkeypatch, after=3)
    seen = []
    with pytest.raises(openai.APIError, match="FloatingPointError: torn"):
        for chunk in client.completions.create(model=MODEL, prompt="a", max_tokens=9, stream=True):
            seen.append(chunk.choices[0].text)
    assert len(seen) == 3


def test_the_compiled_step_serves_the_same(client):
    """Greedy, with log-probabilities, and drawn: all at once from a server of its own."""
    wishes = [
        {"max_tokens": 12, "temperature": 0},
        {"max_tokens": 6, "temperature": 0, "logprobs": 2},
        {"max_tokens": 12, "temperature": 0.8, "seed": 5, "n": 2},
    ]

    async def ask(base_url: str) -> list[list[str]]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as other:
            create = other.completions.create
            asked = [create(model=MODEL, prompt=PROMPT, **wish) for wish in wishes]
            return [[c.text for c in a.choices] for a in await asyncio.gather(*asked)]

    with live({"backend": "compiled"}) as server:
        got = asyncio.run(ask(f"{server.url}/v1"))
        server.wait_until_idle()
    assert got == asyncio.run(ask(str(client.base_url)))
