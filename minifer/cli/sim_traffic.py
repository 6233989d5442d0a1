"""Options that say what traffic is simulated, and what they mean."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from minifer.cli import session

if TYPE_CHECKING:
    from minifer.perf.load.traces import Trace
    from minifer.simulation.workloads.arrivals import Workload

COUNT = 1_000  # requests or sessions, unless --requests or a trace says otherwise

# Fields of `EngineConfig` that decide who computes what in which step: what a simulation can have.
SIMULATED = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "max_prefill_chunk",
    "scheduling_policy",
    "prefill_ageing",
    "mlfq_quantum",
    "mlfq_starvation_steps",
    "block_size",
    "num_kv_blocks",
    "enable_prefix_caching",
)


def add_traffic_options(
    group: argparse._ArgumentGroup, default: str | None, count: int = COUNT
) -> None:
    """default: the workload without --workload and --trace; None: it is an argument of its own."""
    add = group.add_argument
    if default is not None:
        add("--workload", metavar="NAME", help=f"see `minifer sim workload` (default: {default})")
    add("--trace", type=Path, metavar="FILE", help="replay a trace: see `minifer bench serve`")
    add(
        "--requests",
        type=int,
        metavar="N",
        help=f"requests or sessions (default: {count}; of a trace: all)",
    )
    add("--max-total-len", type=int, metavar="N", help="of a trace: leave out what is longer")
    add("--seed", type=int, default=0, metavar="N", help="of the traffic (default: 0)")


def workload_at(
    arguments: argparse.Namespace, rate: float | None, trace: Trace | None = None
) -> Workload:
    """The traffic of the options. rate: None is the workload's own. trace: of `open_trace`."""
    from minifer.simulation.workloads.named import make_workload
    from minifer.simulation.workloads.traces import trace_workload

    if trace is not None:
        return trace_workload(trace, rate=rate)
    count = COUNT if arguments.requests is None else arguments.requests
    return make_workload(arguments.workload, count, rate, arguments.seed)


def open_trace(arguments: argparse.Namespace) -> Trace | None:
    """The file of --trace, with notes on what it is and what was done to its rows; None without."""
    if arguments.trace is None:
        return None
    from minifer.perf.load.traces import load_trace
    from minifer.simulation.workloads.traces import recognise

    known = recognise(arguments.trace)
    trace = load_trace(arguments.trace).select(arguments.requests, arguments.max_total_len)
    if known is None:
        session.note(f"{arguments.trace} ({trace.format} format) is none of the known public files")
    else:
        session.note(f"{arguments.trace} is {known.name} ({known.licence}, {known.source})")
        if known.tick:
            trace = trace.spread(known.tick, arguments.seed)
            session.note(f"its clock has ticks of {known.tick:g} s: rows are spread over them")
    for count, what in (
        (trace.num_failed, "are failed requests and left out"),
        (trace.num_unsorted, "stood behind a later one; they are sorted"),
        (trace.num_too_long, f"are longer than {arguments.max_total_len} and left out"),
    ):
        if count:
            session.note(f"{count} rows of {arguments.trace} {what}")
    return trace


def check_traffic(arguments: argparse.Namespace, default: str | None = None) -> None:
    """Raises `ValueError` for options that do not go together; sets the default workload."""
    if arguments.trace is not None and arguments.workload is not None:
        raise ValueError("a trace is a workload: --workload and --trace exclude each other")
    if arguments.trace is None and arguments.max_total_len is not None:
        raise ValueError("--max-total-len is for a --trace")
    if arguments.requests is not None and arguments.requests < 1:
        raise ValueError(f"--requests must be at least 1, got {arguments.requests}")
    if arguments.seed < 0:
        raise ValueError(f"--seed must be at least 0, got {arguments.seed}")
    if arguments.trace is None and arguments.workload is None:
        arguments.workload = default


def name_of(arguments: argparse.Namespace) -> str:
    """Of the traffic, for titles."""
    return arguments.trace.name if arguments.trace is not None else str(arguments.workload)
