"""Ranks as threads of the test's own process: the whole conversation, without starting Python."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from minifer.engine import Engine
from minifer.execution.parallel import ranks
from minifer.execution.parallel.worker import serve


class RankThread:
    """Looks like a process, as far as `Ranks` asks it."""

    pid = 0

    def __init__(self, channel: socket.socket) -> None:
        self.status: int | None = None
        self._thread = threading.Thread(target=self._run, args=(channel,), daemon=True)
        self._thread.start()

    def _run(self, channel: socket.socket) -> None:
        self.status = serve(channel)

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self._thread.is_alive():
            assert timeout is not None
            raise subprocess.TimeoutExpired("rank", timeout)
        assert self.status is not None
        return self.status

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else self.status

    def kill(self) -> None:
        """Nobody can kill a thread: it ends when its socket and its group are closed."""


@contextmanager
def ranks_as_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every rank that is started in the block is a thread; none of them outlives it."""
    started: list[RankThread] = []

    def start_rank(number: int, environment: Mapping[str, str]) -> ranks.Rank:
        ours, theirs = socket.socketpair()
        started.append(RankThread(theirs))
        return ranks.Rank(number, started[-1], ours)

    monkeypatch.setattr(ranks, "start_rank", start_rank)
    yield
    for thread in started:
        assert thread.wait(10) in (0, 1)


def two_ranks(**options: Any) -> Engine:
    settings = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 64, **options}
    return Engine.from_pretrained("minifer-tiny", tensor_parallel_size=2, **settings)
