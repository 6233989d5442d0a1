"""`minifer parcae stability`: what keeps a loop from exploding, forced and learned."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from argparse import ArgumentTypeError
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifer.cli.parser import add_command
from minifer.cli.session import note

if TYPE_CHECKING:
    from minifer.parcae.lab.stability.report import Study

PARTS = ("forced", "sweep")
NAME = "parcae_stability"  # of the files


def add(experiments: Any) -> None:
    parser = add_command(
        experiments,
        "stability",
        run,
        summary="what keeps a loop from exploding: a forced and a learned spectral radius",
        about="Forced: the same random blocks with a retention of ρ = 0.447 to 1.2, nothing "
        "trained. Sweep: Parcae's diagonal injection, concat and add, trained at four learning "
        "rates with several seeds. Every state is compared with the bounded-input bound; the exit "
        "status is 1 if one lies above it. Do not wait for NaN: at this size the last norm and "
        "the clipping of gradients hide an explosion from the loss.",
        examples=[
            ("parcae stability --part forced", "seconds"),
            ("parcae stability --quick", "both parts, fewer and shorter runs: under a minute"),
            ("parcae stability --out results", "all, in minutes; JSON, Markdown, CSV and figures"),
        ],
        code=[
            ("parcae/lab/stability/forced.py", "the argument, and the forced part"),
            ("parcae/lab/stability/bounds.py", "the bound, from the weights"),
            ("parcae/lab/stability/sweep.py", "the trained part"),
        ],
        prog="minifer parcae",
    )
    option = parser.add_argument
    option("--out", type=Path, metavar="FOLDER", help="write the results there (made if missing)")
    option("--part", choices=PARTS, metavar="NAME", help="forced or sweep (default: both)")
    option("--seeds", type=_integers, metavar="N,…", help="of the sweep (default: 0,1,2)")
    option("--steps", type=int, metavar="N", help="of a training run (default: 120)")
    option("--quick", action="store_true", help="one seed, two learning rates, 40 steps")
    option("--jobs", type=int, metavar="N", help="processes (default: one a core)")


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentTypeError(f"must be integers such as 0,1,2, got {text!r}") from None


def run(arguments: argparse.Namespace) -> int:
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {arguments.jobs}")
    if arguments.part == "forced":
        for name in ("seeds", "steps", "jobs"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name} is of the sweep: leave it out with --part forced")
    if arguments.out is not None:
        if arguments.out.exists() and not arguments.out.is_dir():
            raise ValueError(f"--out must be a folder, and {arguments.out} is a file")
        if find_spec("matplotlib") is None:
            raise RuntimeError('--out draws with matplotlib: pip install "minifer[course]"')
    done = _study(arguments)
    from minifer.parcae.lab.stability.tables import tables

    print(tables(done), end="")
    if arguments.out is not None:
        _write(done, arguments.out)
    return 0 if done.bound_holds else 1


def _study(arguments: argparse.Namespace) -> Study:
    from tqdm import tqdm

    from minifer.parcae.lab.stability.report import study
    from minifer.parcae.lab.stability.sweep import full_plan, quick_plan

    chosen = {"seeds": arguments.seeds, "steps": arguments.steps}
    given = {name: value for name, value in chosen.items() if value is not None}
    plan = quick_plan if arguments.quick else full_plan
    runs = plan(**given) if arguments.part != "forced" else []
    hidden = not runs or not sys.stderr.isatty()
    with tqdm(total=len(runs), unit="run", disable=hidden, leave=False) as bar:
        return study(
            runs,
            forced=arguments.part != "sweep",
            command=_command(arguments),
            jobs=arguments.jobs or os.cpu_count() or 1,
            done=lambda run: bar.update(),
        )


def _command(arguments: argparse.Namespace) -> str:
    """What gives these numbers again, wherever it writes them."""
    words = ["minifer", "parcae", "stability"]
    for name in ("part", "seeds", "steps"):
        value = getattr(arguments, name)
        if value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words += [f"--{name}", text]
    return shlex.join(words + ["--quick"] * arguments.quick)


def _write(done: Study, folder: Path) -> None:
    from minifer.parcae.lab.stability import plots
    from minifer.parcae.lab.stability.report import as_json, curves
    from minifer.parcae.lab.stability.tables import document

    folder.mkdir(parents=True, exist_ok=True)
    data = json.dumps(as_json(done), indent=1, ensure_ascii=False, allow_nan=False)
    (folder / f"{NAME}.json").write_text(data + "\n", encoding="utf-8")
    (folder / f"{NAME}.md").write_text(document(done), encoding="utf-8")
    figures = {}
    if done.forced:
        figures["forced"] = plots.forced_figure(done.forced)
    if done.outcomes:
        (folder / f"{NAME}_curves.csv").write_text(curves(done.outcomes), encoding="utf-8")
        figures["training"] = plots.training_figure(done.outcomes)
    for name, figure in figures.items():
        plots.save(figure, folder / f"{NAME}_{name}.svg")
    note(f"{folder} holds the numbers and the figures: {NAME}.*")
