"""`minifer bench limit`: the machine's limits, and how near the engine comes."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from minifer.cli import session
from minifer.cli.bench_ladder import choose_device, integers
from minifer.cli.output_files import PICTURES, check_output, save_figure
from minifer.cli.parser import add_command


def add(benchmarks: Any) -> None:
    parser = add_command(
        benchmarks,
        "limit",
        run,
        summary="what this machine can do, and how near the engine's steps come to it",
        about="Measure how fast this machine reads memory and multiplies matrices, predict the "
        "engine's steps from it, and hold the engine's own times beside the prediction: prefill at "
        "several chunk sizes, decode at several batch sizes and contexts, all in turns. The bytes "
        "of each step are counted while it runs and compared with the cost model's. Then the "
        "limits of other chips, each with its source and date. Weights are random: what they hold "
        "changes no time.",
        examples=[
            ("bench limit", "a table, the shapes of SmolLM2-135M on a CPU"),
            ("bench limit --out limit.png --out limit.json", "the roofline, and every number"),
            ("bench limit --model llama-1b --layers 4 --batch 1,8 --context 128", "other work"),
        ],
        code=[
            ("minifer/perf/costs.py", "FLOPs and bytes of every operation, from the shapes"),
            ("minifer/perf/limit.py", "how the machine is measured"),
            ("minifer/perf/counted.py", "how bytes are counted"),
            ("minifer/perf/limit_bench.py", "turns, ratios, and the JSON format"),
        ],
        prog="minifer bench",
    )
    add = parser.add_argument
    add("--model", metavar="NAME", help="shapes (default: smollm2-135m; on a GPU llama-1b)")
    add("--layers", type=int, metavar="L", help="only the model's first L (default: all)")
    add("--dtype", metavar="NAME", help="default: float32; on a GPU bfloat16")
    add("--chunk", type=integers, default=[16, 64, 256], metavar="T,…", help="tokens of a prefill")
    add("--batch", type=integers, default=[1, 4, 16], metavar="B,…", help="requests that decode")
    add("--context", type=integers, default=[64, 512], metavar="S,…", help="tokens each has")
    add("--runs", type=int, default=3, metavar="N", help="rounds that count (default: 3)")
    add("--threads", type=int, metavar="N", help="torch's, on a CPU (default: torch's choice)")
    add("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:1, … ")
    add(
        "--points",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="put what `bench decode` or `bench prefill` wrote into the figure, too; may be "
        "repeated",
    )
    add(
        "--out",
        "--json",
        "--plot",
        dest="out",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="write there: .json every number, .png, .svg or .pdf the roofline; may be repeated",
    )


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    points = [point for file in arguments.points for point in _points(file)]
    device = choose_device(arguments.device)
    import torch

    from minifer.kernels.mega.shapes import MODELS
    from minifer.perf.limit_bench import Work, device_table, measure_limit, table
    from minifer.perf.steps import random_model

    on_gpu = device.type == "cuda"
    name = arguments.model or ("llama-1b" if on_gpu else "smollm2-135m")
    if name not in MODELS:
        raise ValueError(f"--model must be one of {', '.join(MODELS)}, got {name!r}")
    config = MODELS[name]
    if arguments.layers is not None:
        if not 1 <= arguments.layers <= config.num_layers:
            raise ValueError(f"--layers must be 1 to {config.num_layers}, got {arguments.layers}")
        config = replace(config, num_layers=arguments.layers, sliding_windows=())
    longest = max(*arguments.chunk, *arguments.context)
    if longest + 64 > config.max_position_embeddings:
        raise ValueError(
            f"--chunk and --context must leave 64 of {name}'s {config.max_position_embeddings} "
            f"tokens, got {longest}"
        )
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    dtype = arguments.dtype or ("bfloat16" if on_gpu else "float32")
    work = [Work("decode", b, s) for s in arguments.context for b in arguments.batch]
    work += [Work("prefill", 1, chunk) for chunk in arguments.chunk]
    loaded = random_model(config, dtype=dtype, device=str(device))
    settings = {
        "model": name,
        "layers": config.num_layers,
        "dtype": dtype,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "seed": 0,
    }
    report = measure_limit(loaded, work, runs=arguments.runs, settings=settings, note=session.note)
    print(table(report))
    print(f"\none token of {name} ({config.num_layers} layers) at best, chips in 16 bits:\n")
    print(device_table(config, report.here, dtype))
    for out in arguments.out:
        if out.suffix == ".json":
            report.result.write(out)
        else:
            from minifer.course.pictures.roofline import limit_figure

            figure = limit_figure(report.here, report.groups, report.operations, points)
            save_figure(figure, out)
    return 0


def _points(file: Path) -> list[Any]:
    """Steps that another benchmark wrote. Raises `ValueError` for any other file."""
    from minifer.course.pictures.roofline_data import points_of

    try:
        points = points_of(json.loads(file.read_text(encoding="utf-8"))["details"]["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        points = []
    if not points:
        raise ValueError(
            f"--points must be a file that `minifer bench decode --json` or `bench prefill --json` "
            f"wrote, got {file}"
        )
    return points


def _check(arguments: argparse.Namespace) -> None:
    """Raises `ValueError` before anything is measured."""
    for name in ("chunk", "batch", "context"):
        if min(getattr(arguments, name)) < (2 if name == "context" else 1):
            least = 2 if name == "context" else 1
            raise ValueError(f"--{name} must be from {least}, got {min(getattr(arguments, name))}")
    for name in ("runs", "threads"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    from minifer.config import DTYPES

    if arguments.dtype is not None and arguments.dtype not in DTYPES[1:]:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES[1:])}, got {arguments.dtype!r}")
    for out in arguments.out:
        check_output("--out", out, (".json", *PICTURES))
