"""A busy server: nothing breaks or leaks, and everybody gets the answer they would get alone."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx
import pytest
from soak import GAP, gap_at_divergence, hangs_up, make_body, run


@contextmanager
def server(*options: str) -> Iterator[tuple[str, int]]:
    """`minifer serve` on a free port: its address and process id. Ends it with SIGTERM."""
    command = [sys.executable, "-u", "-m", "minifer", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = ""
        assert process.stdout is not None
        for line in process.stdout:
            said += line
            if address := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            raise AssertionError(f"the server did not start: {said}")
        _until(lambda: httpx.get(f"{address[0]}/health").status_code == 200)
        yield address[0], process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, process.stdout.read()
    finally:
        process.kill()
        process.wait()


def _until(holds: Any, seconds: float = 60) -> None:
    end = monotonic() + seconds
    while True:
        try:
            if holds():
                return
        except httpx.TransportError:
            pass
        assert monotonic() < end, "it took too long"
        sleep(0.05)


def gauge(address: str, name: str) -> float:
    """The sum of one metric over its labels."""
    text = httpx.get(f"{address}/metrics").text
    values = re.findall(rf"^minifer:{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    assert values, f"no metric {name}"
    return sum(map(float, values))


def resident_megabytes(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 1024  # type: ignore[index]


def is_idle(address: str) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return all(gauge(address, name) == 0 for name in names)


def soak(model: str, total: int, concurrency: int, *options: str) -> dict[str, float]:
    """Run the traffic, check everything, return what was counted."""
    with server("--model", model, *options) as (address, pid):
        asyncio.run(run(address, model, concurrency, concurrency, first=total))  # warm
        _until(lambda: is_idle(address))
        before = resident_megabytes(pid)
        busy = asyncio.run(run(address, model, total, concurrency))
        _until(lambda: is_idle(address))
        after = resident_megabytes(pid)
        preemptions = gauge(address, "num_preemptions_total")
        leaked = gauge(address, "kv_cache_usage_perc")
        assert httpx.get(f"{address}/health_generate").status_code == 200
    bad = [r for r in busy if r.status not in (0, 200) or (r.error and r.status)]
    assert not bad, bad[:3]
    done = [r for r in busy if r.status == 200]
    left = [r for r in busy if r.status == 0]
    assert all(hangs_up(r.number) for r in left)
    assert leaked == 0

    greedy = [r for r in done if make_body(r.number, model)[1]["temperature"] == 0]
    seeded = [r for r in done if r not in greedy]
    different, seeded_different = 0, 0
    with server("--model", model, "--no-enable-prefix-caching") as (address, _):
        for result in greedy + seeded:
            (alone,) = asyncio.run(run(address, model, 1, 1, first=result.number))
            same = (alone.texts, alone.finish_reasons) == (result.texts, result.finish_reasons)
            if not same and result in seeded:
                seeded_different += 1
            elif not same:
                different += 1
                gap = gap_at_divergence(address, result.number, model, result.texts[0])
                assert gap < GAP, (result, alone, gap)
    return {
        "requests": total,
        "completed": len(done),
        "hung up": len(left),
        "answered 429 first": sum(r.refused > 0 for r in busy),
        "preemptions": preemptions,
        "greedy compared": len(greedy),
        "greedy different at a gap below 1e-3": different,
        "seeded compared": len(seeded),
        "seeded different": seeded_different,
        "MB resident before": round(before, 1),
        "MB resident after": round(after, 1),
    }


@pytest.mark.slow
def test_a_thousand_requests_of_sixty_four_clients():
    counts = soak("minifer-tiny", 1000, 64, "--num-kv-blocks", "120", "--max-queue", "64")
    print(counts)
    assert counts["preemptions"] > 0 and counts["hung up"] > 20
    assert counts["seeded different"] <= 0.01 * counts["seeded compared"]
    assert counts["MB resident after"] - counts["MB resident before"] < 30


@pytest.mark.slow
def test_a_smaller_run_on_a_real_model(pulled_model):
    counts = soak(str(pulled_model), 60, 12, "--num-kv-blocks", "60")
    print(counts)
    assert counts["hung up"] > 0
