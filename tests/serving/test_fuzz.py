"""Bodies nobody would send on purpose: every answer is a 200 or a 4xx, and the engine stays up."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minifer.async_llm import AsyncLLM
from minifer.serving.app import create_app
from minifer.serving.settings import ServerSettings

ROUTES = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}
HUGE = [10**400, -(10**400), 2**63, 2**64, -(2**63) - 1, 1e308, 1e-320, 0, -1, True, None]
NOT_NUMBERS = [float("nan"), float("inf"), float("-inf")]

text = st.text(st.characters(codec=None), max_size=20)  # lone surrogates included
numbers = st.one_of(st.integers(), st.floats(), st.sampled_from(HUGE), st.sampled_from(NOT_NUMBERS))
scalars = st.one_of(st.none(), st.booleans(), numbers, text)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(text, inner, max_size=4)),
    max_leaves=12,
)
small = st.integers(-2, 12)

GOOD: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["m", "other", ""]),
    "max_tokens": small,
    "max_completion_tokens": small,
    "min_tokens": small,
    "n": st.integers(-1, 4),
    "temperature": st.floats(-0.5, 2.5),
    "top_p": st.floats(-0.1, 1.1),
    "top_k": small,
    "min_p": st.floats(-0.1, 1.1),
    "seed": st.integers(-(2**70), 2**70),
    "stop": st.one_of(text, st.lists(text, max_size=6)),
    "stop_token_ids": st.lists(st.integers(-2, 300), max_size=3),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": scalars}),
    "echo": st.booleans(),
    "logprobs": st.one_of(st.booleans(), st.integers(-2, 30)),
    "top_logprobs": st.integers(-2, 30),
    "prompt_logprobs": st.integers(-2, 5),
    "logit_bias": st.dictionaries(st.one_of(text, st.integers(-2, 300).map(str)), numbers),
    "repetition_penalty": st.floats(-1, 3),
    "presence_penalty": st.floats(-3, 3),
    "frequency_penalty": st.floats(-3, 3),
    "allowed_token_ids": st.lists(st.integers(-2, 300), max_size=5),
    "bad_words": st.lists(text, max_size=3),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "priority": st.integers(-(2**40), 2**40),
    "cache_salt": text,
    "request_id": text,
    "user": text,
    "suffix": text,
    "best_of": small,
    "repetition_detection": st.dictionaries(
        st.sampled_from(["max_pattern_size", "min_pattern_size", "min_count", "x"]), small
    ),
    "structured_outputs": st.dictionaries(
        st.sampled_from(["regex", "json", "choice", "grammar", "json_object"]), anything, max_size=2
    ),
    "response_format": st.one_of(
        st.fixed_dictionaries(
            {"type": st.sampled_from(["text", "json_object", "json_schema", "x"])}
        ),
        st.fixed_dictionaries({"type": st.just("json_schema"), "json_schema": anything}),
    ),
    "tools": st.lists(
        st.fixed_dictionaries(
            {"type": st.just("function")},
            optional={"function": st.fixed_dictionaries({"name": text, "parameters": anything})},
        ),
        max_size=2,
    ),
    "tool_choice": st.one_of(st.sampled_from(["none", "auto", "required"]), anything),
    "parallel_tool_calls": st.booleans(),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
    "chat_template_kwargs": st.dictionaries(text, anything, max_size=3),
}
VALID: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 12),
    "temperature": st.floats(0.1, 2),
    "n": st.integers(1, 3),
    "top_p": st.floats(0.1, 1),
    "top_k": st.integers(1, 50),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=3), max_size=3),
    "stream": st.booleans(),
    "logit_bias": st.dictionaries(st.integers(0, 287).map(str), st.floats(-100, 100)),
    "repetition_penalty": st.floats(0.5, 2),
    "presence_penalty": st.floats(-2, 2),
    "ignore_eos": st.booleans(),
    "prompt_logprobs": st.integers(0, 5),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
}
UTF8 = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
VALID_PROMPTS = {
    "prompt": st.one_of(
        UTF8,
        st.lists(st.integers(0, 287), min_size=1, max_size=20),
        st.lists(st.lists(st.integers(0, 287), min_size=1, max_size=9), min_size=1, max_size=3),
    ),
    "messages": UTF8.map(lambda content: [{"role": "user", "content": content}]),
}
PROMPTS = {
    "prompt": st.one_of(
        text,
        st.lists(text, max_size=3),
        st.lists(st.integers(-2, 300), max_size=9),
        st.lists(st.lists(st.integers(0, 287), max_size=4), max_size=3),
    ),
    "messages": st.lists(
        st.one_of(
            st.fixed_dictionaries(
                {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"])},
                optional={
                    "content": st.one_of(text, anything),
                    "tool_calls": anything,
                    "tool_call_id": scalars,
                },
            ),
            anything,
        ),
        max_size=4,
    ),
}


def deep(depth: int) -> str:
    return "[" * depth + "]" * depth


@st.composite
def bodies(draw: st.DrawFn, content: str) -> bytes:
    """A body as bytes: valid, or an object with a few fields gone wrong, or no JSON at all."""
    if draw(st.integers(0, 3)) == 0:
        names = draw(st.lists(st.sampled_from(sorted(VALID)), max_size=5, unique=True))
        valid = {name: draw(VALID[name]) for name in names}
        return json.dumps(
            {"max_tokens": 3, **valid, content: draw(VALID_PROMPTS[content])}
        ).encode()
    fields = draw(st.lists(st.sampled_from(sorted(GOOD)), max_size=6, unique=True))
    body: dict[str, Any] = {name: draw(st.one_of(GOOD[name], anything)) for name in fields}
    body.setdefault("max_tokens", 3)
    body[content] = draw(st.one_of(PROMPTS[content], anything))
    if draw(st.integers(0, 9)) == 0:
        body[draw(text)] = draw(anything)
    raw = json.dumps(body)  # writes NaN and Infinity as such, lone surrogates as escapes
    match draw(st.integers(0, 24)):
        case 0:
            at = draw(st.integers(0, len(raw)))
            return raw[:at].encode()
        case 1:
            return raw.replace(
                "{", '{"deep": ' + deep(draw(st.sampled_from([9, 900, 90_000]))) + ",", 1
            ).encode()
        case 2:
            return json.dumps(draw(anything)).encode()
        case 3:
            return draw(st.binary(max_size=40))
        case 4:
            return json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
        case 5:
            return raw.replace("{", '{"' + content + '": "twice",', 1).encode()
        case _:
            return raw.encode()


class Probe:
    """The server without a network, on one event loop, and what it has answered so far."""

    def __init__(self, model: Path) -> None:
        self.llm = AsyncLLM(str(model), num_kv_blocks=60, max_model_len=96)
        app = create_app(self.llm, ServerSettings(served_model_name="m"))
        self.loop = asyncio.new_event_loop()
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60)
        self.answers: Counter[int] = Counter()

    def post(self, route: str, body: bytes) -> httpx.Response:
        headers = {"content-type": "application/json"}
        response = self.loop.run_until_complete(
            self.client.post(route, content=body, headers=headers)
        )
        self.answers[response.status_code] += 1
        return response

    def close(self) -> None:
        self.loop.run_until_complete(self.client.aclose())
        self.loop.close()
        self.llm.close()


def check(probe: Probe, route: str, body: bytes) -> None:
    response = probe.post(route, body)
    assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
    if response.status_code != 200:
        error = json.loads(response.text)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"] and error["type"]
    elif response.headers["content-type"].startswith("application/json"):
        json.loads(response.text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    else:
        assert response.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in response.text


def fuzz(model: Path, route: str, examples: int) -> Counter[int]:
    probe = Probe(model)

    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=True,
    )
    @given(body=bodies(ROUTES[route]))
    def attack(body: bytes) -> None:
        check(probe, route, body)

    try:
        attack()
        good = (
            {"prompt": "hi"}
            if "chat" not in route
            else {"messages": [{"role": "user", "content": "hi"}]}
        )
        assert probe.post(route, json.dumps(good | {"max_tokens": 2}).encode()).status_code == 200
        engine = probe.llm.engine
        assert not engine.has_unfinished_requests
        assert engine.kv.pool.num_free == engine.kv.pool.num_blocks
    finally:
        probe.close()
    return probe.answers


@pytest.mark.parametrize("route", ROUTES)
def test_a_few_hundred_strange_bodies(text_model, route):
    answers = fuzz(text_model, route, 150)
    assert answers[200] > 5 and answers[400] > 50


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_thousands_of_strange_bodies(text_model, route):
    answers = fuzz(text_model, route, 2500)
    print(route, dict(answers))
    assert answers.total() >= 2500
