"""Every mutant against the verifier, the co-simulator and the comparison of greedy tokens.

    python tests/kernels/mega/mutant_matrix.py > tests/reports/YYYY-MM-DD-megakernel-mutants.md

A decode step of two requests, two layers, two splits; eight interleavings each on 2 programs and
nine on 3.
"""

from __future__ import annotations

import platform
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":  # as tests/conftest.py and pytest's settings do for tests
    sys.path += [str(Path(__file__).parents[2])]
    from minifer.kernels.mode import interpret_without_gpu

    interpret_without_gpu()

import torch
from tiny_steps import NARROW, shape, tiny_step

from minifer.kernels.compat import TRITON_VERSION
from minifer.kernels.cosim.simulate import Interleaving
from minifer.kernels.mega.mutants import MUTANTS, mutate
from minifer.kernels.mega.schedule import Schedule, assign, build
from minifer.kernels.mega.verify import verify
from minifer.kernels.mega.watched_step import cosimulate_step


@dataclass
class Row:
    """What became of one mutant. runs: by program count, "found of all". kinds: what the runs
    found, in how many. tokens: runs that ended with the right greedy tokens, and the largest
    |Δlogit| among them."""

    name: str
    verifier: tuple[str, ...]
    found: dict[int, int] = field(default_factory=dict)
    runs: dict[int, int] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    right_tokens: int = 0
    worst_error: float = 0.0
    example: str = ""


def interleavings(programs: int) -> list[Interleaving]:
    found = [Interleaving(s, seed) for s in ("random", "priority") for seed in range(3)]
    return found + [Interleaving("priority", 0, starve=i) for i in range(programs)]


def sound(programs: int) -> Schedule:
    return assign(build(shape(2, 2, NARROW), programs), programs)


def examine(name: str) -> Row:
    """One mutant before the verifier, and in every interleaving of 2 and of 3 programs."""
    row = Row(name, verify(mutate(name, sound(2))).errors)
    for programs in (2, 3):
        broken, plans = mutate(name, sound(programs)), interleavings(programs)
        row.found[programs], row.runs[programs] = 0, len(plans)
        for how in plans:
            _run(row, broken, programs, how)
    return row


def _run(row: Row, broken: Schedule, programs: int, how: Interleaving) -> None:
    step = tiny_step(broken, stale=True, config=NARROW)
    result = cosimulate_step(step.megakernel, how)
    row.found[programs] += not result.ok
    row.kinds.update({reason.split(" ")[0].rstrip(":") for reason in result.reasons})
    row.example = row.example or (result.reasons[0] if result.reasons else "")
    if result.deadlock is None and step.tokens_are_right():
        row.right_tokens += 1
        row.worst_error = max(row.worst_error, step.error())


def main() -> None:
    table = []
    for row in map(examine, MUTANTS):
        table.append(row)
        print(f"{row.name}: {dict(row.found)}", file=sys.stderr, flush=True)
    total = sum(table[0].runs.values())
    fooled = sum(row.right_tokens for row in table)
    print("# Mutants of the megakernel's schedule, and who rejects them, 2026-11-29\n")
    print(
        "`python tests/kernels/mega/mutant_matrix.py`: a decode step of a random Llama (2 layers, "
        "2 requests, 2 splits; float32) in\nTriton's interpreter, "
        f"{table[0].runs[2]} interleavings on 2 programs and {table[0].runs[3]} on 3: random and "
        "priority order, 3 seeds each,\nand each program starved once. Python "
        f"{platform.python_version()}, torch {torch.__version__}, triton "
        f"{'.'.join(map(str, TRITON_VERSION))}; nothing ran on a GPU.\n"
    )
    print(
        "Co-simulator: runs that found something, of all runs. Right tokens: runs that ended with "
        "both requests' greedy tokens\nequal to float64's although the schedule is broken, and "
        "their largest |Δlogit|; a sound schedule's is below 1e-5.\n"
    )
    print(
        "| mutant | verifier | co-simulator, 2 programs | 3 programs | found as (runs) "
        "| right tokens | their Δlogit |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in table:
        kinds = ", ".join(f"{kind} {n}" for kind, n in row.kinds.most_common())
        verdict = row.verifier[0].split(":")[0] if row.verifier else "ACCEPTED"
        found = [f"{row.found[p]} of {row.runs[p]}" for p in (2, 3)]
        error = f"{row.worst_error:.1g}" if row.right_tokens else "–"
        cells = [row.name, verdict, *found, kinds, f"{row.right_tokens} of {total}", error]
        print(f"| {' | '.join(cells)} |")
    rejected = sum(bool(row.verifier) and sum(row.found.values()) > 0 for row in table)
    print(f"\n{rejected} of {len(table)} are rejected by both. ", end="")
    hidden = sum(row.right_tokens > 0 for row in table)
    print(
        f"Comparing greedy tokens accepts {fooled} of {total * len(table)} broken runs,\n"
        f"of {hidden} mutants.\n"
    )
    print("What the verifier and the first run that found something say:\n")
    for row in table:
        print(f"- **{row.name}**\n  - {row.verifier[0] if row.verifier else '–'}")
        print(f"  - {row.example or 'never found'}")


if __name__ == "__main__":
    main()
