"""Replicas are started, watched, replaced and ended; the processes are scripts."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from fleet_fakes import Fakes, answer, fleet, gone, run, until

from minifer.serving.replicas import supervisor as supervisor_module
from minifer.serving.replicas.replica import Status
from minifer.serving.replicas.settings import ReplicaSettings


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(supervisor_module, "STARTING_PERIOD", 0.001)


def statuses(f) -> list[Status]:
    return [replica.status for replica in f.server.supervisor.replicas]


def test_all_are_healthy_before_anybody_is_let_in():
    async def main():
        async with fleet(3) as f:
            assert statuses(f) == [Status.HEALTHY] * 3
        assert all(p.status is not None for ps in f.fakes.processes.values() for p in ps)

    run(main())


def test_one_that_does_not_start_ends_the_others():
    async def main():
        fakes = Fakes()
        fakes.start_errors["b"] = [RuntimeError("replica b: no such model")]
        with pytest.raises(RuntimeError, match="no such model"):
            async with fleet(3, fakes):
                pytest.fail("it must not come to this")
        assert all(p.status is not None for ps in fakes.processes.values() for p in ps)

    run(main())


def test_one_that_starts_and_is_never_well_is_an_error():
    async def main():
        fakes = Fakes()
        fakes.sick.add("b")
        with pytest.raises(RuntimeError, match="b did not become healthy"):
            async with fleet(2, fakes, start_timeout=0.05):
                pytest.fail("it must not come to this")

    run(main())


def test_a_crash_is_followed_by_a_new_process():
    async def main():
        async with fleet() as f:
            a, _ = f.server.supervisor.replicas
            f.fakes.process("a").end(-9)
            await until(lambda: a.generation == 2 and a.is_available)
            assert a.num_restarts == 1 and "-9" in a.last_words
            assert f.count("retries", replica="a", cause="died") == 0

    run(main())


def test_one_that_does_not_stay_up_is_started_less_and_less_often(monkeypatch):
    async def main():
        async with fleet(max_backoff=0.04) as f:
            waits: list[float] = []
            sleep = asyncio.sleep

            async def noted(seconds: float) -> None:
                waits.append(seconds)
                await sleep(0)

            # The supervisor's own: servers of the same loop sleep, too.
            own = SimpleNamespace(**{**vars(asyncio), "sleep": noted})
            monkeypatch.setattr(supervisor_module, "asyncio", own)
            f.fakes.start_errors["a"] = [RuntimeError("no")] * 6
            f.fakes.process("a").end(1)
            while not (
                len(f.fakes.processes["a"]) == 2 and f.server.supervisor.replicas[0].is_available
            ):
                await sleep(0)
            monkeypatch.undo()
            between = [wait for wait in waits if wait != supervisor_module.STARTING_PERIOD]
            assert between[:7] == [0, 0.01, 0.02, 0.04, 0.04, 0.04, 0.04]

    run(main())


def test_one_that_answers_no_health_check_is_replaced():
    async def main():
        async with fleet(health_threshold=3) as f:
            first = f.fakes.process("a")
            f.fakes.sick.add("a")
            await until(lambda: first.status is not None)
            f.fakes.sick.clear()
            await until(lambda: f.server.supervisor.replicas[0].is_available)
            assert f.fakes.process("a") is not first
            assert "3 health checks" in f.server.supervisor.replicas[0].last_words

    run(main())


def test_a_missed_check_or_two_change_nothing():
    async def main():
        async with fleet(health_threshold=1000) as f:
            f.fakes.sick.add("a")
            await asyncio.sleep(0.05)
            assert len(f.server.supervisor.available) == 2
            f.fakes.sick.clear()
            await asyncio.sleep(0.02)
            assert len(f.fakes.processes["a"]) == 1

    run(main())


def test_who_is_suspected_gets_nothing_until_it_answers_a_check():
    async def main():
        async with fleet(health_interval=30, health_threshold=1000) as f:
            a = f.server.supervisor.replicas[0]
            f.fakes.sick.add("a")
            f.server.supervisor.suspect(a)
            assert {(await f.complete()).headers["x-minifer-replica"] for _ in range(4)} == {"b"}
            f.fakes.sick.clear()
            f.server.supervisor.suspect(a)  # asks again at once
            await until(lambda: a.is_available)
            assert a.generation == 1

    run(main())


# -- restarts that lose nothing


def test_a_restart_replaces_all_and_one_at_a_time():
    async def main():
        async with fleet(3) as f:
            left: list[int] = []
            f.server.supervisor.on_down.append(
                lambda _: left.append(len(f.server.supervisor.available))
            )
            restart = asyncio.create_task(f.server.supervisor.restart())
            while not restart.done():
                assert (await f.complete()).status_code == 200
            assert left == [2, 2, 2]
            assert [r.generation for r in f.server.supervisor.replicas] == [2, 2, 2]
            assert [p.num_stops for ps in f.fakes.processes.values() for p in ps] == [1, 0] * 3
            assert statuses(f) == [Status.HEALTHY] * 3

    run(main())


def test_a_restart_waits_for_open_requests():
    async def main():
        async with fleet() as f:
            finish = asyncio.Event()

            async def slow():
                await finish.wait()
                return answer("slow")

            f.fakes.script("a", slow)
            asking = asyncio.create_task(f.complete())
            a = f.server.supervisor.replicas[0]
            await until(lambda: a.num_open == 1)
            restart = asyncio.create_task(f.server.supervisor.restart())
            await until(lambda: a.status is Status.DRAINING)
            for _ in range(3):
                assert (await f.complete()).headers["x-minifer-replica"] == "b"
            assert f.fakes.process("a").num_stops == 0 and not restart.done()
            finish.set()
            assert (await asking).json()["choices"][0]["text"] == "slow"
            await restart
            assert a.generation == 2

    run(main())


def test_a_restart_does_not_wait_longer_than_it_is_told():
    async def main():
        async with fleet(drain_timeout=0.02) as f:

            async def hang():
                await f.fakes.process("a").wait()
                return gone()

            f.fakes.script("a", hang)
            asking = asyncio.create_task(f.complete())
            await until(lambda: f.fakes.asked)
            await f.server.supervisor.restart()
            assert (await asking).status_code == 200, "it was asked for once more"

    run(main())


def test_a_restart_of_the_only_replica_lets_requests_wait():
    async def main():
        async with fleet(1) as f:
            restart = asyncio.create_task(f.server.supervisor.restart())
            while not restart.done():
                assert (await f.complete()).status_code == 200

    run(main())


def test_a_crash_while_it_drains_is_a_restart_too():
    async def main():
        async with fleet() as f:
            a = f.server.supervisor.replicas[0]
            with a.serving():
                restart = asyncio.create_task(f.server.supervisor.restart())
                await until(lambda: a.status is Status.DRAINING)
                f.fakes.process("a").end(-9)
                await restart
            assert a.generation == 2

    run(main())


def test_two_restarts_at_once_take_turns():
    async def main():
        async with fleet() as f:
            await asyncio.gather(*(f.server.supervisor.restart() for _ in range(2)))
            assert [r.generation for r in f.server.supervisor.replicas] == [3, 3]

    run(main())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"health_threshold": 0}, "health_threshold must be an integer of at least 1, got 0"),
        ({"health_interval": 0}, "health_interval must be at least 0.001 seconds, got 0"),
        ({"drain_timeout": -1}, "drain_timeout must be at least 0 seconds, got -1"),
        ({"max_lost": 1.5}, "max_lost must be an integer of at least 1, got 1.5"),
    ],
)
def test_settings_are_checked(settings: dict, said: str):
    with pytest.raises(ValueError, match=said):
        ReplicaSettings(**settings)


def test_people_can_see_how_the_replicas_are():
    async def main():
        async with fleet() as f:
            rows = (await f.http.get("/replicas")).json()["replicas"]
            assert [(r["name"], r["status"], r["restarts"]) for r in rows] == [
                ("a", "healthy", 0),
                ("b", "healthy", 0),
            ]
            assert json.dumps(rows) and rows[0]["pid"] == f.fakes.process("a").pid

    run(main())
