"""`minifer kernels verify`: prove a megakernel's schedule, or say what is wrong with it."""

from __future__ import annotations

import argparse
import textwrap
import time
from collections import Counter
from typing import Any

from minifer.cli.parser import add_command
from minifer.kernels.mega.isa import Op
from minifer.kernels.mega.mutants import MUTANTS, mutate
from minifer.kernels.mega.schedule import POLICIES, SYNCS, Schedule, assign, build
from minifer.kernels.mega.shapes import MODELS, decode_shape
from minifer.kernels.mega.verify import Report, verify

SHOWN = 5  # errors


def add(questions: Any) -> None:
    parser = add_command(
        questions,
        "verify",
        run,
        summary="prove that a megakernel's schedule neither hangs nor races",
        about="Cut a decode step into instructions, deal them to the queues of the SMs, and prove "
        "without running anything: no wait hangs, no two instructions race, each piece is "
        "computed once and in the model's order. The exit status is 1 when a schedule is "
        "rejected, also when a fault was asked for.",
        examples=[
            ("kernels verify", "Llama-3.2-1B on the 132 SMs of an H100"),
            ("kernels verify --batch 16 --splits 8", "sixteen requests (half a minute)"),
            ("kernels verify --batch 2 --mutant stale-epoch", "a fault, and why it is rejected"),
            ("kernels verify --model minifer-tiny --programs 4 --batch 2 --mutants", "all faults"),
        ],
        code=[
            ("kernels/mega/verify.py", "the theorem, its proof, and what checks it"),
            ("kernels/mega/schedule.py", "who does what, when"),
            ("kernels/mega/isa.py", "what an instruction reads and writes"),
            ("kernels/mega/mutants.py", "the faults"),
        ],
        prog="minifer kernels",
    )
    parser.add_argument(
        "--model",
        choices=MODELS,
        default="llama-1b",
        metavar="NAME",
        help=f"{', '.join(MODELS)}: shapes only (default: llama-1b)",
    )
    for option, number, metavar, text in (
        ("--programs", 132, "N", "queues, one an SM"),
        ("--batch", 1, "B", "requests, at most 16"),
        ("--splits", 4, "S", "parts of a context that are attended to at once, a power of two"),
        ("--tile", 16, "N", "rows of a weight tile"),
        ("--seed", 0, "N", "of the policy random"),
    ):
        parser.add_argument(
            option, type=int, default=number, metavar=metavar, help=f"{text} (default: {number})"
        )
    for option, choices, default, text in (
        ("--policy", POLICIES, "list", "who gets which instruction"),
        ("--sync", SYNCS, "counters", "what they wait for: counters, or barriers of the grid"),
    ):
        parser.add_argument(
            option,
            choices=choices,
            default=default,
            metavar="NAME",
            help=f"{text}: {', '.join(choices)} (default: {default})",
        )
    faults = parser.add_mutually_exclusive_group()
    faults.add_argument("--mutant", metavar="NAME", help=f"with a fault: {', '.join(MUTANTS)}")
    faults.add_argument("--mutants", action="store_true", help="with every fault, a line each")


def run(arguments: argparse.Namespace) -> int:
    config = MODELS[arguments.model]
    shape = decode_shape(config, arguments.batch, arguments.splits, arguments.tile)
    graph = build(shape, arguments.programs)
    schedule = assign(
        graph, arguments.programs, arguments.policy, arguments.sync, seed=arguments.seed
    )
    if arguments.mutants:
        return _all_faults(schedule)
    if arguments.mutant:
        schedule = mutate(arguments.mutant, schedule)
    print(
        f"{arguments.model}, batch {shape.batch}, splits {shape.splits}, tile {shape.tile}, on "
        f"{arguments.programs} programs by policy {arguments.policy}, with {arguments.sync}\n"
    )
    start = time.perf_counter()
    report = verify(schedule)
    seconds = time.perf_counter() - start
    print(_look(schedule, report))
    print(_verdict(report, seconds))
    if arguments.mutant:
        fault = MUTANTS[arguments.mutant]
        print(_wrapped(f"on a GPU: {fault.effect}"))
        if fault.resembles:
            print(_wrapped(f"resembles: {fault.resembles}"))
    return 0 if report.ok else 1


def _look(schedule: Schedule, report: Report) -> str:
    """What the schedule looks like, a line a property."""
    items = [item for queue in schedule.queues for item in queue]
    kinds = Counter(Op(item.op).name for item in items if item.op in set(map(int, Op)))
    arrivals = Counter(item.signal for item in items if item.signal >= 0).values()
    lengths = [len(queue) for queue in schedule.queues]
    mean = len(items) / len(lengths)
    megabytes = [sum(map(schedule.shape.weight_bytes, queue)) / 1e6 for queue in schedule.queues]
    share, most = sum(megabytes) / len(megabytes), max(megabytes)
    rows = [
        ("instructions", f"{len(items):,}"),
        *(("", f"{count:,} {name}") for name, count in kinds.items()),
        ("a queue", f"{min(lengths)} to {max(lengths)} instructions, on average {mean:.1f}"),
        ("longest chain", f"{report.critical_path} instructions, each after the one before"),
        ("counters", f"{len(schedule.counters):,}, of at most {max(arrivals, default=0)} arrivals"),
        ("weights", f"{share:.2f} MB a program, at most {most:.2f} ({most / share:.1%} of that)"),
    ]
    return "\n".join(f"{name:15}{text}" for name, text in rows) + "\n"


def _verdict(report: Report, seconds: float) -> str:
    if report.ok:
        return _wrapped(
            f"PROVED in {seconds:.1f} s: it cannot hang, each piece is computed once, and "
            f"{report.num_pairs:,} conflicting accesses are in the model's order, whatever the "
            "timing."
        )
    lines = [f"REJECTED, {len(report.errors)} errors found:"]
    lines += [_wrapped(f"- {error}") for error in report.errors[:SHOWN]]
    if len(report.errors) > SHOWN:
        lines.append(f"- and {len(report.errors) - SHOWN} more")
    return "\n".join(lines)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 96, subsequent_indent="  ", break_on_hyphens=False)


def _all_faults(schedule: Schedule) -> int:
    """One line a fault: the first reason to reject it. 1, as for any rejected schedule."""
    width = max(map(len, MUTANTS)) + 2
    for name in MUTANTS:
        report = verify(mutate(name, schedule))
        reason = report.errors[0] if report.errors else "ACCEPTED"
        print(f"{name:{width}}{textwrap.shorten(reason, 96 - width, placeholder=' …')}")
    return 1
