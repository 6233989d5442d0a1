"""`minifer faults`: the bug clinic."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import textwrap
from typing import Any

from minifer.cli.parser import add_command


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "faults",
        run,
        summary="break the engine the way real ones were broken, and see who notices",
        about="The bug clinic: faults of production engines, each a switch on the real one. "
        "Without options, a list. --show explains a fault, serves the same requests with and "
        "without it, and says who notices. --matrix tries all faults on all detectors; the exit "
        "status is 1 when a fault is caught by nothing.",
        examples=[
            ("faults", "the list"),
            ("faults --show off-by-one-length", "mechanism, symptom, live demo, code, sources"),
            ("faults --matrix", "faults × detectors, found out by running it (about a minute)"),
        ],
        code=[
            ("minifer/faults/registry.py", "what a fault is"),
            ("minifer/faults/memory.py", "the faults of KV memory; others in the files beside it"),
            ("minifer/faults/detectors.py", "who notices"),
            ("minifer/faults/matrix.py", "the matrix"),
            ("minifer/canary.py", "prompts whose log-probabilities are known"),
            ("minifer/debug.py", "poison, guard bands, shadow: what debug mode does"),
        ],
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--show", metavar="NAME", help="one fault, live")
    what.add_argument("--matrix", action="store_true", help="all faults, all detectors")
    parser.add_argument("--json", action="store_true", help="with --matrix: print JSON")
    parser.add_argument(
        "--model",
        default="minifer-tiny",
        metavar="NAME",
        help="the patient, as for `minifer generate` (default: minifer-tiny, for which the scenes "
        "are written)",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.json and not arguments.matrix:
        raise ValueError("--json needs --matrix")
    if arguments.show is not None:
        return _show(arguments.show, arguments.model)
    if arguments.matrix:
        return _matrix(arguments.model, arguments.json)
    from minifer.faults import registry

    faults = [registry.get(name) for name in registry.names()]
    width = max(len(fault.name) for fault in faults) + 2
    for fault in faults:
        print(f"{fault.name:{width}}{fault.title}")
    return 0


def _show(name: str, model: str) -> int:
    from minifer.faults import registry

    fault = registry.get(name)  # before the model is loaded: a wrong name costs nothing
    from minifer.faults import matrix
    from minifer.weights.resolve import load_model

    print(f"{fault.title}\n")
    for heading, text in (("mechanism", fault.mechanism), ("symptom", fault.symptom)):
        print(textwrap.fill(f"{heading}: {text}", 96, subsequent_indent="  ") + "\n")
    print(f"the fault, on a running engine:\n\n{_indented(inspect.getsource(fault.inject))}")
    print(f"what is served:\n\n{_indented(inspect.getsource(fault.scene))}")
    loaded = load_model(model, "auto", "auto")
    for heading, text in zip(("without", "with"), matrix.demonstrate(loaded, fault), strict=True):
        print(f"{heading} the fault:\n\n{_indented(text)}")
    witnesses = matrix.run_matrix(loaded, [name]).caught[name]
    print("who notices, in a workload of many requests:\n")
    width = max([len(detector) for detector in witnesses] or [0]) + 2
    for detector, alarm in witnesses.items():
        print(f"  {detector:{width}}{textwrap.shorten(alarm, 96 - width)}")
    print("" if witnesses else "  nobody\n")
    print("reported in:\n")
    for source in fault.sources:
        print(f"  {source.title}\n    {source.url}")
    return 0 if witnesses else 1


def _indented(text: str) -> str:
    return textwrap.indent(text.rstrip() + "\n", "  ")


def _matrix(model: str, as_json: bool) -> int:
    from tqdm import tqdm

    from minifer.faults import registry
    from minifer.faults.matrix import run_matrix
    from minifer.weights.resolve import load_model

    loaded = load_model(model, "auto", "auto")
    names = registry.names()
    with tqdm(total=len(names), unit="fault", disable=not sys.stderr.isatty()) as bar:
        matrix = run_matrix(loaded, names, progress=lambda name: bar.update())
    if as_json:
        print(json.dumps(matrix.to_dict(), indent=2, ensure_ascii=False))
    else:
        print(matrix.table())
        print("\n● caught, · silent, ✕ of no use: it raised an alarm without a fault too")
    return 1 if matrix.missed else 0
