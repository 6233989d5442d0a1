"""Who is sent when: open loop, closed loop, conversations."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from virtual import DONE, FakeServer, VirtualLoop, answer, delta, run_virtually, usage

from minifer.perf.load import metrics
from minifer.perf.load.client import OpenAIClient
from minifer.perf.load.generator import LoadRun, generate_load
from minifer.perf.load.workload import Session, Turn


def sessions(*arrivals: float | None) -> list[Session]:
    return [Session((Turn((1, 2), 4),), arrival) for arrival in arrivals]


def load(
    server: FakeServer, sent: Any, max_concurrency: int | None = None, endpoint: str = "completions"
) -> LoadRun:
    async def main() -> LoadRun:
        async with httpx.AsyncClient(transport=server, base_url="http://fake") as http:
            client = OpenAIClient(http, endpoint=endpoint, timeout=1000.0)
            return await generate_load(client, sent, max_concurrency)

    return run_virtually(main())


def test_an_open_loop_sends_when_due_however_many_are_in_flight() -> None:
    server = FakeServer(lambda body, number: answer(100.0, []))
    run = load(server, sessions(*(i / 8 for i in range(300))))
    assert server.arrived == [i / 8 for i in range(300)]
    assert server.most_in_flight == 300 == max(count for _, count in metrics.in_flight(run.records))
    assert (run.start, run.end) == (0.0, 299 / 8 + 100.0)


def test_an_open_loop_takes_arrivals_in_any_order() -> None:
    server = FakeServer(lambda body, number: answer(0.5, []))
    run = load(server, sessions(2.0, 0.0, 1.0))
    assert server.arrived == [0.0, 1.0, 2.0]
    assert [record.session for record in run.records] == [1, 2, 0]


def test_a_late_client_is_measured_from_when_a_request_was_due() -> None:
    """The client is busy for 3 s from t = 1: the requests due at 2 and 3 leave at 4."""

    def script(body: Any, number: int) -> Any:
        if number == 1:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            loop.now += 3.0
        return answer(0.5, [])

    run = load(FakeServer(script), sessions(0.0, 1.0, 2.0, 3.0))
    assert [record.sent for record in run.records] == [0.0, 1.0, 4.0, 4.0]
    assert metrics.latencies(run)["late"] == [0.0, 0.0, 2.0, 1.0]
    assert metrics.latencies(run)["ttft"] == [0.5, 3.5, 2.5, 1.5]


def test_a_closed_loop_never_has_more_in_flight_than_clients() -> None:
    server = FakeServer(lambda body, number: answer(1.0, []))
    run = load(server, sessions(*[None] * 7), max_concurrency=3)
    assert server.arrived == [0, 0, 0, 1, 1, 1, 2]
    assert server.most_in_flight == 3
    assert metrics.latencies(run)["late"] == [0.0] * 7
    assert run.end == 3.0


def test_a_conversation_sends_its_history_with_the_models_own_answers() -> None:
    def script(body: Any, number: int) -> Any:
        return [(1.0, delta(content=f"reply {number}")), (0, delta("stop") + usage(4, 2) + DONE)]

    turns = (Turn(("hi",), 4), Turn(("and",), 5, 2.0), Turn(("so",), 6, 0.5))
    server = FakeServer(script)
    run = load(server, [Session(turns, 0.0)], endpoint="chat")
    assert server.arrived == [0.0, 3.0, 4.5]  # an answer takes 1 s, then the user thinks
    assert [(r.session, r.turn, r.intended) for r in run.records] == [
        (0, 0, 0.0),
        (0, 1, 3.0),
        (0, 2, 4.5),
    ]
    assert [body["max_tokens"] for body in server.bodies] == [4, 5, 6]
    assert server.bodies[2]["messages"] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "reply 0"},
        {"role": "user", "content": "and"},
        {"role": "assistant", "content": "reply 1"},
        {"role": "user", "content": "so"},
    ]


def test_a_conversation_ends_where_a_turn_fails() -> None:
    def script(body: Any, number: int) -> Any:
        return httpx.Response(429) if number else [(1.0, delta("stop", content="a") + DONE)]

    turns = tuple(Turn((word,), 4) for word in "abcd")
    run = load(FakeServer(script), [Session(turns)], max_concurrency=1, endpoint="chat")
    assert [record.error for record in run.records] == [None, "HTTP 429"]
    assert run.num_unsent == 2


@pytest.mark.parametrize(
    ("arrivals", "concurrency", "message"),
    [
        ([0.0], 4, "open loop: max_concurrency must be None"),
        ([0.0, None], None, "open loop"),
        ([None], None, "max_concurrency must be at least 1, got None"),
        ([None], 0, "max_concurrency must be at least 1, got 0"),
    ],
)
def test_what_is_no_loop_is_refused(arrivals: Any, concurrency: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(FakeServer(lambda body, number: []), sessions(*arrivals), concurrency)
