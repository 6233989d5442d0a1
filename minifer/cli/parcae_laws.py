"""`minifer parcae laws`: what more loops are worth, in training and when the model runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

from minifer.cli.parser import add_command
from minifer.cli.session import note

STEM = "parcae_laws"
PARTS = ("test-time", "training", "isoflop", "depth-task")


def add(experiments: Any) -> None:
    parser = add_command(
        experiments,
        "laws",
        run,
        summary="what more loops are worth: loss by depth, training law, FLOPs, a task",
        about="Train tiny loop models and lay curves through their loss by depth; evaluate the "
        "published training law and count its FLOPs; spend one budget on loops or on tokens; "
        "learn a task in which every hop needs a loop. Measured here, published and computed are "
        "told apart, and what others found against it stands beside it. Minutes on two idle cores.",
        examples=[
            ("parcae laws", "all parts, minutes on two cores"),
            ("parcae laws --part training", "the published law alone: a second"),
            ("parcae laws --out results", "and JSON, Markdown and figures"),
            ("parcae laws --quick", "a few steps of everything: does it run?"),
        ],
        code=[
            ("parcae/lab/laws/fits.py", "curves through points, without an optimiser"),
            ("parcae/lab/laws/depth_law.py", "loss by depth of trained tiny models"),
            ("parcae/lab/laws/training_law.py", "the published law as functions"),
            ("parcae/lab/laws/flops.py", "FLOPs of a training token, tables left out"),
            ("parcae/lab/laws/isoflop.py", "a budget, spent on loops or on tokens"),
            ("parcae/lab/laws/depth_task.py", "accuracy by hops and loops"),
            ("parcae/lab/laws/counter_evidence.py", "what speaks against the headline"),
        ],
        prog="minifer parcae",
    )
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="one part (repeatable; default: all)"
    )
    parser.add_argument(
        "--seeds", type=_seeds, metavar="N,…", help="of models and batches (default: 0,1,2)"
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="trainings at a time (default: one a core)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help=f"write {STEM}.json, .md and figures there"
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help=f"keep the parts of FOLDER/{STEM}.json that this call does not make",
    )
    parser.add_argument("--quick", action="store_true", help="a few steps of everything, one seed")


def run(arguments: argparse.Namespace) -> int:
    out: Path | None = arguments.out
    if out is not None and out.is_file():
        raise ValueError(f"--out must be a folder, and {out} is a file")
    if arguments.merge and (out is None or not (out / f"{STEM}.json").is_file()):
        raise ValueError(f"--merge needs --out with a folder that holds {STEM}.json")
    if arguments.merge and arguments.quick:
        raise ValueError("--merge takes no --quick, whose numbers mean nothing")
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {arguments.jobs}")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # before minutes of work
    from tqdm import tqdm

    from minifer.parcae.lab.laws import study as laws
    from minifer.parcae.lab.laws.merge import merge
    from minifer.parcae.lab.laws.plots import save_plots
    from minifer.parcae.lab.laws.report import markdown

    parts = [part for part in PARTS if arguments.part is None or part in arguments.part]
    seeds = arguments.seeds or (laws.SEEDS[:1] if arguments.quick else laws.SEEDS)
    total = len(laws.plan(parts, seeds, arguments.quick))
    with tqdm(total=total, unit="training", disable=not sys.stderr.isatty(), leave=False) as bar:
        data = laws.study(
            parts,
            seeds=seeds,
            quick=arguments.quick,
            workers=arguments.jobs or os.cpu_count() or 1,
            progress=lambda: bar.update() and None,
        )
    data["command"] = _command(arguments)
    if out is not None and arguments.merge:
        data = merge(json.loads((out / f"{STEM}.json").read_text(encoding="utf-8")), data)
    text = markdown(data, data["command"])
    print(text, end="")
    if out is not None:
        (out / f"{STEM}.md").write_text(text, encoding="utf-8")
        (out / f"{STEM}.json").write_text(
            json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        paths = save_plots(data, out, STEM)
        note(f"{out} holds {STEM}.json, .md and {len(paths)} figures")
    return 0


def _seeds(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"must be integers such as 0,1,2, got {text!r}") from None


def _command(arguments: argparse.Namespace) -> str:
    words = ["minifer parcae laws"]
    words += [f"--part {part}" for part in arguments.part or ()]
    if arguments.seeds:
        words.append(f"--seeds {','.join(map(str, arguments.seeds))}")
    if arguments.jobs is not None:
        words.append(f"--jobs {arguments.jobs}")
    return " ".join([*words, *(["--quick"] if arguments.quick else [])])
