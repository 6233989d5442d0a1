"""Engines are killed in mid-traffic; what everybody got is compared with one engine's answers."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fleet_process import Deployment, deployment, is_running, until
from live import live
from soak import GAP, Result, gap_at_divergence, hangs_up, make_body, run

MODEL = "minifer-tiny"
CLEAR = ("replica_lost", "no_replica")  # codes of errors that say what has happened
CONCURRENCY = 12


class Killer(threading.Thread):
    """Kills a replica that is up, every so many seconds, until it is stopped."""

    def __init__(self, fleet: Deployment, period: float) -> None:
        super().__init__()
        self.pids: list[int] = []
        self._fleet, self._period = fleet, period
        self._stop_now = threading.Event()
        self._rng = random.Random(0)

    def run(self) -> None:
        while not self._stop_now.wait(self._period):
            up = [row for row in self._fleet.replicas() if row["status"] == "healthy"]
            if up:
                pid = self._rng.choice(up)["pid"]
                os.kill(pid, signal.SIGKILL)
                self.pids.append(pid)

    def stop(self) -> None:
        self._stop_now.set()
        self.join()


@contextmanager
def killing(fleet: Deployment, period: float) -> Iterator[Killer]:
    killer = Killer(fleet, period)
    killer.start()
    try:
        yield killer
    finally:
        killer.stop()


def num_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def segments() -> set[str]:
    """Shared memory of minifer's; other programs have their own."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("minifer")}


def code_of(result: Result) -> str | None:
    """Of the error that a request ended with."""
    if result.error is None:
        return None
    try:
        return str(json.loads(result.error)["error"]["code"])
    except ValueError:
        return result.error


def chaos(
    period: float,
    total: int,
    kills: int,
    *options: str,
    engines: int | str = 3,
    count: Callable[[Deployment], dict[str, float]] = lambda _: {},
) -> dict[str, Any]:
    """At least so many requests and kills; what happened, counted.

    engines: replicas, or P:D workers. count: what else is asked before they end.
    """
    shared = segments()
    with deployment(engines, "--num-kv-blocks", "256", *options) as fleet:
        asyncio.run(run(fleet.url, MODEL, CONCURRENCY, CONCURRENCY, first=10**6))  # warm
        files = num_files(fleet.child.pid)
        results: list[Result] = []
        with killing(fleet, period) as killer:
            while len(results) < total or len(killer.pids) < kills:
                part = run(fleet.url, MODEL, 100, CONCURRENCY, first=len(results))
                results += asyncio.run(asyncio.wait_for(part, 300))
        until(fleet.all_healthy)
        until(lambda: not any(row["open_requests"] for row in fleet.replicas()))
        until(lambda: num_files(fleet.child.pid) <= files + 8)
        restarts = fleet.metric("restarts")
        retries = fleet.metric("retries_total")
        assert restarts == len(killer.pids), fleet.said
        assert fleet.metric("replicas_healthy") == len(fleet.replicas())
        counted = count(fleet)
        assert not any(map(is_running, killer.pids))
        assert fleet.close() == 0
        tracebacks = [line for line in fleet.said if "Traceback" in line]
    assert tracebacks == []
    assert segments() <= shared
    return {
        "kills": len(killer.pids),
        "restarts": restarts,
        "retries": retries,
        **counted,
        **judge(results),
    }


def judge(results: list[Result]) -> dict[str, int]:
    """Compare every answer with one engine's. Half an answer must be the half of the right one."""
    counts: Counter[str] = Counter(requests=len(results))
    with live({"num_kv_blocks": 1024}, max_queue=64) as single:
        numbers = [result.number for result in results]
        assert numbers == list(range(len(numbers))), "nobody is forgotten"
        alone = asyncio.run(run(single.url, MODEL, len(numbers), 8, hang_up=False))
        for result, right in zip(results, alone, strict=True):
            assert right.status == 200 and right.error is None, right
            kind = kind_of(result)
            counts[kind] += 1
            if kind == "hung up":
                continue
            if not agrees(result, right, whole=kind == "complete"):
                counts["different at a gap below 1e-3"] += 1
                if make_body(result.number, MODEL)[1].get("n", 1) == 1:
                    gap = gap_at_divergence(single.url, result.number, MODEL, result.texts[0])
                    assert gap < GAP, (result, right, gap)
    return dict(counts)


def agrees(result: Result, right: Result, whole: bool) -> bool:
    """Is it the right answer; of one that was broken off, the beginning of it?"""
    if whole:
        return (result.texts, result.finish_reasons) == (right.texts, right.finish_reasons)
    pairs = zip(right.texts, result.texts, strict=False)
    return all(full.startswith(text) for full, text in pairs)


def kind_of(result: Result) -> str:
    """How a request ended; an assertion that it is one of the ways it may."""
    if result.status == 0:
        assert hangs_up(result.number)
        return "hung up"
    code = code_of(result)
    if code is None:
        assert result.status == 200
        return "complete"
    assert code in CLEAR, result
    assert result.status in (200, 502, 503), result
    return f"ended by {code} " + ("in its stream" if result.status == 200 else "with a status")
