"""The routing claim on recorded requests: which prompts are cold is what the trace says.

A prompt's stored prefix is what any earlier request of the trace brought, as if the cluster's store
forgot nothing. A request is in time within 1 s and three times what it would take alone: long
prompts may take longer. A rate counts as carried when 95 % are in time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from minifer.claims.claim import Settings, Table
from minifer.perf.load.traces import load_trace
from minifer.simulation.cluster import Cluster, StoreLevel
from minifer.simulation.measures.pool import new_pool
from minifer.simulation.result import RequestRecord
from minifer.simulation.simulator import simulate
from minifer.simulation.steps.times import StepTimes
from minifer.simulation.workloads.arrivals import BLOCK, Arrival
from minifer.simulation.workloads.statistics import blocks_found
from minifer.simulation.workloads.traces import recognise, trace_workload

PATIENCE, TIMES, SHARE = 1.0, 3.0, 0.95
LOWEST, HIGHEST, TOLERANCE = 0.2, 24.0, 0.03  # requests/s


def recorded(path: Path, seed: int) -> list[Arrival]:
    """A trace's prompts at one request a second, with what is stored of each; answers of one token.

    Times that a coarse clock joined are spread. Raises `ValueError` for a trace without blocks.
    """
    trace, known = load_trace(path), recognise(path)
    if known is not None and known.tick:
        trace = trace.spread(known.tick, seed)
    rows = trace_workload(trace, rate=1.0)
    if not any(row.block_names for row in rows):
        raise ValueError(f"trace must hold blocks (hash_ids, Mooncake's format), {path} has none")
    return [
        replace(row, output_len=1, block_names=(), stored_len=found * BLOCK)
        for row, found in zip(rows, blocks_found(rows), strict=True)
    ]


def alone(record: RequestRecord, steps: StepTimes, store: StoreLevel, kv_bytes: float) -> float:
    """Seconds of a prompt that has a node to itself."""
    loaded = record.reused_len
    computing = steps.seconds([(record.prompt_len - loaded, record.prompt_len)])
    return computing + store.latency + loaded * kv_bytes / store.bandwidth


def in_time(cluster: Cluster, rows: Sequence[Arrival], rate: float) -> float:
    """Share of the requests that are in time when they come `rate` times as fast."""
    node = cluster.nodes[0]
    result = simulate([replace(row, time=row.time / rate) for row in rows], cluster)
    met = sum(
        record.ttft is not None
        and record.ttft
        <= PATIENCE + TIMES * alone(record, node.step_times, node.store[-1], cluster.kv_bytes)
        for record in result.requests
    )
    return met / len(result.requests)


def carried(cluster: Cluster, rows: Sequence[Arrival]) -> float:
    """The highest rate at which `SHARE` of the requests are in time, by bisection."""
    low, high = LOWEST, HIGHEST
    while high / low > 1 + TOLERANCE:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if in_time(cluster, rows, middle) >= SHARE else (low, middle)
    return low


def replay(
    deployments: Mapping[str, Cluster], rows: Sequence[Arrival], processes: int
) -> dict[str, float]:
    """Deployment → requests a second."""
    if processes == 1:
        return {name: carried(cluster, rows) for name, cluster in deployments.items()}
    with new_pool(processes) as pool:
        jobs = {name: pool.submit(carried, one, rows) for name, one in deployments.items()}
        return {name: job.result() for name, job in jobs.items()}


def replay_table(
    path: Path, deployments: Mapping[str, Cluster], settings: Settings
) -> tuple[Table, str]:
    """What each deployment carries of a trace, the first being the baseline; and a sentence."""
    rates = replay(deployments, recorded(path, settings.seed), settings.processes)
    base = next(iter(rates.values()))
    rows = tuple((name, rate, f"{rate / base - 1:+.0%}") for name, rate in rates.items())
    title = (
        f"replay of {path.name}: requests/s with {SHARE:.0%} within {PATIENCE:g} s + {TIMES:g}× "
        "the time alone"
    )
    said = ", ".join(f"{name} {rate / base - 1:+.0%}" for name, rate in [*rates.items()][1:])
    return Table(title, {"": "", "requests/s": ".2f", "against the first": ""}, rows), said
