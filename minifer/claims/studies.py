"""What the simulated claims share: seeds, nodes, and rates as they are printed."""

from __future__ import annotations

import math
from collections.abc import Mapping

from minifer.claims.claim import Settings
from minifer.simulation.measures.search import Capacity


def seeds(settings: Settings, count: int) -> tuple[int, ...]:
    """Seeds of a study: others for another `Settings.seed`, the same for every deployment."""
    return tuple(1_000 * settings.seed + k for k in range(1, count + 1))


def shown(capacity: Capacity, base: Capacity | None = None) -> str:
    """A rate; "≥" if no higher one was tried, "!" where the run is past saturation, so that its
    condition proves nothing."""
    least = "≥" if math.isinf(capacity.failed) else ""
    text = f"{least}{capacity.rate:.2f}{'!' if capacity.unstable else ''}"
    return text if base is None or base is capacity else f"{text} ({change(capacity, base):+.0%})"


def change(capacity: Capacity, base: Capacity) -> float:
    """How much more than `base`: 0.3 is 30 % more. Raises `ValueError` for a base of nothing."""
    if not base.rate:
        raise ValueError("the baseline must serve some rate to be compared with, got 0")
    return capacity.rate / base.rate - 1


def hollow(capacities: Mapping[str, Capacity], legend: str) -> set[tuple[str, str]]:
    """The bars of a panel that must not be read as a success."""
    return {(legend, name) for name, capacity in capacities.items() if capacity.unstable}


PAST_SATURATION = "past saturation: proves nothing"
