"""`minifer bench decode`: how fast the engine decodes here, against the memory and against others;
with `--ladder` one decode step, eleven ways."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from minifer.cli import bench_ladder, session
from minifer.cli.bench_ladder import integers
from minifer.cli.bench_peers import add_peer_options
from minifer.cli.bench_speed import add_speed_options, cells, check_measurement, run_speed
from minifer.cli.bench_text import prompt_tokens
from minifer.cli.parser import add_command, engine_fields

_ONLY_SPEED = ("vs", "plot", "prompt_file", "tokens", "runs", "threads")


def add(benchmarks: Any) -> None:
    parser = add_command(
        benchmarks,
        "decode",
        run,
        summary="how fast it decodes, against the memory's speed and against other engines",
        about="Let requests decode together and print tokens/s, the share of the measured read "
        "bandwidth that weights and KV take (MBU), and the time of each stage of a step. With --vs "
        "other engines answer the same prompts. With a --speculative-method the same without it. "
        "With --ladder another measurement: one decode step from eager PyTorch to a megakernel, "
        "one change a rung, each with its error against float32; a rung that cannot run here is a "
        "line with its reason, and without a GPU our kernels run in Triton's interpreter, for "
        "correctness alone.",
        examples=[
            ("bench decode", "one request, 128 tokens of prompt, 64 answered"),
            ("bench decode --batch 1,16,64 --dtype bfloat16", "other batches"),
            ("bench decode --vs llamacpp,vllm --peer-python vllm=VENV/bin/python", "others, too"),
            ("bench decode --backend compiled --vs minifer:torch,torch-compile", "other back ends"),
            ("bench decode --json r.json --plot r.png", "every number; the points on a roofline"),
            ("bench decode --ladder", "the ladder: all cells, the most telling first"),
            ("bench decode --ladder --rungs eager,mega --json r.json --resume", "what is missing"),
        ],
        code=[
            ("minifer/perf/speed/stamps.py", "what is measured: where all requests decode"),
            ("minifer/perf/speed/traffic.py", "which bytes count"),
            ("minifer/perf/speed/benchmark.py", "turns and ratios"),
            ("minifer/perf/speed/peers/", "the other engines, a script each"),
            ("minifer/perf/gpu/climb.py", "the ladder: compare, time, take turns"),
            ("minifer/perf/gpu/rungs.py", "how each rung decodes"),
        ],
        prog="minifer bench",
    )
    add = parser.add_argument_group("work").add_argument
    add("--batch", type=integers, metavar="B,…", help="requests that decode (default: 1)")
    add("--context", type=integers, metavar="S,…", help="tokens of each prompt (default: 128)")
    add("--tokens", type=int, metavar="N", help="that each is answered with (default: 64)")
    add("--prompt-file", type=Path, metavar="FILE", help="prompts from this text (default: random)")
    add(
        "--quality",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with --quantize: what it costs in perplexity, KL and weight errors (default: yes)",
    )
    add_speed_options(parser)
    add_peer_options(parser)
    bench_ladder.add_ladder_options(parser)
    parser.set_defaults(model=None, runs=None)


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    if arguments.ladder:
        return bench_ladder.run(arguments)
    if arguments.model is None:
        arguments.model = "default"
    if arguments.runs is None:
        arguments.runs = 5
    check_measurement(arguments)
    from minifer.perf.speed.measures import Task
    from minifer.weights.resolve import read_config

    batches, contexts = arguments.batch or [1], arguments.context or [128]
    tokens = 64 if arguments.tokens is None else arguments.tokens
    asked = cells("decode", batches, contexts, tokens)
    config = read_config(arguments.model)
    text = prompt_tokens(arguments)

    def tasks(turn: int) -> list[Task]:
        return [
            Task(str(c), "decode", tuple(c.asks(config.vocab_size, arguments.seed, text)))
            for c in asked
        ]

    source = "random" if not text else "prose.txt"
    if arguments.prompt_file is not None:
        source = arguments.prompt_file.name
    settings = {"batch": batches, "context": contexts, "tokens": tokens, "prompts": source}
    status = run_speed(arguments, "decode", config, tasks, {}, settings)
    if arguments.quality and getattr(arguments, "quantize", "none") != "none":
        print(f"\n{_quality(arguments)}")
    return status


def _quality(arguments: argparse.Namespace) -> str:
    """What smaller weights cost, beside what they bring."""
    from minifer.perf.quality import quality, table
    from minifer.weights.resolve import load_model

    session.note("comparing with float32 (--no-quality leaves it out)")
    dtype = engine_fields(arguments).get("dtype", "bfloat16" if arguments.vs else "auto")
    loaded = load_model(arguments.model, dtype, "cpu", quantize=arguments.quantize)
    reference = load_model(arguments.model, "float32", "cpu")
    return table([quality(loaded, reference)])


def _check(arguments: argparse.Namespace) -> None:
    """The ladder is another measurement: its options and those of speed do not mix."""
    wrong = _ONLY_SPEED if arguments.ladder else tuple(bench_ladder.OPTIONS)
    for name in wrong:
        if getattr(arguments, name) not in (None, False, []):
            flag = name.replace("_", "-")
            why = "has no place beside --ladder" if arguments.ladder else "needs --ladder"
            raise ValueError(f"--{flag} {why}")
