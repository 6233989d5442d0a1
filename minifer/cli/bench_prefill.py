"""`minifer bench prefill`: how fast prompts are computed, and what a known beginning saves."""

from __future__ import annotations

import argparse
from typing import Any

from minifer.cli import session
from minifer.cli.bench_ladder import integers
from minifer.cli.bench_peers import add_peer_options
from minifer.cli.bench_speed import (
    add_speed_options,
    cells,
    check_measurement,
    run_speed,
    set_threads,
)
from minifer.cli.parser import add_command, engine_fields


def add(benchmarks: Any) -> None:
    parser = add_command(
        benchmarks,
        "prefill",
        run,
        summary="how fast prompts are computed, and how much sooner a known beginning answers",
        about="Time prompts to their first token and print tokens/s, the share of the measured "
        "rate of matrix products that their FLOPs take (MFU), and the time of each stage. The "
        "prefix cache is off, so that every token is computed. With --vs other engines compute the "
        "same prompts. With --shared-prefix another measurement: the first token of a prompt whose "
        "beginning is known, against one that shares nothing.",
        examples=[
            ("bench prefill", "a prompt of 1,024 tokens"),
            ("bench prefill --context 16,128,1024 --dtype bfloat16", "other lengths"),
            ("bench prefill --vs vllm --peer-python vllm=VENV/bin/python", "against vLLM"),
            ("bench prefill --shared-prefix 2000", "what a prefix-cache hit is worth"),
        ],
        code=[
            ("minifer/perf/costs.py", "which FLOPs count"),
            ("minifer/perf/speed/benchmark.py", "turns and ratios"),
            ("minifer/perf/speed/prefix.py", "with and without a hit"),
        ],
        prog="minifer bench",
    )
    add = parser.add_argument_group("work").add_argument
    add("--batch", type=integers, metavar="B,…", help="prompts at once (default: 1)")
    add("--context", type=integers, metavar="S,…", help="tokens of each (default: 1024)")
    add("--shared-prefix", type=int, metavar="N", help="tokens of a known beginning")
    add_speed_options(parser)
    add_peer_options(parser)


def run(arguments: argparse.Namespace) -> int:
    check_measurement(arguments)
    if arguments.shared_prefix is not None:
        return _shared(arguments)
    from minifer.perf.speed.measures import Task
    from minifer.weights.resolve import read_config

    batches, contexts = arguments.batch or [1], arguments.context or [1024]
    asked = cells("prefill", batches, contexts, 1)
    config = read_config(arguments.model)

    def tasks(turn: int) -> list[Task]:
        return [
            Task(str(c), "prefill", tuple(c.asks(config.vocab_size, arguments.seed + turn)))
            for c in asked
        ]

    settings = {"batch": batches, "context": contexts}
    defaults = {"enable_prefix_caching": False}
    return run_speed(arguments, "prefill", config, tasks, defaults, settings)


def _shared(arguments: argparse.Namespace) -> int:
    """With and without a prefix-cache hit."""
    for name in ("batch", "context", "vs", "plot"):
        if getattr(arguments, name):
            raise ValueError(f"--{name} has no place beside --shared-prefix")
    shared = arguments.shared_prefix
    if shared < 1:
        raise ValueError(f"--shared-prefix must be at least 1, got {shared}")
    given = engine_fields(arguments)
    if given.get("enable_prefix_caching") is False:
        raise ValueError("--shared-prefix needs the prefix cache, got --no-enable-prefix-caching")
    from minifer.perf.speed.prefix import TAIL, measure_prefix, prefix_lines
    from minifer.perf.speed.session import Session
    from minifer.weights.resolve import read_config

    threads = set_threads(arguments.threads)
    config = read_config(arguments.model)
    length = shared + TAIL + 1
    if length > config.max_position_embeddings:
        most = config.max_position_embeddings - TAIL - 1
        raise ValueError(f"--shared-prefix must be at most {most} for this model, got {shared}")
    session.note(f"loading {arguments.model}")
    # Room for the known beginning and a few that share nothing: those give way to each other.
    block_size = given.get("block_size", 16)
    options: dict[str, Any] = {"max_num_batched_tokens": max(2048, length), **given}
    if "kv_cache_bytes" not in given:
        options.setdefault("num_kv_blocks", 4 * (-(-length // block_size) + 1))
    asked = Session(arguments.model, options)
    settings = {
        "model": arguments.model,
        "dtype": asked.dtype,
        "kv_bytes": asked.kv_bytes,
        "threads": threads,
        "seed": arguments.seed,
        "engine": {name: str(value) for name, value in options.items()},
    }
    result = measure_prefix(
        asked,
        shared,
        config.vocab_size,
        seed=arguments.seed,
        runs=arguments.runs,
        settings=settings,
    )
    asked.close()
    print("\n".join([*result.header(), "", *prefix_lines(result)]))
    if arguments.json is not None:
        result.write(arguments.json)
    return 0
