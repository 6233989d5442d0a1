"""`minifer sim workload`: what traffic is like, before anything serves it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifer.cli.output_files import check_output
from minifer.cli.parser import add_command
from minifer.cli.sim_traffic import (
    add_traffic_options,
    check_traffic,
    name_of,
    open_trace,
    workload_at,
)

if TYPE_CHECKING:
    from minifer.simulation.workloads.statistics import LengthStatistics, WorkloadStatistics


def add(simulations: Any) -> None:
    parser = add_command(
        simulations,
        "workload [NAME]",
        run,
        summary="what traffic is like: lengths, bursts, reuse",
        about="List the workloads, or make one, or read a trace, and print what it is like: "
        "lengths with the lognormal they are closest to, how uneven the arrivals are, how lengths "
        "move together, and what a cache without limit would find again.",
        examples=[
            ("sim workload", "all that have a name"),
            ("sim workload mooncake-conversation", "long conversations, of which 37 % come again"),
            ("sim workload --trace conversation_trace.jsonl", "the same of a recorded trace"),
            ("sim workload chat --out requests.jsonl", "write every request as a line of JSON"),
        ],
        code=[
            ("minifer/simulation/workloads/generator.py", "traffic from a seed"),
            ("minifer/simulation/workloads/published.py", "statistics of public traces"),
            ("minifer/simulation/workloads/statistics.py", "what each figure means"),
        ],
        prog="minifer sim",
    )
    parser.add_argument("workload", metavar="NAME", nargs="?", help="none: list them")
    add_traffic_options(parser.add_argument_group("traffic"), None)
    parser.add_argument("--rate", type=float, metavar="R", help="a second (default: its own)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="every request, JSON lines: a --trace, unless turns wait for answers",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")


def run(arguments: argparse.Namespace) -> int:
    check_traffic(arguments)
    for option, file in (("--out", arguments.out), ("--json", arguments.json)):
        check_output(option, file)
    if arguments.workload is None and arguments.trace is None:
        for name in ("rate", "out", "json", "requests"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name} needs a workload's NAME or a --trace")
    from minifer.simulation.workloads.named import WORKLOADS
    from minifer.simulation.workloads.statistics import describe, with_waits

    if arguments.workload is None and arguments.trace is None:
        for name, workload in WORKLOADS.items():
            print(f"{name:26}{workload.rate:6.2f}/s  {workload.about}")
        return 0
    traffic = workload_at(arguments, arguments.rate, open_trace(arguments))
    statistics = describe(traffic)
    print(f"{name_of(arguments)}, seed {arguments.seed}\n{table(statistics)}")
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            for request, waits in with_waits(traffic):
                fields = {name: getattr(request, name) for name in request.__slots__}
                file.write(json.dumps({**fields, "waits": waits}) + "\n")
    if arguments.json:
        text = json.dumps(statistics.to_dict(), indent=2)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 0


def table(s: WorkloadStatistics) -> str:
    """For people."""
    sessions = f" of {s.num_sessions} sessions" if s.num_sessions < s.num_requests else ""
    rows = [
        ("requests", f"{s.num_requests}{sessions}"),
        ("arrivals", _arrivals(s)),
        ("prompt", _lengths(s.prompt)),
        ("output", _lengths(s.output)),
        (
            "together",
            f"correlation {s.correlation:.2f}, of the logarithms {s.log_correlation:.2f}",
        ),
        (
            "reuse",
            f"a cache without limit finds {s.bound:.1%} of the blocks, {s.token_bound:.1%} of the "
            "tokens",
        ),
        ("", f"cold (it finds 10 % or less) {s.cold:.1%}, warm (50 % or more) {s.warm:.1%}"),
    ]
    if s.stored:
        rows.append(("stored", f"{s.stored:.1%} of the prompt tokens, by assumption"))
    return "\n".join(f"  {name:10}{value}" for name, value in rows)


def _arrivals(s: WorkloadStatistics) -> str:
    if not s.seconds:
        return "all at once"
    what = "new sessions " if s.num_arrivals < s.num_requests else ""
    rate = f"{s.rate:.3g} {what}a second over {s.seconds:.0f} s"
    return f"{rate}, CV of the gaps {s.cv:.2f}"


def _lengths(s: LengthStatistics) -> str:
    return (
        f"mean {s.mean:,.0f} tokens, p50 {s.p50:,.0f}, p90 {s.p90:,.0f}, p99 {s.p99:,.0f}; "
        f"logarithm {s.mu:.2f} ± {s.sigma:.2f}"
    )
