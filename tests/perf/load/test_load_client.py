"""One request: what is sent, when its pieces arrive, and how it can fail."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from virtual import DONE, FakeServer, answer, delta, event, run_virtually, text, usage

from minifer.perf.load import metrics
from minifer.perf.load.client import OpenAIClient, Record


def ask(script: Any, *, endpoint: str = "completions", pieces: Any = (1, 2, 3, 4), **options: Any):
    """Send one request that is due at 0; its record and the server."""
    server = FakeServer(script if callable(script) else lambda body, number: script)
    record = Record(0, 0, 0.0)

    async def main() -> None:
        async with httpx.AsyncClient(transport=server, base_url="http://fake") as http:
            await OpenAIClient(http, endpoint=endpoint, **options).send(record, pieces, 8)

    run_virtually(main())
    return record, server


def test_the_times_of_an_answer_are_those_of_its_chunks() -> None:
    record, _ = ask(answer(0.5, [0.25, 0.125, 1.0], prompt=4, cached=3))
    assert record.chunk_times == [0.5, 0.75, 0.875, 1.875]
    assert metrics.ttft(record) == 0.5
    assert metrics.itl(record) == [0.25, 0.125, 1.0]
    assert metrics.e2e(record) == 1.875
    assert metrics.tpot(record) == (1.875 - 0.5) / 3
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (4, 4, 3)
    assert (record.error, record.finish_reason, record.text) == (None, "length", "xxxx")


def test_the_body_asks_for_token_ids_a_stream_and_usage() -> None:
    _, server = ask(answer(0, []), model="toy", extra={"ignore_eos": True, "temperature": 0})
    assert server.bodies == [
        {
            "model": "toy",
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "temperature": 0,
            "max_tokens": 8,
            "prompt": [1, 2, 3, 4],
        }
    ]
    assert server.paths == ["/v1/completions"]
    assert ask(answer(0, []), pieces=("some", "words"))[1].bodies[0]["prompt"] == "some words"


def test_several_tokens_in_one_chunk_are_one_gap_and_tpot_divides() -> None:
    steps = [(0.5, text("ab")), (0.5, text("cd")), (1.0, text("e", "stop") + usage(4, 5) + DONE)]
    record, _ = ask(steps)
    assert metrics.itl(record) == [0.5, 1.0]
    assert metrics.tpot(record) == 1.5 / 4


def test_events_that_arrive_together_have_the_same_time() -> None:
    record, _ = ask([(0.5, text("a") + text("b", "stop") + usage(4, 2) + DONE)])
    assert record.chunk_times == [0.5, 0.5] and metrics.itl(record) == [0.0]


def test_a_chunk_may_be_cut_anywhere_even_inside_a_character() -> None:
    whole = text("a\u2028é", "stop") + usage(4, 2) + DONE
    for newline in (b"\n", b"\r\n"):
        data = whole.replace(b"\n", newline)
        record, _ = ask([(0.125, bytes([byte])) for byte in data])
        assert (record.error, record.text, record.output_tokens) == (None, "a\u2028é", 2)


def test_a_role_announcement_and_an_empty_end_are_no_tokens() -> None:
    steps = [
        (0.5, delta(role="assistant", content="")),
        (0.5, delta(content="Hi")),
        (0.5, delta(content=" you")),
        (0.25, delta("stop")),
        (0.25, usage(4, 3) + DONE),
    ]
    record, server = ask(steps, endpoint="chat", pieces=("hello", "there"))
    assert server.paths == ["/v1/chat/completions"]
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "hello there"}]
    assert metrics.ttft(record) == 1.0
    assert metrics.itl(record) == [0.5]
    assert metrics.e2e(record) == 1.75  # the end token took its time too
    assert metrics.tpot(record) == 0.375
    assert record.text == "Hi you"


def test_reasoning_and_the_arguments_of_a_call_are_text() -> None:
    call = [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]
    steps = [
        (0.5, delta(reasoning_content="hm")),
        (0.5, delta(tool_calls=call)),
        (0.5, delta("tool_calls") + usage(4, 3) + DONE),
    ]
    assert ask(steps, endpoint="chat", pieces=("x",))[0].chunk_times == [0.5, 1.0]


def test_an_answer_without_any_text_begins_when_it_ends() -> None:
    record, _ = ask([(0.5, text("", "stop") + usage(4, 1) + DONE)])
    assert record.error is None
    assert (metrics.ttft(record), metrics.e2e(record), metrics.tpot(record)) == (0.5, 0.5, None)


def test_without_usage_a_chunk_passes_for_a_token() -> None:
    record, _ = ask([(0.5, text("a")), (0.5, text("b", "stop") + DONE)])
    assert record.output_tokens is None and metrics.num_output_tokens(record) == 2


def refused(status: int) -> Any:
    return lambda body, number: httpx.Response(status, json={"error": {"message": "too many"}})


def unreachable(body: Any, number: int) -> Any:
    raise httpx.ConnectError("refused")


@pytest.mark.parametrize(
    ("script", "kind", "end"),
    [
        (refused(429), "HTTP 429", 0.0),
        (refused(400), "HTTP 400", 0.0),
        (unreachable, "no connection", 0.0),
        ([(0.5, text("a")), (0.5, None)], "disconnected", 1.0),
        ([(0.5, text("a"))], "disconnected", 0.5),
        ([(0.5, text("a")), (9.0, text("b", "stop") + DONE)], "timeout", 4.0),
        ([(0.5, event({"error": {"message": "out"}}) + DONE)], "error in the stream", 0.5),
        ([(0.5, text("a", "error") + DONE)], "finish_reason error", 0.5),
        ([(0.5, text("a", "abort") + DONE)], "finish_reason abort", 0.5),
        ([(0.5, text("a") + DONE)], "finish_reason None", 0.5),
        ([(0.5, b"data: {nonsense\n\n")], "not understood", 0.5),
        ([(0.5, event({"choices": [{"index": 0}]}))], "not understood", 0.5),
        ([(0.5, event([1]))], "not understood", 0.5),
    ],
)
def test_failures_have_kinds(script: Any, kind: str, end: float) -> None:
    record, server = ask(script, timeout=4.0)
    assert (record.error, record.end) == (kind, end)
    assert not metrics.meets(record, {"ttft": 100.0})
    assert server.in_flight == 0 or script is unreachable  # the connection was given back


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="endpoint must be one of completions, chat, got 'x'"):
        OpenAIClient(httpx.AsyncClient(), endpoint="x")
    with pytest.raises(ValueError, match="timeout must be above 0 seconds, got 0"):
        OpenAIClient(httpx.AsyncClient(), endpoint="chat", timeout=0)
