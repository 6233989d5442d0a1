"""What `minifer bench decode | prefill | throughput` share: options, turns, what is written."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifer.cli import session
from minifer.cli.bench_peers import (
    MOST_STEP_TOKENS,
    check_peers,
    elsewhere,
    without_speculation,
)
from minifer.cli.output_files import PICTURES, check_output, save_figure
from minifer.cli.parser import Parser, add_engine_options, add_model_option, engine_fields
from minifer.config import EngineConfig, ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from minifer.perf.speed.benchmark import Engine, SpeedReport
    from minifer.perf.speed.engines import Tasks


def add_speed_options(parser: Parser, *, runs: int = 5) -> None:
    """--model, how often and against whom, where the result goes, and the engine's options."""
    add_model_option(parser)
    add = parser.add_argument_group("measurement").add_argument
    add("--runs", type=int, default=runs, metavar="N", help=f"rounds (default: {runs})")
    add("--seed", type=int, default=0, metavar="N", help="of the prompts (default: 0)")
    add("--threads", type=int, metavar="N", help="on a CPU (default: torch's choice, the cores)")
    add_output_options(parser.add_argument_group("result"))
    add_engine_options(parser)


def add_output_options(group: Any) -> None:
    add = group.add_argument
    add("--json", "--out", dest="json", type=Path, metavar="FILE", help="write every number there")
    add("--plot", type=Path, metavar="FILE", help="draw it (.png, .svg or .pdf)")


def check_measurement(arguments: argparse.Namespace) -> None:
    """Raises `ValueError` before anything is loaded."""
    for name in ("runs", "threads"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    EngineConfig.from_kwargs(**engine_fields(arguments))
    check_output("--json", arguments.json)
    check_output("--plot", arguments.plot, PICTURES)
    check_peers(arguments)


def set_threads(threads: int | None) -> int:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def run_speed(
    arguments: argparse.Namespace,
    name: str,
    config: ModelConfig,
    tasks: Tasks,
    defaults: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> int:
    """Measure, print and write. tasks: of a turn. defaults: engine options that nobody gave.
    settings: what the tasks were made of. Exit status 1 when another engine broke down."""
    from minifer.perf.speed.benchmark import measure_speed
    from minifer.perf.speed.ceilings import Ceilings
    from minifer.perf.speed.report import table

    threads = set_threads(arguments.threads)
    options = _engine_options(arguments, config, tasks, defaults)
    versus = bool(arguments.vs)
    engines, skipped = (
        elsewhere(arguments, config, tasks, options, threads, *numbers(options))
        if versus
        else (_here(arguments, options), {})
    )
    dtype, device = numbers(options)
    report = measure_speed(
        name,
        engines,
        tasks,
        config,
        Ceilings(dtype, device, passes=_passes(config, device)),
        runs=arguments.runs,
        warmup=0 if versus else 1,
        settings={
            "model": arguments.model,
            **settings,
            "dtype": dtype,
            "kv_bytes": _kv_bytes(config, options, dtype),
            "threads": threads,
            "seed": arguments.seed,
            "engine": {key: str(value) for key, value in options.items()},
        },
        skipped=skipped,
        note=session.note,
    )
    print(table(report))
    write(arguments, report)
    return 1 if report.failed else 0


def _passes(config: ModelConfig, device: str) -> list[Callable[[Tensor], object]]:
    """The compiled step's way of reading memory, where there is one."""
    from minifer.kernels.cpu.build import CompilerError, load
    from minifer.kernels.cpu.step import read_all

    if device != "cpu" or config.head_dim % 16:
        return []
    try:
        library = load(config.head_dim, config.num_heads // config.num_kv_heads)
    except CompilerError:
        return []
    return [partial(read_all, library)]


def write(arguments: argparse.Namespace, report: SpeedReport) -> None:
    if arguments.json is not None:
        report.result.write(arguments.json)
    if arguments.plot is not None:
        from minifer.course.pictures.roofline import roofline
        from minifer.course.pictures.roofline_data import points_of
        from minifer.weights.resolve import model_label, resolve_model

        points = points_of(report.rows)
        if not points:
            session.note("--plot: no point has a place under a roofline, nothing is drawn")
            return
        model = model_label(arguments.model, resolve_model(arguments.model).path)
        figure = roofline(
            report.here,
            (),
            title=f"{model}: whole steps under this machine's roof",
            measured=points,
            labels={point.name: point.name for point in points},
        )
        save_figure(figure, arguments.plot)


def _engine_options(
    arguments: argparse.Namespace,
    config: ModelConfig,
    tasks: Tasks,
    defaults: Mapping[str, Any],
) -> dict[str, Any]:
    """Those given, then room for all requests at once."""
    from minifer.perf.speed.cells import needed_blocks

    given = engine_fields(arguments)
    asked = tasks(0)
    longest = max(len(ask.prompt) + ask.max_tokens for task in asked for ask in task.asks)
    limit = min(given.get("max_model_len") or longest, config.max_position_embeddings)
    if longest > limit:
        raise ValueError(f"--context and --tokens must fit {limit} tokens in all, got {longest}")
    block_size = given.get("block_size", EngineConfig().block_size)
    options = dict(defaults)
    options.setdefault("max_num_seqs", max(len(task.asks) for task in asked))
    most = max(sum(task.prompts) for task in asked)
    options["max_num_batched_tokens"] = min(MOST_STEP_TOKENS, max(2048, most))
    if "kv_cache_bytes" not in given:
        options["num_kv_blocks"] = sum(needed_blocks(task.asks, block_size) for task in asked)
    if arguments.vs:
        options["dtype"] = "bfloat16"
    return {**options, **given}


def numbers(options: Mapping[str, Any]) -> tuple[str, str]:
    """(dtype, device) that the engine will compute with."""
    import torch

    device = options.get("device", "auto")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = options.get("dtype", "auto")
    if dtype == "auto":
        coded = options.get("quantize", "none") != "none"
        dtype = "float32" if device == "cpu" and not coded else "bfloat16"
    return dtype, device


def _kv_bytes(config: ModelConfig, options: Mapping[str, Any], dtype: str) -> int:
    from minifer.perf.costs import kv_bytes_per_token

    if "num_kv_blocks" not in options:
        return int(options["kv_cache_bytes"])
    block_size = options.get("block_size", EngineConfig().block_size)
    element = 4.0 if dtype == "float32" else 2.0
    return int(options["num_kv_blocks"] * block_size * kv_bytes_per_token(config, element))


def _here(arguments: argparse.Namespace, options: Mapping[str, Any]) -> dict[str, Engine]:
    from minifer.perf.speed.benchmark import OURS, WITHOUT
    from minifer.perf.speed.engines import Here

    session.note(f"loading {arguments.model}")
    engines: dict[str, Engine] = {OURS: Here(arguments.model, options)}
    if (plain := without_speculation(options)) is not None:
        engines[WITHOUT] = Here(arguments.model, plain)
    return engines


def cells(kind: str, batches: Sequence[int], contexts: Sequence[int], tokens: int) -> list[Any]:
    """All combinations, checked."""
    from minifer.perf.speed.cells import Cell

    return [Cell(kind, batch, context, tokens) for context in contexts for batch in batches]
