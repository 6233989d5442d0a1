"""Ranks 1 … p − 1: processes that rank 0, the engine's own process, starts and ends.

Each is a `python -m minifer.execution.parallel.worker` with one end of a socket pair::

    rank 0                       rank 1 … p − 1
    order ─────────────────────▶ load my part of the weights
           ◀──────────── loaded
    meet ──────────────────────▶ join a process group, as rank 0 does
           ◀─────────────── met
    step ──────────────────────▶ forward: all-reduces with everybody
    (closes its end, or dies) ─▶ end

A rank that fails says so and ends. One that dies closes its socket and its connections, so that
everybody else's next all-reduce fails at once; one that hangs is given up after a timeout.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from minifer.execution.parallel.group import Group
from minifer.execution.parallel.messages import encoded, receive

LOAD_TIMEOUT = 600.0  # seconds a rank may take to load its part
PATIENCE = 5.0  # seconds a rank gets to end by itself
_REPORT = 1.0  # seconds the ranks get to say what went wrong


class RankError(RuntimeError):
    """A rank is gone, and with it a part of the weights and of the KV cache."""


class Process(Protocol):
    """What is asked of a rank's process: a part of `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


@dataclass
class Rank:
    """One of the others, and our end of its socket."""

    number: int
    process: Process
    channel: socket.socket


def start_rank(number: int, environment: Mapping[str, str]) -> Rank:
    """A process with nothing to do yet. environment: added to ours."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = (sys.executable, "-P", "-m", "minifer.execution.parallel.worker")
        try:
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **environment},
                process_group=0,  # Ctrl-C in our terminal is for us
            )
        except BaseException:
            ours.close()
            raise
    return Rank(number, process, ours)


class Ranks:
    """All ranks but 0, from their start to their end.

    orders: to each of them, what `worker.build` reads. timeout: seconds for every message after
    loading. environment: added to ours. Whoever drops this without `close`, by an exception or the
    end of the program, ends them too. Raises `RankError` when one cannot load its part, saying why;
    none is left behind then.
    """

    def __init__(
        self, orders: Sequence[Mapping[str, Any]], timeout: float, environment: Mapping[str, str]
    ) -> None:
        self.size = 1 + len(orders)
        self._ranks: list[Rank] = []
        weakref.finalize(self, _end, self._ranks, PATIENCE)
        try:
            for number, order in enumerate(orders, start=1):
                rank = start_rank(number, environment)
                self._ranks.append(rank)
                rank.channel.settimeout(timeout)
                with suppress(OSError):  # of one that is gone already, `_wait_for` tells
                    rank.channel.sendall(encoded(order))
            for rank in self._ranks:
                self._wait_for("loaded", rank, LOAD_TIMEOUT)
                rank.channel.settimeout(timeout)
        except BaseException:
            self.close(patience=0)
            raise

    def _wait_for(self, done: str, rank: Rank, timeout: float) -> None:
        rank.channel.settimeout(timeout)
        with suppress(OSError, EOFError):
            answer = receive(rank.channel)
            if done in answer:
                return
            raise RankError(self._failed(rank, answer["error"]))
        raise RankError(self._fate(rank))

    @property
    def pids(self) -> list[int]:
        """Of the processes, by rank."""
        return [rank.process.pid for rank in self._ranks]

    def meet(self, group: Group, timeout: float, own_gpus: bool) -> None:
        """Connect rank 0's group with theirs.

        They find each other through a file, which is gone when all have: no port is open to
        anybody who asks. Raises `RankError` when they do not come.
        """
        with tempfile.TemporaryDirectory(prefix="minifer-ranks-") as folder:
            meeting = str(Path(folder) / "addresses")
            try:
                self.tell(encoded({"meeting": meeting}))
                group.connect(dist.FileStore(meeting, self.size), timeout, own_gpus)
            except (OSError, RuntimeError) as error:
                raise RankError("; ".join(self.fates()) or str(error)) from error
            for rank in self._ranks:
                self._wait_for("met", rank, timeout)

    def tell(self, message: bytes) -> None:
        """Send the same to all. Raises `OSError` when one is gone or does not read."""
        for rank in self._ranks:
            rank.channel.sendall(message)

    def ended(self) -> list[str]:
        """A sentence for each rank whose process is not there any more. Any thread may ask."""
        known = [(rank, rank.process.poll()) for rank in list(self._ranks)]
        return [self._ended(rank, status) for rank, status in known if status is not None]

    def fates(self) -> list[str]:
        """A sentence for each rank that has failed or ended, once it says so; a moment is given."""
        silent = {rank.channel: rank for rank in self._ranks}
        deadline = time.monotonic() + _REPORT
        sentences: list[str] = []
        while silent and (left := deadline - time.monotonic()) > 0:
            for channel in select.select(list(silent), [], [], left)[0]:
                sentences.append(self._fate(silent.pop(channel)))
        return sentences

    def _fate(self, rank: Rank) -> str:
        rank.channel.settimeout(_REPORT)
        try:
            return self._failed(rank, receive(rank.channel)["error"])
        except TimeoutError:
            return f"rank {rank.number} of {self.size} did not answer"
        except (OSError, EOFError):
            pass
        try:
            status = rank.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return f"rank {rank.number} of {self.size} hung up"
        return self._ended(rank, status)

    def _ended(self, rank: Rank, status: int) -> str:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"rank {rank.number} of {self.size} {how}"

    def _failed(self, rank: Rank, error: str) -> str:
        return f"rank {rank.number} of {self.size} failed with {error}"

    def close(self, patience: float = PATIENCE) -> None:
        """End them: they get some seconds, then they are killed. Safe to call twice."""
        _end(self._ranks, patience)


def _end(ranks: list[Rank], patience: float) -> None:
    for rank in ranks:
        rank.channel.close()
    deadline = time.monotonic() + patience
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()
    ranks.clear()
