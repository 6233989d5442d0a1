"""Which workers a request visits: a real router before scripted workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fleet_fakes import (
    DONE,
    Body,
    Fakes,
    Fleeting,
    answer,
    event,
    gone,
    refusal,
    run,
    stream,
    until,
)

from minifer.config import EngineConfig
from minifer.routing.policy import Role
from minifer.serving.disaggregation.router import PrefillStage
from minifer.serving.disaggregation.split import Split
from minifer.serving.disaggregation.ticket import TICKET_HEADER, TOKEN_HEADER
from minifer.serving.replicas.replica import Replica
from minifer.serving.replicas.run import open_deployment
from minifer.serving.replicas.settings import ReplicaSettings
from minifer.serving.settings import ServerSettings

PROMPT = "a prompt that is longer than a block of sixteen tokens"
INTERNAL = "/internal/prefill/completions"
COMPLETE = "/v1/completions"
TOKEN = "the workers' token"


class Workers(Fakes):
    """Remembers which headers came with each request."""

    def __init__(self) -> None:
        super().__init__()
        self.headers: list[httpx.Headers] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            self.headers.append(request.headers)
        return await super().handle_async_request(request)

    @property
    def tickets(self) -> list[str | None]:
        """What each decode worker was given."""
        pairs = zip(self.log, self.headers, strict=True)
        return [h.get(TICKET_HEADER) for (name, _), h in pairs if name.startswith("decode")]


@asynccontextmanager
async def deployment(split: str = "1:1", **stage: Any) -> AsyncIterator[Fleeting]:
    fakes = Workers()
    replicas = [Replica(name, role) for name, role in Split.of(split).roles.items()]
    async with open_deployment(
        replicas,
        EngineConfig(model="minifer-tiny"),
        ServerSettings(),
        ReplicaSettings(router="round_robin", health_interval=0.01, wait_timeout=5.0),
        start=fakes.start,
        transport=fakes,
        before=PrefillStage(TOKEN, **stage),
    ) as opened:
        fleeting = Fleeting(fakes, opened)
        try:
            yield fleeting
        finally:
            await fleeting.http.aclose()
            await until(lambda: not any(r.num_open for r in opened.supervisor.replicas))
            states = opened.fleet.router.tracker.replicas()
            assert [s.num_requests for s in states] == [0] * len(states)
            assert [s.prefill_tokens for s in states] == [0] * len(states)


def ticket(name: str | None = "a ticket", *more: Any) -> httpx.Response:
    return stream(event({"ticket": name}), *more, DONE)


def outcomes(workers: Fleeting) -> dict[str, float]:
    names = ("begun", "local", "refused", "busy", "lost", "no_worker")
    counts = {name: workers.count("hand_overs", outcome=name) for name in names}
    return {name: count for name, count in counts.items() if count}


def test_a_prompt_is_computed_by_the_one_and_answered_by_the_other():
    async def main() -> None:
        async with deployment() as workers:
            fakes = workers.fakes
            fakes.script("prefill-0", ticket())
            fakes.script("decode-0", answer("text"))
            said = await workers.complete(PROMPT, max_tokens=3)
            assert said.json()["choices"][0]["text"] == "text"
            assert said.headers["x-minifer-replica"] == "decode-0"
            assert fakes.log == [("prefill-0", INTERNAL), ("decode-0", COMPLETE)]
            assert fakes.bodies[0] == fakes.bodies[1]
            assert json.loads(fakes.bodies[0]) == {"prompt": PROMPT, "max_tokens": 3}
            assert fakes.tickets == ["a ticket"]
            assert [headers[TOKEN_HEADER] for headers in fakes.headers] == [TOKEN] * 2
            assert outcomes(workers) == {"begun": 1}

    run(main())


def test_chats_go_the_same_way():
    async def main() -> None:
        async with deployment() as workers:
            workers.fakes.script("prefill-0", ticket())
            await workers.chat("hello there, how are you today?")
            routes = ["/internal/prefill/chat/completions", "/v1/chat/completions"]
            assert [path for _, path in workers.fakes.log] == routes

    run(main())


def test_a_prompt_with_no_full_block_stays_where_it_is():
    async def main() -> None:
        async with deployment(min_tokens=40) as workers:
            fakes = workers.fakes
            fakes.script("prefill-0", ticket())
            for length in (1, 16, 17, 39):
                await workers.complete("x" * length)
            assert fakes.asked == ["decode-0"] * 4 and fakes.tickets == [None] * 4
            await workers.complete("y" * 40)
            assert fakes.asked[4:] == ["prefill-0", "decode-0"]
            assert outcomes(workers) == {"local": 4, "begun": 1}
        async with deployment() as workers:
            workers.fakes.script("prefill-0", ticket())
            await workers.complete("x" * 16)
            await workers.complete("y" * 17)
            assert workers.fakes.asked == ["decode-0", "prefill-0", "decode-0"]

    run(main())


@pytest.mark.parametrize(
    ("lines", "outcome"),
    [
        ([ticket(None)], "refused"),
        ([refusal(400, "bad")], "refused"),
        ([refusal(429, "queue_full")], "busy"),
        ([refusal(503, "shutting_down")], "busy"),
        ([gone()], "lost"),
        ([stream()], "lost"),
        ([stream(gone())], "lost"),
        ([stream(b"nonsense\n\n")], "lost"),
        ([stream(event({"no": "ticket"}))], "lost"),
        ([httpx.ConnectError("refused")], "lost"),
    ],
)
def test_without_a_ticket_the_decode_worker_computes_the_prompt(lines: list[Any], outcome: str):
    async def main() -> None:
        async with deployment() as workers:
            workers.fakes.script("prefill-0", *lines)
            said = await workers.complete(PROMPT)
            assert said.status_code == 200
            assert workers.fakes.tickets == [None]
            expected = {outcome: 1} | ({} if outcome == "refused" else {"no_worker": 1})
            assert outcomes(workers) == expected

    run(main())


def test_a_worker_that_says_nothing_is_waited_for_so_long():
    async def main() -> None:
        async with deployment(ask_timeout=0.05) as workers:
            forever = asyncio.Event()
            workers.fakes.script("prefill-0", stream(forever.wait))
            said = await workers.complete(PROMPT)
            assert said.status_code == 200 and workers.fakes.tickets == [None]
            assert outcomes(workers)["lost"] == 1

    run(main())


def test_another_prefill_worker_is_asked_where_one_is_dead_or_full():
    async def main() -> None:
        async with deployment("3:1") as workers:
            workers.fakes.script("prefill-0", gone())
            workers.fakes.script("prefill-1", refusal(429, "queue_full"))
            workers.fakes.script("prefill-2", ticket("the third"))
            await workers.complete(PROMPT)
            assert workers.fakes.asked == ["prefill-0", "prefill-1", "prefill-2", "decode-0"]
            assert workers.fakes.tickets == ["the third"]
            assert outcomes(workers) == {"lost": 1, "busy": 1, "begun": 1}

    run(main())


def test_a_decode_worker_that_dies_is_replaced_and_gets_a_ticket_of_its_own():
    async def main() -> None:
        async with deployment("1:2") as workers:
            workers.fakes.script("prefill-0", ticket("first"), ticket("second"))
            workers.fakes.script("decode-0", gone())
            workers.fakes.script("decode-1", answer("text"))
            said = await workers.complete(PROMPT)
            assert said.json()["choices"][0]["text"] == "text"
            assert workers.fakes.tickets == ["first", "second"]

    run(main())


def test_a_prompt_is_the_prefill_workers_load_until_it_is_computed():
    async def main() -> None:
        async with deployment() as workers:
            computed, answered = asyncio.Event(), asyncio.Event()
            workers.fakes.script("prefill-0", ticket("a", computed.wait))

            async def slowly() -> httpx.Response:
                await answered.wait()
                return answer()

            workers.fakes.script("decode-0", slowly)
            asking = asyncio.create_task(workers.complete(PROMPT))
            await until(lambda: workers.fakes.tickets)
            tracker = workers.server.fleet.router.tracker
            assert tracker["prefill-0"].prefill_tokens == len(PROMPT)
            assert tracker["decode-0"].prefill_tokens == 0
            assert tracker["decode-0"].decode_blocks == 4
            computed.set()
            await until(lambda: tracker["prefill-0"].num_requests == 0)
            assert not asking.done() and tracker["decode-0"].num_requests == 1
            answered.set()
            assert (await asking).status_code == 200

    run(main())


def test_when_the_client_leaves_the_prefill_worker_is_left():
    async def main() -> None:
        async with deployment() as workers:
            forever = asyncio.Event()
            reply = ticket("a", forever.wait)
            body = reply.stream
            assert isinstance(body, Body)
            workers.fakes.script("prefill-0", reply)

            async def never() -> httpx.Response:
                await forever.wait()
                return answer()

            workers.fakes.script("decode-0", never)
            asking = asyncio.create_task(workers.complete(PROMPT))
            await until(lambda: workers.fakes.tickets)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await until(lambda: body.closed)

    run(main())


def test_splits_are_read_and_named():
    assert Split.of("2:1").roles == {
        "prefill-0": Role.PREFILL,
        "prefill-1": Role.PREFILL,
        "decode-0": Role.DECODE,
    }
    for text in ("", "1", "1:", ":1", "1:2:3", "-1:2", "a:b", "0:1", "1:65"):
        with pytest.raises(ValueError, match="disaggregate must be"):
            Split.of(text)
