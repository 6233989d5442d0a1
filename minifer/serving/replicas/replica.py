"""One replica as its supervisor and its router see it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from minifer.routing.policy import Role


class Process(Protocol):
    """What is asked of `ReplicaProcess`; tests bring their own."""

    url: str

    @property
    def pid(self) -> int: ...

    @property
    def status(self) -> int | None: ...

    async def wait(self) -> int: ...

    async def stop(self, patience: float) -> None: ...

    def cut_short(self) -> None: ...

    async def kill(self) -> None: ...


class Status(Enum):
    STARTING = "starting"  # no process yet, or it is loading
    HEALTHY = "healthy"
    DRAINING = "draining"  # finishes what it has, gets nothing new
    DEAD = "dead"  # its process is gone; another one will be started
    STOPPED = "stopped"  # and none will


@dataclass(eq=False)
class Replica:
    """A place for one engine process after another.

    arguments, environment: of its `minifer serve`. generation: how many processes it has had.
    num_open: requests there now. is_suspect: a connection to it broke, and it has not answered a
    health check since. last_words: why the last process ended.
    """

    name: str
    role: Role = Role.MIXED
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    status: Status = Status.STARTING
    process: Process | None = None
    generation: int = 0
    num_open: int = 0
    num_restarts: int = 0
    is_suspect: bool = False
    last_words: str = ""

    @property
    def is_available(self) -> bool:
        """May a new request be sent there?"""
        return self.status is Status.HEALTHY and not self.is_suspect

    @property
    def is_coming(self) -> bool:
        """Will it be available without anybody doing something about it?"""
        return self.is_suspect or self.status in (Status.STARTING, Status.DRAINING, Status.DEAD)

    @property
    def incarnation(self) -> tuple[str, int]:
        """One process of it: what was tried there may work on the next."""
        return self.name, self.generation

    @property
    def url(self) -> str:
        """Of the running process. Raises `RuntimeError` when there is none."""
        if self.process is None:
            raise RuntimeError(f"{self.name} has no process")
        return self.process.url

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """While a request is there."""
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, for people who look."""
        return {
            "name": self.name,
            "role": self.role.value,
            "status": "suspect" if self.is_suspect else self.status.value,
            "url": None if self.process is None else self.process.url,
            "pid": None if self.process is None else self.process.pid,
            "open_requests": self.num_open,
            "restarts": self.num_restarts,
            "last_words": self.last_words or None,
        }
