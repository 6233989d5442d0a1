"""Where a prefix is cached, a request goes: by the replicas' events, or by what was sent there."""

from __future__ import annotations

import asyncio
import json
from itertools import islice

import pytest
from fleet_fakes import Fakes, answer, fleet, run, until
from live import Live, live
from live import until as wait_until

from minifer.routing.kv_events import (
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
    decode,
    encode,
)
from minifer.serving.replicas import kv_feed

PREFIX = "The for statement is used to iterate over the elements of a sequence, and " * 2


def with_feeds(names: str) -> Fakes:
    fakes = Fakes()
    fakes.feeds = {name: asyncio.Queue() for name in names}
    return fakes


def say(fakes: Fakes, name: str, epoch: int, sequence: int, *events: KVEvent) -> None:
    batch = encode(KVEventBatch(name, epoch, sequence, events))
    fakes.feeds[name].put_nowait(f"data: {batch}\n\n".encode())


def affine(count: int = 2, fakes: Fakes | None = None):
    return fleet(count, fakes, router="prefix_affinity")


def test_without_events_a_prefix_stays_where_it_was_sent():
    async def main():
        async with affine(4) as f:
            first = await f.complete(PREFIX)
            assert first.headers["x-minifer-reason"] == "hash"
            for _ in range(3):
                again = await f.complete(PREFIX + "more")
                assert again.headers["x-minifer-reason"] == "prefix"
                assert again.headers["x-minifer-replica"] == first.headers["x-minifer-replica"]
            rows = (await f.http.get("/replicas")).json()["replicas"]
            assert not any(row["kv_is_exact"] for row in rows)

    run(main())


async def keys_of(f, prompt: str) -> tuple[bytes, ...]:
    return (await f.server.reader.read({"prompt": prompt})).prefix_keys


def test_events_say_where_a_prefix_is():
    async def main():
        async with affine(4, with_feeds("abcd")) as f:
            keys = await keys_of(f, PREFIX)
            usual = (await f.complete(PREFIX)).headers["x-minifer-replica"]
            other = next(name for name in "abcd" if name != usual)
            for name in "abcd":
                events = [BlockStored(keys, None)] if name == other else []
                say(f.fakes, name, 1, 1, *events)
                f.fakes.feeds[name].put_nowait(b'event: load\ndata: {"kv_usage":0.2500}\n\n')
            states = f.server.fleet.router.tracker.replicas()
            await until(lambda: all(state.kv_usage == 0.25 for state in states))
            routed = await f.complete(PREFIX)
            assert routed.headers["x-minifer-replica"] == other
            assert routed.headers["x-minifer-reason"] == "prefix"
            text = (await f.http.get("/metrics")).text
            assert f'minifer_router_kv_is_exact{{replica="{other}"}} 1.0' in text
            say(f.fakes, other, 1, 2, BlockRemoved(keys))
            index = f.server.fleet.router.index
            await until(lambda: other not in index.match(keys))
            assert (await f.complete(PREFIX)).headers["x-minifer-reason"] != "prefix"

    run(main())


def test_a_new_process_holds_nothing():
    async def main():
        async with affine(2) as f:
            name = (await f.complete(PREFIX)).headers["x-minifer-replica"]
            keys = await keys_of(f, PREFIX)
            index = f.server.fleet.router.index
            assert index.match(keys) == {name: len(keys)}
            f.fakes.process(name).end(-9)
            await until(lambda: len(f.fakes.processes[name]) == 2)
            assert index.match(keys) == {}
            await until(lambda: len(f.server.supervisor.available) == 2)
            assert name in index.replicas

    run(main())


def test_a_feed_that_breaks_is_opened_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kv_feed, "RECONNECT", 0.01)

    async def main():
        async with affine(2, with_feeds("ab")) as f:
            keys = await keys_of(f, PREFIX)
            index = f.server.fleet.router.index
            say(f.fakes, "a", 1, 1, BlockStored(keys, None))
            await until(lambda: index.match(keys) == {"a": len(keys)})
            f.fakes.feeds["a"].put_nowait(b"data: nonsense\n\n")
            await until(lambda: f.count("kv_snapshots", replica="a") == 2)
            say(f.fakes, "a", 2, 1, BlockStored(keys[:1], None))
            await until(lambda: index.match(keys) == {"a": 1})

    run(main())


def test_events_that_are_missing_are_asked_for_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kv_feed, "RECONNECT", 0.01)

    async def main():
        async with affine(2, with_feeds("ab")) as f:
            keys = await keys_of(f, PREFIX)
            index = f.server.fleet.router.index
            say(f.fakes, "a", 1, 1, BlockStored(keys, None))
            say(f.fakes, "a", 1, 3)
            await until(lambda: f.count("kv_snapshots", replica="a") == 2)
            say(f.fakes, "a", 2, 1)
            await until(lambda: index.match(keys) == {})

    run(main())


def test_what_was_expected_is_compared_with_what_was_reported():
    async def main():
        async with affine(1) as f:
            await f.complete(PREFIX)
            f.fakes.script("a", answer(cached=96))
            await f.complete(PREFIX)
            num_tokens = (await f.server.reader.read({"prompt": PREFIX})).num_tokens
            expected = (num_tokens - 1) // 16 * 16
            assert f.count("cached_tokens_compared", replica="a") == expected > 0
            assert f.count("cached_tokens_reported", replica="a") == 96
            assert f.count("prompt_tokens", replica="a") == 2 * num_tokens

    run(main())


# -- the replica's side


def batches(server: Live, count: int) -> list[KVEventBatch]:
    """The first batches that say something."""
    found: list[KVEventBatch] = []
    with server.http.stream("GET", "/kv_events?replica=r7") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        while len(found) < count:
            line = next(lines)
            if line.startswith('data: {"replica"'):
                batch = decode(line.removeprefix("data: "))
                if batch.events or not found:
                    found.append(batch)
                if len(found) == 1 and count > 1 and not batch.events:
                    server.complete(PREFIX, max_tokens=1)
    wait_until(lambda: server.server.kv_subscription is None)
    return found


def test_a_server_tells_what_its_engine_holds_and_what_changes():
    with live() as server:
        first, second = batches(server, 2)
        assert (first.replica, first.sequence, first.events) == ("r7", 1, ())
        stored = {digest for event in second.events for digest in event.block_hashes}
        (again,) = batches(server, 1)
        assert {digest for event in again.events for digest in event.block_hashes} == stored
        assert again.sequence == 1 and again.epoch > first.epoch
        assert len(stored) == len(PREFIX) // 16
        wait_until(lambda: not server.llm.engine.has_unfinished_requests)


def test_a_new_subscription_ends_the_one_before():
    with live() as server:
        with server.http.stream("GET", "/kv_events?replica=a") as old:
            lines = old.iter_lines()
            next(lines)
            with server.http.stream("GET", "/kv_events?replica=b") as new:
                news = new.iter_lines()
                json.loads(next(news).removeprefix("data: "))
                assert not [line for line in lines if '"replica":"b"' in line], "and it ends"
                assert server.server.kv_subscription is not None
                server.complete(PREFIX, max_tokens=1)
                assert any("BlockStored" in line for line in islice(news, 40))
        wait_until(lambda: server.server.kv_subscription is None)


def test_a_subscriber_has_a_name(server: Live):
    response = server.http.get("/kv_events")
    assert response.status_code == 400 and response.json()["error"]["param"] == "replica"


def test_a_subscription_does_not_hold_up_the_end():
    with live() as server, server.http.stream("GET", "/kv_events?replica=a") as response:
        next(response.iter_lines())
        server.uvicorn.should_exit = True
        server.thread.join(10)
        assert not server.thread.is_alive()
