"""`minifer bench startup`: from the command to its first token."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from minifer.cli import session
from minifer.cli.bench_speed import numbers
from minifer.cli.output_files import PICTURES, check_output, save_figure
from minifer.cli.parser import add_command, add_engine_options, add_model_option, engine_fields
from minifer.config import BACKENDS, EngineConfig

PROMPT = "What is the capital of France?"


def add(benchmarks: Any) -> None:
    parser = add_command(
        benchmarks,
        "startup",
        run,
        summary="from the command to its first token, and the memory it takes",
        about="Start `minifer generate` again and again, a fresh process each time, and split the "
        "time to its first token: interpreter, imports, tokenizer, weights, engine, prompt. Peak "
        "memory above the imports is held against weights and KV. A back end that compiles starts "
        "with its compiled step kept, and without. The command itself runs in turns with them.",
        examples=[
            ("bench startup", "the default model on the torch back end"),
            ("bench startup --backends torch,compiled", "two back ends in turns"),
            ("bench startup --cold", "also with the files out of the page cache"),
            ("bench startup --json r.json --plot r.png", "every number; the stages as bars"),
        ],
        code=[
            ("minifer/perf/startup.py", "the arms"),
            ("minifer/perf/startup_child.py", "one start, which notes when it got how far"),
        ],
        prog="minifer bench",
    )
    add = parser.add_argument
    add("--backends", type=_names, default=["torch"], metavar="NAME,…", help="in turns")
    add("--cold", action="store_true", help="also with the files out of the page cache")
    add("--prompt", default=PROMPT, metavar="TEXT", help=f"default: {PROMPT}")
    add("--runs", type=int, default=5, metavar="N", help="starts that count, an arm (default: 5)")
    add("--json", type=Path, metavar="FILE", help="write every number there")
    add("--plot", type=Path, metavar="FILE", help="draw the stages: .png, .svg or .pdf")
    add_model_option(parser)
    add_engine_options(parser)


def run(arguments: argparse.Namespace) -> int:
    options = engine_fields(arguments)
    if "backend" in options:
        raise ValueError("--backend is --backends here: bench startup compares several")
    if arguments.runs < 1:
        raise ValueError(f"--runs must be at least 1, got {arguments.runs}")
    check_output("--json", arguments.json)
    check_output("--plot", arguments.plot, PICTURES)
    for backend in arguments.backends:
        EngineConfig.from_kwargs(backend=backend, **options)
    if arguments.cold and not hasattr(os, "posix_fadvise"):
        raise ValueError("--cold: the page cache cannot be dropped on this system, leave it out")
    from minifer.perf.startup import measure_startup, table
    from minifer.weights.resolve import resolve_model

    dtype, device = numbers(options)
    resolved = resolve_model(arguments.model)
    if resolved.notice:
        session.note(resolved.notice)
    settings = {
        "model": resolved.path.name,
        "dtype": dtype,
        "device": device,
        "backends": arguments.backends,
        "prompt": arguments.prompt,
        "page_cache": "warm, and files given up with posix_fadvise" if arguments.cold else "warm",
        "bytecode": "compiled in every process" if sys.dont_write_bytecode else "cached",
        "engine": {name: str(value) for name, value in options.items()},
    }
    if sys.dont_write_bytecode:
        session.note("PYTHONDONTWRITEBYTECODE is set: every start compiles its Python files anew")
    result = measure_startup(
        resolved.path,
        prompt=arguments.prompt,
        backends=arguments.backends,
        cold=arguments.cold,
        runs=arguments.runs,
        options=options,
        settings=settings,
    )
    print(table(result))
    if arguments.json:
        result.write(arguments.json)
    if arguments.plot:
        from minifer.perf.startup_plot import figure

        save_figure(figure(result), arguments.plot)
    return 0


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in BACKENDS:
            raise argparse.ArgumentTypeError(f"must be some of {', '.join(BACKENDS)}, got {name!r}")
    return list(dict.fromkeys(names))
