"""Is a run past what its nodes can do? Then it has no steady state, and its figures no meaning.

Two signs, either is enough:

- a queue that grows: requests that wait for their first token, or on their way to the node that
  decodes for the second one, in the second half of the arrivals against the first;
- offered load, of nodes that prefill only: the seconds they needed, of those in which requests
  came. From 1 on they can only fall behind. Of nodes that decode that says nothing: they are busy
  as soon as one request is there, and a step for many takes hardly longer.

A median hides both: with shortest-first the small requests are answered in time while the long
ones wait for ever, at any rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from minifer.simulation.result import RequestRecord, SimulationResult

# Less than both is taken for noise. On a queue of fixed service times and 1,000 arrivals that flags
# no run at a load of 0.9, 3 of 100 at 0.95, and 97 of 100 at 1.1; of very uneven service times (SCV
# 3.7) 10, 38 and 85: there the queue of a single run does swing so far.
_GROWTH = 0.025  # of the arrivals that stay
_NOISE = 0.5  # of the square root of their number


@dataclass(frozen=True)
class Saturation:
    """queue: mean requests that wait, in the first and in the second half of the arrivals. growth:
    share of the arrivals by which that grew. growing: more than chance would have it. offered:
    role → busy seconds a node, of the seconds in which requests came; of roles that prefill only.
    """

    queue: tuple[float, float]
    growth: float
    growing: bool
    offered: Mapping[str, float]

    @property
    def load(self) -> float:
        """The largest offered load; 0 where all nodes decode."""
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
            first, second = self.queue
            reasons.append(
                f"the queue grows, {first:.0f} requests on average and then {second:.0f}"
            )
        return "; ".join(reasons)


def saturation_of(result: SimulationResult, warmup: float = 0.0) -> Saturation:
    """warmup: seconds from the first arrival that do not count for the queue."""
    arrivals = [record.arrived for record in result.requests]
    if len(arrivals) < 2 or arrivals[-1] <= arrivals[0]:
        return Saturation((0.0, 0.0), 0.0, False, {})
    start, end = arrivals[0] + warmup, arrivals[-1]
    half = (start + end) / 2
    waits = [wait for record in result.requests for wait in _waits(record, result.seconds)]
    first, second = _mean_number(waits, start, half), _mean_number(waits, half, end)
    count = sum(time >= start for time in arrivals)
    growth = 2 * (second - first) / max(1, count)
    growing = growth > _GROWTH and second - first > _NOISE * math.sqrt(count)
    return Saturation(
        (first, second), growth, growing, _offered(result, arrivals[-1] - arrivals[0])
    )


def _waits(record: RequestRecord, now: float) -> Iterator[tuple[float, float]]:
    """When it waited: for its first token, and for the decode node that gives the second."""
    if record.rejected:
        return
    times = record.token_times
    yield record.arrived, now if record.first_token is None else record.first_token
    if len(record.path) > 1 and times and record.output_len > 1:
        yield times[0], times[1] if len(times) > 1 else now


def _mean_number(waits: list[tuple[float, float]], start: float, end: float) -> float:
    """How many wait, on average over [start, end]."""
    if end <= start:
        return 0.0
    area = math.fsum(max(0.0, min(until, end) - max(since, start)) for since, until in waits)
    return area / (end - start)


def _offered(result: SimulationResult, span: float) -> dict[str, float]:
    roles: dict[str, list[float]] = {}
    decoding = {node.role.value for node in result.nodes if node.decode_tokens}
    for node in result.nodes:
        if node.role.value not in decoding:
            roles.setdefault(node.role.value, []).append(node.busy_seconds / span)
    return {role: sum(loads) / len(loads) for role, loads in roles.items()}
