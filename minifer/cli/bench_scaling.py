"""`minifer bench scaling`: how the cost of a step grows."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from minifer.cli import session
from minifer.cli.bench_ladder import integers
from minifer.cli.output_files import PICTURES, check_output
from minifer.cli.parser import add_command, add_engine_options, add_model_option, engine_fields

# What a sweep sets by itself.
_OWN = ("num_kv_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens")


def add(benchmarks: Any) -> None:
    parser = add_command(
        benchmarks,
        "scaling",
        run,
        summary="how the cost of a step grows with batch, context and queue",
        about="Time each stage of decode steps while one thing grows: the requests that run, the "
        "context of each, or the requests that wait (for a seat and for memory, under every "
        "scheduling policy). Preparation is measured around a model that costs nothing, whole "
        "steps with the real one. Each sweep is fitted: a cost that grows as size^e has exponent "
        "e. Last, what share of a step at batch 64 each stage takes.",
        examples=[
            ("bench scaling", "all sweeps, in a few minutes"),
            ("bench scaling --prepare-only", "without the model's own steps"),
            ("bench scaling --json scaling.json --plot scaling.png", "every number, and a figure"),
        ],
        code=[
            ("minifer/perf/scaling.py", "the engine around a silent model, and the fit"),
            ("minifer/perf/scaling_bench.py", "the sweeps"),
        ],
        prog="minifer bench",
    )
    add = parser.add_argument
    batches, contexts = [1, 2, 4, 8, 16, 32, 64, 128], [128, 256, 512, 1024, 2048, 4096, 8000]
    add("--batch", type=integers, default=batches, metavar="B,…", help="requests that decode")
    add("--context", type=integers, default=contexts, metavar="S,…", help="tokens each has")
    queues = [1, 10, 100, 1000, 10_000]
    add("--waiting", type=integers, default=queues, metavar="N,…", help="requests that wait")
    add("--steps", type=int, default=8, metavar="N", help="that are timed in a round (default: 8)")
    add("--runs", type=int, default=3, metavar="N", help="rounds (default: 3)")
    add("--threads", type=int, metavar="N", help="torch's, on a CPU (default: torch's choice)")
    add("--prepare-only", action="store_true", help="leave the model's own steps out")
    add("--json", type=Path, metavar="FILE", help="write every number there")
    add("--plot", type=Path, metavar="FILE", help="draw the sweeps: .png, .svg or .pdf")
    add_model_option(parser)
    add_engine_options(parser)


def run(arguments: argparse.Namespace) -> int:
    options = engine_fields(arguments)
    _check(arguments, options)
    with session.few_collections():
        import torch

        from minifer.perf.scaling_bench import measure_scaling, table
        from minifer.weights.resolve import load_model

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    dtype, device = options.get("dtype", "auto"), options.get("device", "cpu")
    quantize = {"quantize": options["quantize"]} if "quantize" in options else {}
    loaded = load_model(arguments.model, dtype, device, **quantize)
    if loaded.notice:
        session.note(loaded.notice)
    settings = {
        "model": loaded.path.name,
        "dtype": str(next(loaded.model.parameters()).dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "steps": arguments.steps,
        "seed": 0,
        **{name: str(value) for name, value in options.items()},
    }
    report = measure_scaling(
        loaded,
        batches=arguments.batch,
        contexts=arguments.context,
        waiting=arguments.waiting,
        steps=arguments.steps,
        runs=arguments.runs,
        compute=not arguments.prepare_only,
        settings=settings,
        **options,
    )
    print(table(report))
    if arguments.json:
        report.result.write(arguments.json)
    if arguments.plot:
        from minifer.perf.scaling_plot import save_plot

        save_plot(arguments.plot, report)
    return 0


def _check(arguments: argparse.Namespace, options: dict[str, Any]) -> None:
    """Raises `ValueError` before anything is measured."""
    for name, least in (("batch", 1), ("context", 2), ("waiting", 1)):
        sizes = getattr(arguments, name)
        if min(sizes) < least:
            raise ValueError(f"--{name} must be from {least}, got {min(sizes)}")
        if len(set(sizes)) < 3:
            raise ValueError(f"--{name} must name at least 3 sizes to fit, got {len(set(sizes))}")
    for name in ("steps", "runs", "threads"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    for name in _OWN:
        if name in options:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} is what a sweep sets by itself, leave it out")
    check_output("--json", arguments.json)
    check_output("--plot", arguments.plot, PICTURES)
