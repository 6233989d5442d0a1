"""`minifer parcae batching`: how often the core is read for requests of mixed depth."""

from __future__ import annotations

import argparse
import json
from argparse import ArgumentTypeError
from typing import Any

from minifer.cli.parser import add_command
from minifer.loops import LOOP_BATCHING

LEGEND = """\
The engine counts the same. saving: of the applications that lockstep makes above the bound, the
share avoided; rows each: requests that an application serves; reads: of all weights, in cores, an
application one and a step what is named above. (bound): what no order can do without."""


def add(experiments: Any) -> None:
    parser = add_command(
        experiments,
        "batching",
        run,
        summary="requests of mixed depth in one batch: how often the core is read, counted",
        about="Requests take the depths in turn, a few at a time. Counts the applications of the "
        "core when a step ends with its first request (continuous), with half of them (patient) "
        "and with its deepest (lockstep, the default), beside what no order can do without; and "
        "all weights read, in units of one core, prelude, coda and head included. A small random "
        "model counts the same in the engine. No clock: for times run `minifer parcae tradeoff`.",
        examples=[
            ("parcae batching", "depths 1, 2, 4 and 8 on 8 seats"),
            ("parcae batching --depths 7,8", "where waiting a little reads less"),
            ("parcae batching --model parcae-1.3b --json", "with another model's weights"),
        ],
        code=[
            ("parcae/lab/depth_batching.py", "the bound and the simulation"),
            ("minifer/execution/loops/runner.py", "what ends a step"),
        ],
        prog="minifer parcae",
    )
    option = parser.add_argument
    option("--depths", type=_depths, default=(1, 2, 4, 8), metavar="T,…", help="default: 1,2,4,8")
    option("--requests", type=int, default=32, metavar="N", help="default: 32")
    option("--tokens", type=int, default=16, metavar="N", help="of an answer (default: 16)")
    option("--seats", type=int, default=8, metavar="N", help="requests at a time (default: 8)")
    option(
        "--model", default="parcae-140m", metavar="PRESET", help="whose weights (default: 140m's)"
    )
    option("--json", action="store_true", help="print JSON")


def _depths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"must be integers such as 1,2,4,8, got {text!r}") from None


def run(arguments: argparse.Namespace) -> int:
    for name in ("requests", "tokens", "seats"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    from minifer.parcae.lab import depth_batching as lab
    from minifer.parcae.presets import PRESETS

    if arguments.model not in PRESETS:
        raise ValueError(f"--model must be one of {', '.join(PRESETS)}, got {arguments.model!r}")
    jobs = lab.workload(arguments.depths, arguments.requests, arguments.tokens)
    edge = lab.edge_of(PRESETS[arguments.model])
    rows = lab.table(jobs, arguments.seats, edge)
    counted = {name: lab.measure(jobs, arguments.seats, name) for name in LOOP_BATCHING}
    simulated = {name: lab.simulate(jobs, arguments.seats, name) for name in counted}
    if counted != simulated:
        raise RuntimeError(f"the engine counts {counted}, the simulation {simulated}")
    if arguments.json:
        print(json.dumps({"model": arguments.model, "edge": edge, "rows": rows}))
        return 0
    depths = ", ".join(map(str, arguments.depths))
    print(
        f"{arguments.requests} requests of depth {depths} in turn, {arguments.tokens} tokens each"
    )
    print(f"seats: {arguments.seats}; a step's prelude, coda and head: {edge:.2f} cores of weights")
    print()
    columns = list(rows[0])
    print(
        "".join(f"{name:>{len(name) + 2}}" if i else f"{name:12}" for i, name in enumerate(columns))
    )
    for row in rows:
        cells = [f"{row['steps end']:12}"]
        for name in columns[1:]:
            cells.append(f"{_cell(name, row.get(name)):>{len(name) + 2}}")
        print("".join(cells).rstrip())
    print()
    print(LEGEND)
    return 0


def _cell(name: str, value: object) -> str:
    if isinstance(value, float):
        return {"saving": f"{value:.0%}", "reads": f"{value:.0f}"}.get(name, f"{value:.2f}")
    return "" if value is None else str(value)
