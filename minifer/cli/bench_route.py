"""`minifer bench route`: what a routing policy is worth on this machine."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifer.cli import session
from minifer.cli.output_files import PICTURES, check_output, save_figure
from minifer.cli.parser import (
    Parser,
    add_command,
    add_engine_options,
    add_model_option,
    engine_arguments,
    engine_fields,
)
from minifer.config import EngineConfig

if TYPE_CHECKING:
    from minifer.perf.load.benchmark import ServeBenchmark

POLICIES = ["round_robin", "prefix_affinity"]


def add(benchmarks: Any) -> None:
    parser = add_command(
        benchmarks,
        "route",
        run,
        summary="replicas behind a router: what each policy costs in time and recomputed tokens",
        about="Start replicas for every policy, send the same conversations to each policy in "
        "turns, and report time to first token and how many prompt tokens had to be computed. "
        "Beside it stands what the simulator says of the same conversations, with step times "
        "fitted to the log of the first policy's engines.",
        examples=[
            ("bench route", "round robin against prefix affinity, the default model"),
            ("bench route --policies least_load prefix_affinity cache_aware", "others"),
            ("bench route --prefix-groups 2 --prefix-len 200 --turns 3", "shared system prompts"),
            ("bench route --model minifer-tiny --request-rate 4 --plot route.png", "in a minute"),
        ],
        code=[
            ("minifer/serving/replicas/", "the router and its replicas"),
            ("minifer/routing/", "the policies"),
            (
                "minifer/simulation/calibration/routing_bench.py",
                "what is measured, and what predicted",
            ),
        ],
        prog="minifer bench",
    )
    _add_options(parser)
    add_model_option(parser)
    add_engine_options(parser)


def _add_options(parser: Parser) -> None:
    group = parser.add_argument_group("replicas")
    add = group.add_argument
    add("--replicas", type=int, default=2, metavar="N", help="of each policy (default: 2)")
    add(
        "--policies",
        nargs="+",
        default=POLICIES,
        metavar="POLICY",
        help=f"as for `minifer serve --router`; the first is the baseline (default: "
        f"{' '.join(POLICIES)})",
    )
    group = parser.add_argument_group(
        "conversations", "A LENGTH is N, uniform:MIN:MAX or lognormal:MU:SIGMA:MAX."
    )
    add = group.add_argument
    add("--sessions", type=int, default=8, metavar="N", help="conversations a round (default: 8)")
    add("--turns", type=int, default=3, metavar="N", help="questions of each (default: 3)")
    add("--input-len", default="80", metavar="LENGTH", help="words of a question (default: 80)")
    add("--output-len", default="16", metavar="LENGTH", help="tokens of an answer (default: 16)")
    add("--think-time", default="1", metavar="LENGTH", help="seconds between turns (default: 1)")
    add("--request-rate", type=float, default=0.4, metavar="R", help="new ones/s (default: 0.4)")
    add("--prefix-groups", type=int, default=0, metavar="G", help="shared beginnings (default: 0)")
    add("--prefix-len", type=int, default=0, metavar="N", help="words of each (default: 0)")
    group = parser.add_argument_group("run")
    add = group.add_argument
    add("--seed", type=int, default=0, metavar="N", help="of conversations (default: 0)")
    add("--runs", type=int, default=2, metavar="N", help="rounds (default: 2)")
    add("--json", type=Path, metavar="FILE", help="write every number there, each request too")
    add("--plot", type=Path, metavar="FILE", help="draw TTFT and tokens: .png, .svg or .pdf")


def run(arguments: argparse.Namespace) -> int:
    options = engine_fields(arguments)
    config = EngineConfig.from_kwargs(model=arguments.model, **options)
    check_output("--json", arguments.json)
    check_output("--plot", arguments.plot, PICTURES)
    if arguments.replicas < 1:
        raise ValueError(f"--replicas must be at least 1, got {arguments.replicas}")
    from minifer.routing.policies import make_policy

    for policy in arguments.policies:
        make_policy(policy)
    bench = _benchmark(arguments)
    with session.few_collections():
        from minifer.serving.replicas.run import prompt_reader
        from minifer.simulation.calibration.routing_bench import bench_routing
        from minifer.simulation.calibration.routing_report import draw, table
    reader = prompt_reader(config)
    count = arguments.replicas * len(arguments.policies)
    session.note(f"starting {count} engines, {arguments.replicas} for each policy")
    with tempfile.TemporaryDirectory() as folder:
        measured = bench_routing(
            bench,
            arguments.policies,
            arguments.replicas,
            engine_arguments(arguments.model, options),
            reader,
            Path(folder),
            {"engine": {name: str(value) for name, value in options.items()}},
        )
    print(table(measured))
    print()
    print("\n".join(measured.result.header()))
    if arguments.json:
        measured.result.write(arguments.json)
    if arguments.plot:
        from minifer.weights.resolve import model_label, resolve_model

        model = model_label(arguments.model, resolve_model(arguments.model).path)
        title = (
            f"{model}: {arguments.sessions} conversations of {arguments.turns} turns, "
            f"{arguments.replicas} replicas"
        )
        save_figure(draw(measured, title), arguments.plot)
    return 0


def _benchmark(arguments: argparse.Namespace) -> ServeBenchmark:
    try:
        import httpx  # noqa: F401 - one sentence instead of a traceback
    except ImportError:
        raise RuntimeError('a load test needs httpx: pip install "minifer[server]"') from None
    from minifer.perf.load.benchmark import ServeBenchmark
    from minifer.perf.load.workload import Distribution, Workload

    workload = Workload(
        arguments.sessions,
        Distribution.parse(arguments.input_len),
        Distribution.parse(arguments.output_len),
        arguments.prefix_groups,
        arguments.prefix_len,
        arguments.turns,
        Distribution.parse(arguments.think_time),
    )
    return ServeBenchmark(
        workload,
        endpoint="chat",
        request_rate=arguments.request_rate,
        seed=arguments.seed,
        runs=arguments.runs,
        extra={"temperature": 0.0, "ignore_eos": True},
    )
