"""`minifer bench`: measurements, one sub-command each."""

from __future__ import annotations

from typing import Any

from minifer.cli import (
    bench_decode,
    bench_kernels,
    bench_limit,
    bench_prefill,
    bench_quality,
    bench_route,
    bench_scaling,
    bench_serve,
    bench_startup,
    bench_throughput,
)
from minifer.cli.parser import add_command


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "bench BENCHMARK",
        lambda arguments: 2,  # argparse asks for a benchmark before this is called
        summary="measure speed: decode, prefill, throughput, a server, each kernel, this machine",
        about="Measurements that others can repeat: each says what ran where, with which seed, and "
        "writes one JSON format.",
        examples=[
            ("bench serve", "a server under load"),
            ("bench serve --help", "its options"),
            ("bench route", "what a routing policy is worth, with two replicas"),
            ("bench limit", "what this machine can do, and how near the engine comes"),
            ("bench decode", "how fast it decodes, and against others with --vs"),
            ("bench prefill", "how fast it computes prompts; what a prefix-cache hit saves"),
            ("bench throughput", "a mixed workload, offline"),
            ("bench startup", "from the command to its first token, and the memory it takes"),
            ("bench scaling", "how the cost of a step grows with batch, context and queue"),
            ("bench quality", "what smaller weights cost in perplexity"),
            ("bench decode --ladder", "a decode step, from eager PyTorch to a megakernel"),
            ("bench kernels", "each Triton kernel alone"),
        ],
        code=[("minifer/perf/bench.py", "how arms take turns, and the JSON format")],
    )
    benchmarks = parser.add_subparsers(
        title="benchmarks", metavar="BENCHMARK", required=True, prog="minifer bench"
    )
    bench_serve.add(benchmarks)
    bench_route.add(benchmarks)
    bench_limit.add(benchmarks)
    bench_decode.add(benchmarks)
    bench_prefill.add(benchmarks)
    bench_throughput.add(benchmarks)
    bench_scaling.add(benchmarks)
    bench_startup.add(benchmarks)
    bench_quality.add(benchmarks)
    bench_kernels.add(benchmarks)
