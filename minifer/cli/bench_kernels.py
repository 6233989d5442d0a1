"""`minifer bench kernels`: each kernel alone, against the memory's speed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from minifer.cli import session
from minifer.cli.bench_ladder import choose_device
from minifer.cli.output_files import check_output
from minifer.cli.parser import add_command


def add(benchmarks: Any) -> None:
    parser = add_command(
        benchmarks,
        "kernels",
        run,
        summary="each kernel alone: is it right, what share of the memory's speed does it reach",
        about="Hold every kernel of a decode step against its reference in float32, then time it "
        "over data that no cache holds, and print bytes/s against the copy bandwidth measured "
        "first. Without a GPU the kernels run in Triton's interpreter: for correctness, no speed "
        "is given.",
        examples=[
            ("bench kernels", "the shapes of Llama-3.2-1B on a GPU, of minifer-tiny on a CPU"),
            ("bench kernels --model smollm2-135m --out r.json", "other shapes, as JSON"),
        ],
        code=[
            ("minifer/perf/gpu/kernel_cases.py", "the shapes"),
            ("minifer/perf/gpu/kernels.py", "how they are timed, and the JSON format"),
            ("kernels/", "the kernels"),
        ],
        prog="minifer bench",
    )
    add = parser.add_argument
    add("--model", metavar="NAME", help="shapes (default: llama-1b on a GPU, else minifer-tiny)")
    add("--context", type=int, metavar="S", help="of attention (default: 4096; on a CPU 100)")
    add("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:1, … ")
    add(
        "--out",
        "--json",
        dest="out",
        type=Path,
        metavar="FILE",
        help="write JSON there, after every kernel",
    )


def run(arguments: argparse.Namespace) -> int:
    check_output("--out", arguments.out)
    device = choose_device(arguments.device)
    on_gpu = device.type == "cuda"
    model = arguments.model or ("llama-1b" if on_gpu else "minifer-tiny")
    context = arguments.context
    if context is None:
        context = 4096 if on_gpu else 100
    from minifer.kernels.mega.shapes import MODELS
    from minifer.perf.gpu.bandwidth import measure_bandwidth
    from minifer.perf.gpu.kernel_cases import groups
    from minifer.perf.gpu.kernels import bench_kernels, table

    if model not in MODELS:
        raise ValueError(f"--model must be one of {', '.join(MODELS)}, got {model!r}")
    if context < 1:
        raise ValueError(f"--context must be at least 1, got {context}")
    settings = {"model": model, "context": context, "device": str(device)}
    cases = groups(MODELS[model], device, context)
    bandwidth = measure_bandwidth(device)
    result = bench_kernels(cases, device, bandwidth, settings, arguments.out, session.note)
    print(table(result))
    wrong = [row["name"] for row in result["rows"] if row["status"] != "ok"]
    if wrong:
        session.note(f"not right: {', '.join(wrong)}")
    return 1 if wrong else 0
