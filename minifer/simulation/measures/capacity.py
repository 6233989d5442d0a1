"""What a search over rates asks, and what it finds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

Measures = Mapping[str, float]


@dataclass(frozen=True)
class Limit:
    """A condition: `measure` is at least `least` and at most `most`. Measures are "attainment" (of
    the SLO), "load" (see `Saturation`), and percentiles such as "ttft_p90", "cold_ttft_p99",
    "itl_p99", "e2e_p50" in seconds. One that has no value holds no condition."""

    measure: str
    least: float = -math.inf
    most: float = math.inf

    def holds(self, measures: Measures) -> bool:
        return self.least <= measures[self.measure] <= self.most


@dataclass(frozen=True)
class Probe:
    """One rate, all seeds together. stopped: given up before the end, so `measures` say no more
    than that it does not hold. unstable: past saturation for most of the seeds."""

    rate: float
    holds: bool
    measures: Measures
    unstable: bool
    stopped: bool = False


@dataclass(frozen=True)
class Capacity:
    """rate: the highest that held, 0 if none did. failed: the lowest that did not, infinity if all
    held. unstable: the run at `rate` was past saturation: the conditions hold and prove nothing.
    probes: in the order they were made."""

    rate: float
    failed: float
    unstable: bool
    probes: tuple[Probe, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; infinity is null."""
        return {
            "rate": self.rate,
            "failed": _finite(self.failed),
            "unstable": self.unstable,
            "probes": [
                {**asdict(p), "measures": {k: _finite(v) for k, v in p.measures.items()}}
                for p in self.probes
            ],
        }

    def at(self, rate: float) -> Probe:
        """Raises `ValueError` for a rate that was not tried."""
        for probe in self.probes:
            if probe.rate == rate:
                return probe
        raise ValueError(f"rate must be one that was tried, got {rate}")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
