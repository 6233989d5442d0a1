"""`minifer bench decode --ladder`: one decode step, eleven ways."""

from __future__ import annotations

import argparse
from argparse import ArgumentTypeError
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from minifer.cli import session
from minifer.cli.output_files import check_output
from minifer.cli.parser import Parser
from minifer.kernels.mode import prepare

GPU_CELLS: Mapping[str, Any] = {
    "models": ("llama-1b", "smollm2-135m"),
    "batches": (1, 4, 16),
    "contexts": (512, 4096, 32768),
}
# The interpreter takes seconds a step.
CPU_CELLS: Mapping[str, Any] = {"models": ("minifer-tiny",), "batches": (1,), "contexts": (64,)}
_LOST = 3  # exit status: go on in a new process


# Options that only the ladder has, and their defaults.
OPTIONS: Mapping[str, Any] = {
    "layers": None,
    "rungs": None,
    "budget": 120.0,
    "probes": 8,
    "resume": False,
}


def add_ladder_options(parser: Parser) -> None:
    add = parser.add_argument_group(
        "ladder", "--model, --batch, --context, --seed, --device and --json serve it, too."
    ).add_argument
    add("--ladder", action="store_true", help="one step with random weights, a change a rung")
    add("--layers", type=int, metavar="L", help="only the model's first L (default: all)")
    add("--rungs", type=_names, metavar="NAME,…", help="of the ladder (default: all)")
    add("--budget", type=float, metavar="S", help="seconds a cell (default: 120)")
    add("--probes", type=int, metavar="N", help="steps compared (default: 8)")
    add("--resume", action="store_true", help="keep what --json holds, run only what is missing")


def run(arguments: argparse.Namespace) -> int:
    """The ladder, with models of its own names; the engine has no part in it."""
    for name, default in OPTIONS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    from minifer.perf.gpu.cell import cells_by_value
    from minifer.perf.gpu.rungs import RUNGS

    for name in ("budget", "probes"):
        if getattr(arguments, name) <= 0:
            raise ValueError(f"--{name} must be above 0, got {getattr(arguments, name)}")
    if arguments.resume and arguments.json is None:
        raise ValueError("--resume needs --json (or --out): the file to go on with")
    check_output("--json", arguments.json)
    unknown = [name for name in arguments.rungs or () if name not in RUNGS]
    if unknown:
        raise ValueError(f"--rungs must be of {', '.join(RUNGS)}, got {unknown[0]!r}")
    import torch

    device = choose_device(getattr(arguments, "device", "auto"))
    defaults = GPU_CELLS if device.type == "cuda" else CPU_CELLS
    models = _names(arguments.model or "") or defaults["models"]
    contexts = arguments.context or defaults["contexts"]
    batches = arguments.batch or defaults["batches"]
    cells = cells_by_value(models, batches, contexts, arguments.layers)
    if not cells:
        raise ValueError(f"--context must fit the model, got {contexts} for {', '.join(models)}")

    from minifer.perf.gpu.bandwidth import measure_bandwidth
    from minifer.perf.gpu.climb import DeviceLostError, climb
    from minifer.perf.gpu.ladder import Ladder, table

    settings = {key: getattr(arguments, key) for key in ("seed", "probes", "budget")}
    ladder = Ladder(
        {**settings, "device": str(device), "threads": torch.get_num_threads()},
        measure_bandwidth(device),
        arguments.json,
    )
    if arguments.resume:
        ladder.resume()
    rungs = [RUNGS[name] for name in arguments.rungs or RUNGS]
    try:
        climb(ladder, cells, rungs, device, arguments.budget, session.note)
    except DeviceLostError as error:
        session.note(f"{error}; the device is lost to this process, go on with --resume")
        return _LOST
    print(table(ladder))
    return 0


def choose_device(name: str) -> Any:
    """The torch.device of --device, and kernels made ready for a CPU while that is possible."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name} needs a GPU, and torch finds none")
    if device.type == "cpu":
        with suppress(ValueError):  # too late, or not on Linux: our kernels' lines will say so
            prepare("cpu")
    return device


def integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentTypeError(f"must be numbers such as 1,4,16, got {text!r}") from None


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
