"""`minifer serve --replicas N` as a process, for tests that kill what it starts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx


class Deployment:
    """A router process and its replicas."""

    def __init__(self, count: int | str, *options: str) -> None:
        """count: of replicas, or P:D workers."""
        engines = ["--replicas" if isinstance(count, int) else "--disaggregate", str(count)]
        command = [sys.executable, "-u", "-m", "minifer", "serve", "--model", "minifer-tiny"]
        self.child = subprocess.Popen(
            [*command, "--port", "0", *engines, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.said: list[str] = []
        self._listening = threading.Thread(target=self._listen)
        self._listening.start()
        assert self.child.stdout is not None
        first = self.child.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", first)
        if found is None:
            self.child.wait(30)
            self._listening.join(10)
            raise AssertionError(first + "".join(self.said))
        self.url = found[0]
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def _listen(self) -> None:
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self.said.append(line)

    def replicas(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.http.get("/replicas").json()["replicas"]
        return rows

    def replica(self, name: str) -> dict[str, Any]:
        return next(row for row in self.replicas() if row["name"] == name)

    def all_healthy(self) -> bool:
        return all(row["status"] == "healthy" for row in self.replicas())

    def metric(self, name: str) -> float:
        """The sum of one of the router's numbers over all its labels."""
        text = self.http.get("/metrics").text
        found = re.findall(rf"^minifer_router_{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self.http.post(route, json=body)

    def close(self, number: int = signal.SIGTERM, seconds: float = 40) -> int:
        """End it; its exit status. No process of it is left."""
        pids = [row["pid"] for row in self.replicas() if row["pid"] is not None]
        self.child.send_signal(number)
        status = self.child.wait(seconds)
        self.http.close()
        until(lambda: not any(map(is_running, pids)))
        self._listening.join(10)
        assert self.child.stdout is not None and self.child.stderr is not None
        self.child.stdout.close()
        self.child.stderr.close()
        return status


@contextmanager
def deployment(count: int | str, *options: str) -> Iterator[Deployment]:
    running = Deployment(count, *options)
    try:
        yield running
    finally:
        if running.child.poll() is None:
            running.close()


def is_running(pid: int) -> bool:
    """A zombie does not run."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def until(holds: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)
