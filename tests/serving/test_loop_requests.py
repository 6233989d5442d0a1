"""Depth over HTTP: asked for, honoured, reported, counted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from live import Live, user
from live import live as plain_server
from loop_fakes import loop_engine, loop_model_config
from prometheus_client.parser import text_string_to_metric_families

from minifer.async_llm import AsyncLLM
from minifer.events import ListSink
from minifer.sampling_params import OutputKind, SamplingParams
from minifer.text.byte_tokenizer import byte_tokenizer

ROUTES = ["/v1/completions", "/v1/chat/completions"]
CONFIG = loop_model_config(vocab_size=288, max_position_embeddings=512)
PROMPT = "The for statement"


def body(route: str, **fields: Any) -> dict[str, Any]:
    said = {"prompt": PROMPT} if route == ROUTES[0] else {"messages": user("hi")}
    return {**said, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}


@contextmanager
def loop_server(sinks: Any = (), **options: Any) -> Iterator[Live]:
    """A server of a small random loop model, for up to 8 loops."""
    options = {"num_kv_blocks": 64, "block_size": 16, "debug": False, **options}
    engine = loop_engine(config=CONFIG, tokenizer=byte_tokenizer(), sinks=sinks, **options)
    server = Live(AsyncLLM(engine=engine))
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def running() -> Iterator[Live]:
    with loop_server() as server:
        yield server


def metrics(server: Live) -> dict[str, float]:
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    return {
        sample.name.removeprefix("minifer:"): sample.value
        for family in families
        for sample in family.samples
        if "le" not in sample.labels
    }


@pytest.mark.parametrize("route", ROUTES)
def test_depth_changes_the_answer_and_is_reported(server: Live, route: str):
    choices = {}
    for depth in (1, 2, 8, 1):
        answer = server.post(route, **body(route, num_loops=depth)).json()
        (choice,) = answer["choices"]
        assert choice["num_loops"] == [depth] * 8
        text = choice.get("text") or choice["message"]["content"]
        assert choices.setdefault(depth, text) == text
    assert len(set(choices.values())) == 3


@pytest.mark.parametrize("route", ROUTES)
def test_tokens_that_leave_early_say_so(server: Live, route: str):
    full, early, eager = (
        server.post(route, **body(route, exit_threshold=x)).json()["choices"][0]["num_loops"]
        for x in (0, 0.05, 1)
    )
    assert full == [8] * 8
    assert early[0] == eager[0] == 8  # the prompt's last token runs all loops
    assert eager[1:] == [2] * 7  # to compare two states takes two
    assert sum(eager) < sum(early) < sum(full)


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_tells_the_loops_of_every_token_once(server: Live, route: str):
    asked = body(route, exit_threshold=0.05, return_token_ids=True)
    whole = server.post(route, **asked).json()["choices"][0]
    pieces = [chunk["choices"][0] for chunk in server.stream(route, **asked)]
    assert [n for piece in pieces for n in piece["num_loops"]] == whole["num_loops"]
    for piece in pieces:
        assert len(piece["num_loops"]) == len(piece.get("token_ids", []))


def test_a_piece_whose_text_is_held_back_still_tells_its_loops(server: Live):
    """Every piece is the beginning of a stop string, until the end."""
    text = server.complete(max_tokens=4, ignore_eos=True)["choices"][0]["text"]
    asked = {"max_tokens": 4, "ignore_eos": True, "stop": [text + "!"], "num_loops": 8}
    route = ROUTES[0]
    pieces = [c["choices"][0] for c in server.stream(route, **body(route, **asked))]
    assert [n for piece in pieces for n in piece["num_loops"]] == [8] * 4


@pytest.mark.parametrize("route", ROUTES)
def test_who_does_not_ask_gets_openais_answer(server: Live, route: str):
    assert "num_loops" not in server.post(route, **body(route)).json()["choices"][0]
    shown = server.post(route, **body(route, return_token_ids=True)).json()["choices"][0]
    assert shown["num_loops"] == [8] * len(shown["token_ids"])


@pytest.mark.parametrize("route", ROUTES)
def test_a_depth_that_is_not_there_is_refused(server: Live, route: str):
    error = server.refusal(route, **body(route, num_loops=9))
    assert error["param"] == "num_loops"
    assert error["message"] == "num_loops must be at most max_num_loops (8), got 9"
    for name, value in {"num_loops": 0, "exit_threshold": 1.5}.items():
        assert server.refusal(route, **body(route, **{name: value}))["param"] == name
    for name, value in {"num_loops": 2.5, "exit_threshold": "0.1"}.items():
        assert server.refusal(route, **body(route, **{name: value}))["param"] == name


def test_a_plain_model_refuses_depth():
    with plain_server() as server:
        for route in ROUTES:
            for name, value in {"num_loops": 1, "exit_threshold": 0.1}.items():
                error = server.refusal(route, **body(route, **{name: value}))
                assert error["param"] == name
                assert error["message"].startswith(f"{name} needs a loop model")
            shown = server.post(route, **body(route, return_token_ids=True)).json()
            assert "num_loops" not in shown["choices"][0]
        assert "core_applications_total" not in metrics(server)


def test_deltas_of_the_engine_add_up(server: Live):
    async def collect() -> tuple[list[int], list[int], list[int]]:
        params = SamplingParams(temperature=0, max_tokens=9, exit_threshold=0.05, ignore_eos=True)
        tokens: list[int] = []
        loops: list[int] = []
        delta = params.with_(output_kind=OutputKind.DELTA)
        async for output in server.llm.generate(PROMPT, delta):
            tokens += output.outputs[0].token_ids
            loops += output.outputs[0].num_loops or []
        async for output in server.llm.generate(PROMPT, params):
            last = output.outputs[0]
        assert last.token_ids == tokens
        return tokens, loops, last.num_loops

    tokens, loops, whole = asyncio.run(collect())
    assert len(tokens) == 9 and loops == whole


def test_metrics_count_a_token_once_however_many_steps_it_takes():
    """Four requests of depth 1 to 8 together: their loops, and each token in one step."""
    sink = ListSink()
    with loop_server(sinks=[sink]) as server:

        async def ask() -> None:
            client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")
            await asyncio.gather(*(one(client, depth) for depth in (1, 2, 4, 8)))
            await client.close()

        async def one(client: openai.AsyncOpenAI, depth: int) -> None:
            await client.completions.create(
                model=server.server.model_name,
                prompt=PROMPT,
                max_tokens=6,
                temperature=0,
                extra_body={"num_loops": depth, "ignore_eos": True},
            )

        before = metrics(server)
        asyncio.run(ask())
        server.wait_until_idle()
        seen = metrics(server)
        forward = [e.data for e in sink.events if e.name == "step.forward"]
    assert before["core_applications_total"] == before["token_loops_total"] == 0
    computed = len(PROMPT) + 6 - 1  # the last token of an answer is not read any more
    assert seen["token_loops_total"] == (1 + 2 + 4 + 8) * computed
    assert 8 * 6 <= seen["core_applications_total"] <= (1 + 2 + 4 + 8) * 6
    assert seen["iteration_tokens_total_sum"] == 4 * computed
    assert sum(d["num_prefill_tokens"] for d in forward) == 4 * len(PROMPT)
    assert sum(d["num_decode_tokens"] for d in forward) == 4 * 5
    for name in ("core_applications", "token_loops"):
        assert sum(d[name] for d in forward) == seen[f"{name}_total"]
    assert seen["prompt_tokens_total"] == 4 * len(PROMPT)
    assert seen["generation_tokens_total"] == 4 * 6


def mixed_load(server: Live, num_requests: int, seed: int) -> int:
    """Streams of mixed depth, of which some are left early; how many were."""
    rng = random.Random(seed)
    left = 0

    async def one(client: openai.AsyncOpenAI, number: int) -> None:
        nonlocal left
        prompt = PROMPT * rng.randint(1, 6) if rng.random() < 0.5 else f"{number} {PROMPT}"
        depth, threshold = rng.choice([1, 2, 4, 8]), rng.choice([None, None, 0.05])
        tokens, stay = rng.randint(1, 24), rng.choice([None, None, 0, 1, 3])
        extra = {"num_loops": depth, "ignore_eos": True, "exit_threshold": threshold}
        await asyncio.sleep(rng.random() / 5)
        stream = await client.completions.create(
            model=server.server.model_name,
            prompt=prompt,
            max_tokens=tokens,
            temperature=0,
            stream=True,
            extra_body=extra,
        )
        loops: list[int] = []
        async with stream:
            async for chunk in stream:
                loops += chunk.choices[0].num_loops  # type: ignore[attr-defined]
                if stay is not None and len(loops) > stay:
                    left += 1
                    return
        assert len(loops) == tokens and max(loops) == depth
        assert threshold is not None or min(loops) == depth

    async def load() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            await asyncio.gather(*(one(client, number) for number in range(num_requests)))

    asyncio.run(load())
    return left


TINY = {"num_kv_blocks": 10, "max_num_seqs": 6, "max_num_batched_tokens": 64}


def test_streams_of_mixed_depth_that_are_left_early_leak_nothing():
    with loop_server(**TINY) as server:
        assert mixed_load(server, 14, seed=0) >= 2
        server.wait_until_idle()


@pytest.mark.slow
def test_a_long_mixed_load_leaks_nothing():
    with loop_server(**TINY, debug=True) as server:
        for seed in range(8):
            assert mixed_load(server, 60, seed) >= 8
            server.wait_until_idle()
        assert server.llm.engine.scheduler.num_preemptions > 0, "a cache meant to be too small"
