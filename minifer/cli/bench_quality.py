"""`minifer bench quality`: what smaller weights cost in perplexity."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifer.cli import session
from minifer.cli.output_files import check_output
from minifer.cli.parser import add_command, add_model_option
from minifer.config import QUANTIZE, EngineConfig

if TYPE_CHECKING:
    from minifer.perf.bench import BenchmarkResult
    from minifer.perf.quality import Quality

_BACKENDS = ("torch", "compiled")
_BLOCK_SIZE = 16
_UNITS = {"perplexity": "", "kl": "nats/token", "top1_agreement": "", "nbytes": "bytes"}


def add(benchmarks: Any) -> None:
    parser = add_command(
        benchmarks,
        "quality",
        run,
        summary="what smaller weights cost: perplexity, KL and weight errors against float32",
        about="Score a fixed text with the weights in bfloat16, as the codes of the model's own "
        "GGUF file, and as int8 and int4 made from the checkpoint; compare each with float32: "
        "perplexity, KL divergence a token, how often the greedy token is the same, and how far "
        "the weights of each kind of matrix are off. A checkpoint that was 4-bit before, as the "
        "pulled one, is found again by int4: its errors say nothing of others.",
        examples=[
            ("bench quality", "of the pulled model, on a CPU"),
            ("bench quality --model minifer-tiny --quantize int8,int4", "of another"),
            ("bench quality --backend compiled --json q.json", "as the compiled step computes"),
        ],
        code=[
            ("minifer/perf/quality.py", "what is compared, and how"),
            ("minifer/weights/quantized.py", "codes, scales and zeros"),
            ("minifer/assets/prose.txt", "the text"),
        ],
        prog="minifer bench",
    )
    add_model_option(parser)
    add = parser.add_argument
    add(
        "--quantize",
        type=lambda text: text.split(","),
        default=["none", "file", "int8", "int4"],
        metavar="WAY,…",
        help="none is bfloat16 (default: none,file,int8,int4)",
    )
    add("--backend", choices=_BACKENDS, default="torch", help="whose products (default: torch)")
    add("--tokens", type=int, default=1536, metavar="N", help="of the text (default: 1536)")
    add("--threads", type=int, metavar="N", help="torch's (default: torch's choice)")
    add("--json", type=Path, metavar="FILE", help="write every number there")


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    with session.few_collections():
        import torch

        from minifer.perf.quality import table

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    rows = list(_rows(arguments))
    if not rows:
        raise ValueError("--quantize named no way that this model can be held in")
    print(table(rows))
    if arguments.json:
        _result(arguments, started, rows).write(arguments.json)
    return 0


def _rows(arguments: argparse.Namespace) -> Iterator[Quality]:
    """One way after the other: two models are in memory at a time."""
    from minifer.execution.runner import make_runner
    from minifer.perf.quality import WINDOW, quality, runner_logits
    from minifer.weights.resolve import load_model

    reference = load_model(arguments.model, "float32")
    for way in arguments.quantize:
        try:
            loaded = load_model(arguments.model, "bfloat16", quantize=way)
        except ValueError as error:
            session.note(f"{way} is left out: {error}")
            continue
        if loaded.notice:
            session.note(loaded.notice)
        logits = None
        if arguments.backend != "torch":
            blocks = WINDOW // _BLOCK_SIZE
            engine = EngineConfig(backend=arguments.backend, block_size=_BLOCK_SIZE)
            runner = make_runner(loaded.model, loaded.config, engine, blocks)
            logits = runner_logits(runner, _BLOCK_SIZE)
        label = "bfloat16" if way == "none" else way
        session.note(f"{label} is scored")
        yield quality(loaded, reference, label=label, logits=logits, max_tokens=arguments.tokens)


def _result(arguments: argparse.Namespace, started: str, rows: list[Quality]) -> BenchmarkResult:
    from minifer.perf.bench import BenchmarkResult, Summary, git_state, machine, versions

    return BenchmarkResult(
        name="quality",
        started=started,
        machine=machine(),
        versions=versions(),
        git=git_state(),
        settings={
            "model": arguments.model,
            "backend": arguments.backend,
            "dtype": "bfloat16",
            "tokens": rows[0].tokens,
            "reference_perplexity": rows[0].reference_perplexity,
        },
        runs=1,
        warmup=0,
        units=_UNITS,
        arms={
            row.label: {name: Summary.of([getattr(row, name)]) for name in _UNITS} for row in rows
        },
        details={"weights": {row.label: row.to_dict()["weights"] for row in rows}},
    )


def _check(arguments: argparse.Namespace) -> None:
    """Raises `ValueError` before anything is loaded."""
    for way in arguments.quantize:
        if way not in QUANTIZE:
            raise ValueError(f"--quantize must be of {', '.join(QUANTIZE)}, got {way!r}")
    if arguments.tokens < 2:
        raise ValueError(f"--tokens must be at least 2, got {arguments.tokens}")
    if arguments.threads is not None and arguments.threads < 1:
        raise ValueError(f"--threads must be at least 1, got {arguments.threads}")
    check_output("--json", arguments.json)
