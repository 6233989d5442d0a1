"""What the bug clinic's pictures show of scenes, detectors, guards and lengths, as plain values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minifer.course import example
from minifer.faults import registry
from minifer.faults.matrix import demonstrate, observe
from minifer.postprocessing.guards.alarm import Alarm
from minifer.postprocessing.guards.repetition import RepetitionGuard


@dataclass(frozen=True)
class Case:
    """The scene of a fault, on a healthy engine and with it."""

    name: str
    title: str
    healthy: str
    broken: str

    @property
    def text_differs(self) -> bool:
        return self.healthy != self.broken


def cases(names: Sequence[str]) -> list[Case]:
    """The scenes of some faults, played on minifer-tiny."""
    faults = [registry.get(name) for name in names]
    return [Case(f.name, f.title, *demonstrate(example.tiny(), f)) for f in faults]


def tripped_at(text: str) -> int | None:
    """The number of characters after which the engine's guard calls a reply a loop, or None.

    One token a byte, as minifer-tiny has it.
    """
    found: list[str] = []
    alarm = Alarm("repetition", "repetition", "stop", lambda guard, reason: found.append(reason))
    guard = RepetitionGuard(alarm)
    for place, character in enumerate(text, start=1):
        guard.on_token(ord(character), character)
        if found:
            return place
    return None


def completion_lengths(
    rate: float, count: int = 100_000, limit: int = 16_384
) -> NDArray[np.float64]:
    """Modelled lengths of replies: log-normal, median 250; a share `rate` runs into the limit."""
    rng = np.random.default_rng(9)
    lengths: NDArray[np.float64] = np.minimum(
        rng.lognormal(math.log(250), 0.8, count), limit
    ).round()
    lengths[rng.random(count) < rate] = limit
    return lengths


@dataclass(frozen=True)
class WatchedFaults:
    """caught: fault → detectors that rang with it and not without. false_alarms: without any."""

    detectors: list[str]
    caught: dict[str, list[str]]
    false_alarms: int


def watched(names: Sequence[str]) -> WatchedFaults:
    """Who notices which fault on the clinic's workload, without debug mode."""
    quiet = observe(example.tiny(), None, debug=False)
    caught = {}
    for name in names:
        alarms = observe(example.tiny(), registry.get(name), debug=False)
        caught[name] = [who for who, said in alarms.items() if said and not quiet[who]]
    return WatchedFaults(list(quiet), caught, sum(map(len, quiet.values())))
