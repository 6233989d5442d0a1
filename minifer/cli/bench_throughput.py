"""`minifer bench throughput`: a mixed workload, all of it there at once."""

from __future__ import annotations

import argparse
from typing import Any

from minifer.cli.bench_peers import add_peer_options
from minifer.cli.bench_speed import add_speed_options, check_measurement, run_speed
from minifer.cli.parser import add_command


def add(benchmarks: Any) -> None:
    parser = add_command(
        benchmarks,
        "throughput",
        run,
        summary="how many tokens/s a mixed workload gets through, offline",
        about="Hand over requests of mixed lengths at once and print the tokens/s in and out until "
        "the last is answered: no clients, no network, no arrivals (`bench serve` has those). "
        "Every prompt is its own and the prefix cache is off unless it is asked for. With --vs "
        "vllm or llamacpp they answer the same requests.",
        examples=[
            ("bench throughput", "32 requests of 32 to 256 tokens, answered with 16 to 64"),
            ("bench throughput --num-prompts 128 --max-num-seqs 64", "more of them"),
            ("bench throughput --vs vllm --peer-python vllm=VENV/bin/python", "against vLLM"),
        ],
        code=[
            ("minifer/perf/load/workload.py", "what is asked"),
            ("minifer/perf/speed/benchmark.py", "turns and ratios"),
        ],
        prog="minifer bench",
    )
    add = parser.add_argument_group(
        "work", "A LENGTH is N, uniform:MIN:MAX or lognormal:MU:SIGMA:MAX."
    ).add_argument
    add("--num-prompts", type=int, default=32, metavar="N", help="requests (default: 32)")
    add(
        "--input-len",
        default="uniform:32:256",
        metavar="LENGTH",
        help="of prompts, in tokens (default: uniform:32:256)",
    )
    add(
        "--output-len",
        default="uniform:16:64",
        metavar="LENGTH",
        help="of answers (default: uniform:16:64)",
    )
    add_speed_options(parser, runs=3)
    add_peer_options(parser)


def run(arguments: argparse.Namespace) -> int:
    check_measurement(arguments)
    from minifer.perf.load.workload import Distribution, Workload
    from minifer.perf.speed.cells import workload_asks
    from minifer.perf.speed.measures import Task
    from minifer.weights.resolve import read_config

    workload = Workload(
        arguments.num_prompts,
        Distribution.parse(arguments.input_len),
        Distribution.parse(arguments.output_len),
    )
    config = read_config(arguments.model)

    def tasks(turn: int) -> list[Task]:
        asks = workload_asks(workload, config.vocab_size, arguments.seed)
        return [Task("throughput", "throughput", tuple(asks))]

    settings = {
        "num_prompts": arguments.num_prompts,
        "input_len": arguments.input_len,
        "output_len": arguments.output_len,
    }
    defaults = {"enable_prefix_caching": False, "max_num_seqs": min(64, arguments.num_prompts)}
    return run_speed(arguments, "throughput", config, tasks, defaults, settings)
