"""The highest rate that a deployment can take: bisection, with everything else held the same.

Every rate, and every deployment that is compared, sees the same requests (common random numbers):
what differs between two results is what was changed, not luck. A rate counts only with its seeds
together, after a warm-up, and a run past saturation is said to be one: a condition on a median may
hold there, at any rate.

A study is a frozen value that processes can be given. Conditions are `Limit`s on its measures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Protocol

from minifer.simulation.cluster import Cluster
from minifer.simulation.measures.capacity import Capacity, Limit, Measures, Probe
from minifer.simulation.measures.metrics import Slo, counted, meets, statistic
from minifer.simulation.measures.pool import new_pool
from minifer.simulation.measures.saturation import saturation_of
from minifer.simulation.result import RequestRecord, SimulationResult
from minifer.simulation.simulator import simulate
from minifer.simulation.workloads.arrivals import Arrival, Workload
from minifer.simulation.workloads.named import make_workload

__all__ = [
    "Capacity",
    "Limit",
    "Measures",
    "Probe",
    "Study",
    "Traffic",
    "find_capacities",
    "find_capacity",
]


class Traffic(Protocol):
    """Makes a workload for a rate: `functools.partial(cold_warm, seconds=600)`, for example."""

    def __call__(self, rate: float, *, seed: int) -> Workload: ...


@dataclass(frozen=True)
class Study:
    """One deployment under one kind of traffic.

    workload: a name of `workloads.named`, or what makes one, which must be picklable to be
    shared by processes. count: requests or sessions, for a name. slo: what "attainment"
    means. warmup: seconds that do not count. per_node: rates are of one node.
    """

    cluster: Cluster
    workload: str | Traffic
    count: int = 1_000
    slo: Slo = field(default_factory=dict)
    warmup: float = 0.0
    per_node: bool = False

    def requests(self, rate: float, seed: int) -> Workload:
        """The traffic at a rate; requests scale with the nodes where rates do, or five nodes have
        served them all before a queue can build up."""
        nodes = len(self.cluster.nodes) if self.per_node else 1
        if isinstance(self.workload, str):
            return make_workload(self.workload, self.count * nodes, rate * nodes, seed)
        return self.workload(rate * nodes, seed=seed)

    def run(self, rate: float, seed: int) -> SimulationResult:
        """One run, to its end."""
        return simulate(self.requests(rate, seed), self.cluster)


def find_capacity(
    study: Study,
    limits: Sequence[Limit],
    *,
    low: float = 0.05,
    high: float = 12.0,
    tolerance: float = 0.02,
    seeds: Sequence[int] = (1, 2, 3, 4, 5),
    every_seed: bool = False,
    pool: Executor | None = None,
) -> Capacity:
    """The highest rate in [low, high] at which every limit holds.

    The measures are means over the seeds; every_seed: each seed must hold on its own. tolerance:
    the search ends when `failed` ÷ `rate` is at most 1 more than it. pool: runs the seeds of a
    rate side by side. It is taken for granted that what holds at a rate holds below it.

    Raises `ValueError` for an empty range, no limits, no seeds or a tolerance that is not above 0.
    """
    if not 0 < low < high < math.inf:
        raise ValueError(f"low and high must be 0 < low < high, got {low} and {high}")
    if not limits or not seeds or not tolerance > 0:
        raise ValueError(
            "a search needs limits, seeds and a tolerance above 0, got "
            f"{len(limits)}, {len(seeds)} and {tolerance}"
        )
    probes: list[Probe] = []

    def holds(rate: float) -> bool:
        probes.append(_probe(study, limits, rate, seeds, every_seed, pool))
        return probes[-1].holds

    if not holds(low):
        return Capacity(0.0, low, False, tuple(probes))
    if holds(high):
        return Capacity(high, math.inf, probes[-1].unstable, tuple(probes))
    best, worst = low, high
    while worst / best > 1 + tolerance:
        middle = math.sqrt(best * worst)
        best, worst = (middle, worst) if holds(middle) else (best, middle)
    unstable = next(probe.unstable for probe in probes if probe.rate == best)
    return Capacity(best, worst, unstable, tuple(probes))


def find_capacities(
    studies: Mapping[str, Study],
    limits: Sequence[Limit],
    *,
    processes: int | None = None,
    low: float = 0.05,
    high: float = 12.0,
    tolerance: float = 0.02,
    seeds: Sequence[int] = (1, 2, 3, 4, 5),
    every_seed: bool = False,
) -> dict[str, Capacity]:
    """A search for each study, side by side. processes: None is one a core, 1 stays in this one.

    The same results whatever `processes` is. Raises as `find_capacity`.
    """
    options = {
        "low": low,
        "high": high,
        "tolerance": tolerance,
        "seeds": tuple(seeds),
        "every_seed": every_seed,
    }
    if processes == 1 or len(studies) <= 1:
        return {name: find_capacity(s, limits, **options) for name, s in studies.items()}  # type: ignore[arg-type]
    with new_pool(processes) as pool:
        futures = {
            name: pool.submit(find_capacity, s, tuple(limits), **options)  # type: ignore[arg-type]
            for name, s in studies.items()
        }
        return {name: future.result() for name, future in futures.items()}


# -- one rate


def _probe(
    study: Study,
    limits: Sequence[Limit],
    rate: float,
    seeds: Sequence[int],
    every_seed: bool,
    pool: Executor | None,
) -> Probe:
    names = tuple(limit.measure for limit in limits)
    allowed = _missed_allowed(limits, 1 if every_seed else len(seeds))
    jobs = [(study, names, rate, seed, allowed) for seed in seeds]
    runs = list(pool.map(_run, jobs) if pool is not None else map(_run, jobs))
    means = {name: sum(run[name] for run in runs) / len(runs) for name in runs[0]}
    judged = runs if every_seed else [means]
    held = all(limit.holds(measures) for measures in judged for limit in limits)
    return Probe(rate, held, means, means["unstable"] > 0.5, means["stopped"] > 0)


def _missed_allowed(limits: Sequence[Limit], num_seeds: int) -> float:
    """Share of a run's requests from which on no other seed can make the mean hold."""
    least = max((x.least for x in limits if x.measure == "attainment"), default=-math.inf)
    return (1 - least) * num_seeds if least > 0 else math.inf


def _run(job: tuple[Study, Sequence[str], float, int, float]) -> dict[str, float]:
    """The measures of one run, "unstable" and "stopped" (1 or 0) among them."""
    study, names, rate, seed, allowed = job
    workload = study.requests(rate, seed)
    result = simulate(workload, study.cluster, stop=_give_up(study, workload, allowed))
    records = counted(result, study.warmup)
    saturation = saturation_of(result, study.warmup)
    measures = {"unstable": float(saturation.unstable), "stopped": float(result.stopped)}
    for name in names:
        if name == "attainment":
            met = sum(meets(record, study.slo) for record in records)
            measures[name] = -math.inf if result.stopped else met / len(records)
        elif name == "load":
            measures[name] = saturation.load
        else:
            measures[name] = statistic(records, name)
    return measures


def _give_up(study: Study, workload: Workload, allowed: float) -> _GiveUp | None:
    """Only where it is known beforehand which requests come after the warm-up."""
    arrivals = [item for item in workload if isinstance(item, Arrival)]
    if allowed >= 1 or not arrivals or len(arrivals) < len(workload):
        return None
    since = min(arrival.time for arrival in arrivals) + study.warmup
    counting = sum(arrival.time >= since for arrival in arrivals)
    return _GiveUp(study.slo, allowed * counting, since)


class _GiveUp:
    """Ends a run when too many requests have missed the SLO for the rest to make good."""

    def __init__(self, slo: Slo, allowed: float, since: float) -> None:
        self._slo, self._allowed, self._since = slo, allowed, since
        self._missed: set[str] = set()

    def __call__(self, record: RequestRecord) -> bool:
        ended = record.end is not None or bool(record.rejected)
        if ended and record.arrived >= self._since and not meets(record, self._slo):
            self._missed.add(record.request_id)
        return len(self._missed) > self._allowed
