"""Who answers: minifer in this process, or any engine in a fresh one. Both give runs by task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minifer.perf.speed import worker
from minifer.perf.speed.measures import Task
from minifer.perf.speed.session import Run, Session, StepLaps
from minifer.perf.speed.traffic import Traffic
from minifer.perf.speed.worker import WorkerError

# The tasks of a turn; the engine in this process gets other prompts where it would know the old.
Tasks = Callable[[int], Sequence[Task]]


@dataclass(frozen=True)
class Answers:
    """runs: by task. about: dtype, config, versions and the numbers of `PROCESS`, as known."""

    runs: Mapping[str, Run]
    traffic: Traffic | None = None
    about: Mapping[str, Any] = field(default_factory=dict)


class Here:
    """minifer in this process, its engine kept from turn to turn."""

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        self.session = Session(model, options)
        self._traffic = self.session.traffic()
        self._turn = 0
        self._about = {
            "dtype": self.session.dtype,
            "config": {
                **{name: str(value) for name, value in options.items()},
                "kv_bytes": self.session.kv_bytes,
            },
        }

    def __call__(self, tasks: Tasks) -> Answers:
        runs = {
            task.name: replace(self.session.run(task.asks), repeated=self._turn > 0)
            for task in tasks(self._turn)
        }
        self._turn += 1
        return Answers(runs, self._traffic, self._about)


@dataclass
class Elsewhere:
    """Any engine in a process of its own, a fresh one each turn.

    job: all of it but the cells. Raises `WorkerError` when called and there is no good answer.
    """

    engine: str
    job: Mapping[str, Any]
    python: str | Path | None = None
    timeout: float = 600.0

    def probe(self) -> dict[str, Any]:
        """Versions of what is installed there. Raises `MissingError`."""
        answer = self._ask({"probe": True})
        return dict(answer.get("versions", {}))

    def __call__(self, tasks: Tasks) -> Answers:
        job = {**self.job, "cells": [task.as_cell() for task in tasks(0)]}
        answer = self._ask(job)
        cells = worker.cells_of(answer, job)
        extras = {name: cell.get("extra") or {} for name, cell in cells.items()}
        runs = {
            name: Run(
                cell["started"],
                cell["stamps"],
                cell.get("tokens") or [],
                [StepLaps(ended, tuple(s)) for ended, s in extras[name].get("steps", [])],
                extras[name].get("cached", []),
                extras[name].get("speculation", {}),
            )
            for name, cell in cells.items()
        }
        known = next((e["traffic"] for e in extras.values() if e.get("traffic")), None)
        about = {key: answer.get(key) for key in _ABOUT}
        return Answers(runs, None if known is None else Traffic.from_dict(known), about)

    def _ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        command = worker.command_for(self.engine, self.python)
        threads = self.job["threads"]
        environment = worker.environment_for(self.engine, threads)
        return worker.ask(command, job, timeout=self.timeout, environment=environment)


# What a process tells of itself as a whole, and the units.
PROCESS = {"load_seconds": "s", "compile_seconds": "s", "peak_rss_bytes": "B"}
_ABOUT = ("dtype", "config", "versions", *PROCESS)

__all__ = ["PROCESS", "Answers", "Elsewhere", "Here", "Tasks", "WorkerError"]
