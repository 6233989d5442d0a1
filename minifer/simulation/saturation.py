"""Is a run past what its nodes can do? Then it has no steady state, and its figures no meaning.

Two signs, either is enough:

- offered load: the seconds that the nodes of a role needed, of those in which requests came. From 1
  on they can only fall behind;
- a queue that grows: requests in the system, in the second half of the arrivals against the first.

A median hides both: with shortest-first the small requests are answered in time while the long
ones wait for ever, at any rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minifer.simulation.result import RequestRecord, SimulationResult

_GROWTH = 0.05  # of the arrivals that stay: less is noise of a run that is only busy


@dataclass(frozen=True)
class Saturation:
    """offered: role → busy seconds a node, of the seconds in which requests came. in_system: mean
    requests there, in the first and in the second half of the arrivals. growth: share of the
    arrivals by which that grew. growing: more than chance would have it.
    """

    offered: Mapping[str, float]
    in_system: tuple[float, float]
    growth: float
    growing: bool

    @property
    def load(self) -> float:
        """The largest offered load."""
        return max(self.offered.values(), default=0.0)

    @property
    def unstable(self) -> bool:
        return self.growing or self.load >= 1

    @property
    def reason(self) -> str:
        """Why it is unstable, in words; "" if it is not."""
        reasons = [
            f"{role} nodes are asked for {load:.0%} of what they can do"
            for role, load in self.offered.items()
            if load >= 1
        ]
        if self.growing:
            first, second = self.in_system
            reasons.append(
                f"the queue grows: {first:.0f} requests in the system, then {second:.0f}"
            )
        return "; ".join(reasons)


def saturation_of(result: SimulationResult, warmup: float = 0.0) -> Saturation:
    """warmup: seconds from the first arrival that do not count for the queue."""
    arrivals = [record.arrived for record in result.requests]
    if len(arrivals) < 2 or arrivals[-1] <= arrivals[0]:
        return Saturation({}, (0.0, 0.0), 0.0, False)
    span = arrivals[-1] - arrivals[0]
    offered: dict[str, list[float]] = {}
    for node in result.nodes:
        offered.setdefault(node.role.value, []).append(node.busy_seconds / span)
    start, end = arrivals[0] + warmup, arrivals[-1]
    half = (start + end) / 2
    first = _mean_in_system(result.requests, start, half, result.seconds)
    second = _mean_in_system(result.requests, half, end, result.seconds)
    count = sum(time >= start for time in arrivals)
    growth = 2 * (second - first) / max(1, count)
    return Saturation(
        {role: sum(loads) / len(loads) for role, loads in offered.items()},
        (first, second),
        growth,
        growth > _GROWTH and second - first > math.sqrt(count),
    )


def _mean_in_system(
    records: Sequence[RequestRecord], start: float, end: float, now: float
) -> float:
    """Requests between arrival and end, on average over [start, end]."""
    if end <= start:
        return 0.0
    area = 0.0
    for record in records:
        left = now if record.end is None else record.end
        area += max(0.0, min(left, end) - max(record.arrived, start))
    return area / (end - start)
