"""`minifer parcae tradeoff`: speed against loss, by depth, early exit and KV policy."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from minifer.cli.parser import add_command
from minifer.cli.session import note

STEM = "parcae_tradeoff"


def add(experiments: Any) -> None:
    parser = add_command(
        experiments,
        "tradeoff",
        run,
        summary="tokens/s against loss through the server: depth, early exit, KV policies",
        about="Read held-out text through the engine at every depth, with early exit at several "
        "thresholds, and under every KV policy; generate through the HTTP server at some of these "
        "settings; print what each saves and what it loses. Four minutes on two idle cores.",
        examples=[
            ("parcae tradeoff", "the whole study of parcae-tiny"),
            ("parcae tradeoff --out results", "and its JSON, Markdown and figures"),
            ("parcae tradeoff --quick", "a few tokens of everything: does it run?"),
        ],
        code=[
            ("parcae/lab/tradeoff/study.py", "what is measured"),
            (
                "parcae/lab/tradeoff/kv_quality.py",
                "loss by depth, threshold and policy; what each loses",
            ),
            ("parcae/lab/tradeoff/serving_speed.py", "the server, and its client"),
            ("parcae/costs.py", "FLOPs, weight and KV bytes from the shapes"),
        ],
        prog="minifer parcae",
    )
    parser.add_argument(
        "--model",
        default="parcae-tiny",
        metavar="NAME",
        help="a loop model: parcae-tiny (default), or a folder",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help=f"write {STEM}.json, .md and .svg there"
    )
    parser.add_argument("--quick", action="store_true", help="a few tokens of everything")


def run(arguments: argparse.Namespace) -> int:
    out: Path | None = arguments.out
    if out is not None and out.is_file():
        raise ValueError(f"--out must be a folder, and {out} is a file")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # before minutes of work
    from tqdm import tqdm

    from minifer.parcae.lab.tradeoff.plots import save_plots
    from minifer.parcae.lab.tradeoff.report import markdown
    from minifer.parcae.lab.tradeoff.study import QUICK, Plan, study
    from minifer.weights.resolve import load_model

    loaded = load_model(arguments.model)
    plan = QUICK if arguments.quick else Plan()
    with tqdm(unit="part", disable=not sys.stderr.isatty(), leave=False) as bar:

        def progress(name: str) -> None:
            bar.set_description(name)
            bar.update()

        data = {"name": Path(arguments.model).name, **study(loaded, plan, progress)}
    command = f"minifer parcae tradeoff --model {data['name']}"
    text = markdown(data, command + (" --quick" if arguments.quick else ""))
    print(text, end="")
    if out is not None:
        (out / f"{STEM}.md").write_text(text, encoding="utf-8")
        (out / f"{STEM}.json").write_text(
            json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        save_plots(data, out, STEM)
        note(f"{out} holds {STEM}.json, .md and the figures")
    return 0
