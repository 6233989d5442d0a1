"""`minifer sim run`: a deployment under traffic, at one rate, at several, or at the highest."""

from __future__ import annotations

import argparse
import json
import math
from argparse import ArgumentTypeError
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifer.cli.output_files import PICTURES, check_output, save_figure
from minifer.cli.parser import add_command
from minifer.cli.sim_deployment import add_deployment_options, cluster_of, names
from minifer.cli.sim_report import capacity_table, rates_table, run_table
from minifer.cli.sim_traffic import (
    add_traffic_options,
    check_traffic,
    name_of,
    open_trace,
    workload_at,
)

if TYPE_CHECKING:
    from minifer.perf.load.traces import Trace
    from minifer.simulation.cluster import Cluster
    from minifer.simulation.workloads.arrivals import Workload

_WORKLOAD = "azure-short"
_LOW = 1 / 64  # of the rate that a search begins with
_SIMULATED = "simulated"
_RUNS = 3


def add(simulations: Any) -> None:
    parser = add_command(
        simulations,
        "run",
        run,
        summary="a deployment under traffic: TTFT, gaps, goodput, and whether it is stable",
        about="Serve traffic on simulated nodes and print what the requests waited for. With "
        "several rates one line each; with --capacity the highest rate at which that share of "
        "the requests meets the SLO. A run past saturation is flagged: its figures depend on how "
        "long it ran, and are no result. Times are simulated, from the step times that are named.",
        examples=[
            ("sim run --rate 2", "one node, traffic like Azure's conversations"),
            ("sim run --list", "steps and routers that have a name"),
            ("sim run --rate 1,2,3 --slo ttft=1 tpot=0.1 --plot r.png", "three rates, a picture"),
            ("sim run --slo ttft=1 max_itl=0.1 --capacity 0.9", "the highest rate that keeps it"),
            ("sim run --roles prefill=1,decode=2 --link 3", "prefill and decode apart, 3 GB/s"),
            ("sim run --nodes 4 --router prefix_affinity --workload chat", "caches and a router"),
            ("sim run --workload cold-warm --steps cold-warm --nodes 2", "new and old contexts"),
        ],
        code=[
            ("minifer/simulation/simulator.py", "what happens when"),
            ("minifer/simulation/measures/metrics.py", "what each figure means"),
            ("minifer/simulation/measures/saturation.py", "when a run is no result"),
            ("minifer/routing/policies.py", "routers and their options"),
        ],
        prog="minifer sim",
    )
    group = parser.add_argument_group("traffic")
    add_traffic_options(group, _WORKLOAD)
    group.add_argument(
        "--rate", type=_rates, metavar="R,…", help="a second (default: the workload's own)"
    )
    add_deployment_options(parser)
    group = parser.add_argument_group("measuring")
    add_option = group.add_argument
    add_option(
        "--slo",
        nargs="+",
        default=[],
        metavar="NAME=S",
        help="limits: ttft, cold_ttft, warm_ttft, tpot, max_itl, e2e",
    )
    add_option("--warmup", type=float, default=0.0, metavar="S", help="seconds that do not count")
    add_option("--capacity", type=float, metavar="SHARE", help="of requests that meet the SLO")
    add_option("--runs", type=int, metavar="N", help=f"seeds of a search (default: {_RUNS})")
    add_option("--processes", type=int, metavar="N", help="of a search (default: one a core)")
    add_option("--json", type=Path, metavar="FILE", help="write every figure there")
    add_option("--plot", type=Path, metavar="FILE", help="draw it: .png, .svg or .pdf")


def run(arguments: argparse.Namespace) -> int:
    if arguments.list:
        print(names())
        return 0
    _check(arguments)
    from minifer.simulation.measures.metrics import check_warmup, measure, parse_limits
    from minifer.simulation.simulator import check_run, simulate

    slo = parse_limits(arguments.slo)
    trace = open_trace(arguments)
    rates = arguments.rate or [None]
    workloads = [workload_at(arguments, rate, trace) for rate in rates]
    cluster = cluster_of(arguments, workloads[0])
    for workload in workloads:
        check_run(workload, cluster)
        check_warmup(workload, arguments.warmup)
    print(_title(arguments, cluster))
    if arguments.capacity is not None:
        return _search(arguments, cluster, trace, slo)

    runs = {}
    for rate, workload in zip(rates, workloads, strict=True):
        result = simulate(workload, cluster)
        metrics = measure(result, slo, warmup=arguments.warmup, seed=arguments.seed)
        runs[metrics.offered if rate is None else rate] = metrics
    one = len(runs) == 1
    print(run_table(metrics) if one else rates_table(runs))
    if arguments.plot:
        from minifer.simulation.measures import plot

        title = _title(arguments, cluster)
        if one:
            save_figure(plot.draw_run(result, metrics, title, slo), arguments.plot)
        else:
            save_figure(plot.draw_rates(runs, title), arguments.plot)
    _write(arguments, cluster, {"rates": {_key(rate): m.to_dict() for rate, m in runs.items()}})
    return 0


def _key(rate: float) -> str:
    return str(rate) if math.isfinite(rate) else "all at once"


def _search(
    arguments: argparse.Namespace, cluster: Cluster, trace: Trace | None, slo: dict[str, float]
) -> int:
    from minifer.simulation.measures.pool import new_pool
    from minifer.simulation.measures.search import Limit, Study, find_capacity
    from minifer.simulation.workloads.named import WORKLOADS

    traffic = partial(_traffic, arguments, trace)
    study = Study(cluster, traffic, slo=slo, warmup=arguments.warmup)
    if arguments.rate:
        high = max(arguments.rate)
    elif trace is not None:
        high = 4 * (len(trace.rows) - 1) / max(trace.rows[-1].time, 1e-9)
    else:
        high = 4 * WORKLOADS[arguments.workload].rate
    seeds = range(arguments.seed, arguments.seed + (arguments.runs or _RUNS))
    with new_pool(arguments.processes) as pool:
        found = find_capacity(
            study,
            (Limit("attainment", least=arguments.capacity),),
            low=high * _LOW,
            high=high,
            seeds=seeds,
            pool=None if arguments.processes == 1 else pool,
        )
    print(capacity_table(found, arguments.capacity))
    _write(arguments, cluster, {"capacity": found.to_dict()})
    return 0


def _traffic(
    arguments: argparse.Namespace, trace: Trace | None, rate: float, *, seed: int
) -> Workload:
    changed = argparse.Namespace(**{**vars(arguments), "seed": seed})
    return workload_at(changed, rate, trace)


def _title(arguments: argparse.Namespace, cluster: Cluster) -> str:
    nodes: dict[str, int] = {}
    for node in cluster.nodes:
        nodes[node.role.value] = nodes.get(node.role.value, 0) + 1
    shown = ", ".join(f"{count} {role}" for role, count in nodes.items())
    shown += " node" if len(cluster.nodes) == 1 else " nodes"
    engine = cluster.nodes[0].engine
    steps = arguments.steps
    if arguments.decode_steps:
        steps += f" and {arguments.decode_steps}"
    router = f", router {arguments.router}" if len(cluster.nodes) > 1 else ""
    if arguments.link is not None:
        router += f", link {arguments.link:g} GB/s"
    if cluster.nodes[0].store:
        router += f", store {cluster.nodes[0].store[0].bandwidth / 1e9:g} GB/s"
    policy = engine.scheduling_policy + ("" if engine.enable_chunked_prefill else ", whole prompts")
    return (
        f"{_SIMULATED}: {name_of(arguments)} on {shown}, steps {steps}, {policy}, "
        f"{cluster.nodes[0].kv_capacity:,} tokens of KV{router}, seed {arguments.seed}"
    )


def _write(arguments: argparse.Namespace, cluster: Cluster, figures: dict[str, Any]) -> None:
    if arguments.json:
        options = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(arguments).items()
            if name not in ("run", "json", "plot", "list")
        }
        out = {"simulated": True, "title": _title(arguments, cluster), "options": options}
        text = json.dumps({**out, **figures}, indent=2, allow_nan=False)
        arguments.json.write_text(text + "\n", encoding="utf-8")


def _check(arguments: argparse.Namespace) -> None:
    """Raises `ValueError` before anything is simulated."""
    check_traffic(arguments, _WORKLOAD)
    check_output("--json", arguments.json)
    check_output("--plot", arguments.plot, PICTURES)
    if arguments.capacity is not None:
        if not 0 < arguments.capacity <= 1:
            raise ValueError(f"--capacity must be a share in (0, 1], got {arguments.capacity}")
        if not arguments.slo:
            raise ValueError("--capacity needs --slo: which requests are good?")
        if arguments.plot:
            raise ValueError("--plot draws rates: give --rate R,R,… instead of --capacity")
    for name, least in (("warmup", 0), ("runs", 1), ("processes", 1)):
        value = getattr(arguments, name)
        if value is not None and not value >= least:
            raise ValueError(f"--{name} must be at least {least}, got {value}")
        if value is not None and name != "warmup" and arguments.capacity is None:
            raise ValueError(f"--{name} is for a search: give --capacity, or leave it out")


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise ArgumentTypeError(f"must be numbers above 0 such as 1,2,4, got {text!r}")
    return rates
