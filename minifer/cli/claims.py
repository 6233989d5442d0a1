"""`minifer claims`: what is said about serving, worked out again and broken."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifer.cli.output_files import PICTURES, check_output, save_figure
from minifer.cli.parser import add_command

if TYPE_CHECKING:
    from minifer.claims.claim import Claim, Findings, Settings

LIST, ALL = "list", "all"


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "claims NAME",
        run,
        summary="work out again what is claimed about serving, and what breaks it",
        about="The serving-claims laboratory: sentences from papers and talks, each computed "
        "afresh, with the setting that breaks it and what one may honestly say. NAME is a claim, "
        "list (the names) or all (one after the other, in a few minutes). Results depend on the "
        "seed and on nothing else. What is simulated says so, with the step times it used.",
        examples=[
            ("claims list", "the names, and who said it"),
            ("claims lru", "one of them"),
            ("claims routing --plot routing.png", "with its figure"),
            ("claims all --out figures", "all of them, each figure into a folder, and a summary"),
            ("claims lru --trace conversation_trace.jsonl", "on real requests, where you have any"),
        ],
        code=[
            ("minifer/claims/claim.py", "what a claim is"),
            ("minifer/claims/", "one file a claim"),
            ("minifer/simulation/", "the simulator, over the engine's own scheduler"),
        ],
    )
    add = parser.add_argument
    add("name", metavar="NAME", help="a claim, list or all")
    add("--seed", type=int, default=0, metavar="N", help="of everything drawn (default: 0)")
    add("--json", action="store_true", help="print JSON: every number, and the figures' data")
    picture = parser.add_mutually_exclusive_group()
    picture.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .png, .svg or .pdf")
    picture.add_argument(
        "--out", type=Path, metavar="FOLDER", help="draw each claim into FOLDER/NAME.png"
    )
    add("--trace", type=Path, metavar="FILE", help="real requests, for claims that take them")
    add("--processes", type=int, metavar="N", help="at the same time (default: one a core)")


def run(arguments: argparse.Namespace) -> int:
    from minifer.claims import registry
    from minifer.claims.claim import Settings

    if arguments.name == LIST:
        return _list(arguments.json)
    chosen = registry.names() if arguments.name == ALL else [arguments.name]
    claims = [registry.get(name) for name in chosen]  # a wrong name costs nothing
    _check(arguments, claims)
    given = {} if arguments.processes is None else {"processes": arguments.processes}
    settings = Settings(arguments.seed, arguments.trace, **given)
    results = []
    for claim in claims:
        if len(claims) > 1 and sys.stderr.isatty():
            print(f"{claim.name} …", end="\r", file=sys.stderr)
        started = time.perf_counter()
        findings = claim.reproduce(settings)
        results.append((claim, findings, time.perf_counter() - started))
        _picture(arguments, claim, findings)
        if not arguments.json:
            _print(claim, findings, more=len(claims) > 1)
    _end(arguments, results, settings)
    return 0


def _check(arguments: argparse.Namespace, claims: list[Claim]) -> None:
    """Raises `ValueError` before anything is computed."""
    if arguments.plot is not None and len(claims) > 1:
        raise ValueError(f"--plot draws one claim, use --out FOLDER with {ALL}")
    check_output("--plot", arguments.plot, PICTURES)
    if arguments.out is not None:
        if not arguments.out.is_dir():
            raise ValueError(f"--out: there is no folder {arguments.out}, make it first")
        check_output("--out", arguments.out / "claim.png", PICTURES)
    if arguments.trace is not None:
        if len(claims) > 1:
            raise ValueError(f"--trace belongs to one claim, not to {ALL}")
        if not claims[0].trace:
            raise ValueError(f"--trace: {claims[0].name} replays no requests")
        if not arguments.trace.is_file():
            raise ValueError(f"--trace: there is no file {arguments.trace}")


def _list(as_json: bool) -> int:
    from minifer.claims import registry

    claims = [registry.get(name) for name in registry.names()]
    if as_json:
        rows = [
            {
                "name": claim.name,
                "statement": claim.statement,
                "sources": [{"title": s.title, "url": s.url} for s in claim.sources],
            }
            for claim in claims
        ]
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return 0
    width = max(len(claim.name) for claim in claims) + 2
    for claim in claims:
        print(f"{claim.name:{width}}{claim.statement}")
        print(f"{'':{width}}{claim.sources[0].url}")
    return 0


def _picture(arguments: argparse.Namespace, claim: Claim, findings: Findings) -> None:
    file = arguments.plot
    if arguments.out is not None:
        file = arguments.out / f"{claim.name}.png"
    if file is not None:
        from minifer.claims.figures import draw

        save_figure(draw(claim, findings), file)


def _print(claim: Claim, findings: Findings, *, more: bool) -> None:
    from minifer.claims import report

    print(report.text(claim, findings), flush=True)
    if more:
        print("\n" + "─" * report.WIDTH + "\n", flush=True)


def _end(
    arguments: argparse.Namespace,
    results: list[tuple[Claim, Findings, float]],
    settings: Settings,
) -> None:
    from minifer.claims import report

    if arguments.json:
        found = [report.to_dict(claim, findings, settings) for claim, findings, _ in results]
        whole = found if arguments.name == ALL else found[0]
        print(json.dumps(whole, indent=2, ensure_ascii=False))
    elif len(results) > 1:
        print("\n".join(report.summary(results)))
