"""The stability experiments as tables, for a terminal and as Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from minifer.parcae.lab.stability.forced import SHOWN_LOOPS, ForcedRow
from minifer.parcae.lab.stability.report import Study, as_json, findings, short
from minifer.parcae.lab.stability.sweep import Outcome

FORCED_HEADING = (
    "ρ", *(f"‖h‖ T={t}" for t in SHOWN_LOOPS), "growth", "rel. residual", "mean ‖R̄‖", "max ‖R̄‖",
    "max ‖h‖", "bound", "T → ∞",
)  # fmt: skip
SWEEP_HEADING = (
    "injection", "lr", "ρ", "max ρ", "‖h_8‖", "rel. residual", "max ‖h_T‖", "loss", "max ‖R̄‖",
    "‖h‖ ÷ bound",
)  # fmt: skip
READING = """\
Norms are Euclidean, of a token's vector of the state h; losses are nats a character. ρ is the
spectral radius of Ā in h ← Ā h + B̄ e + R̄, and R̄ what the blocks add. *bound*: what bounded
input allows, from Ā, the largest ‖B̄ e‖ and the largest ‖R̄‖ that was met; *T → ∞* its limit.
*growth*: mean ‖h_64‖ ÷ mean ‖h_63‖; the forced table's relative residual is of these two.
*‖h‖ ÷ bound* takes each token's own ‖B̄ e‖, over 32 loops, and must not pass 1. ‖h_8‖ and the
relative residual ‖h_8 − h_7‖ / ‖h_8‖ are of validation text after training, max ρ and max ‖h_T‖
of all training steps; *inf* is a state whose square is no float32. *loss*: mean of the last 20
training steps. *+ norm*, *− norm*: with or without the norm after the prelude, other than in the
injection's paper. Large numbers of runs with ρ > 1 differ between seeds and machines by orders of
magnitude; what does not is that they are large."""


def groups(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """Runs that differ only in their seed, in the order in which they appear."""
    found: dict[tuple[Any, ...], list[Outcome]] = {}
    for outcome in outcomes:
        run = outcome.run
        found.setdefault((run.arm, run.learning_rate, run.steps), []).append(outcome)
    return list(found.values())


def document(done: Study) -> str:
    """The tables as a Markdown file that says where they come from and how to read them."""
    data = as_json(done)
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    parts = [
        "# Stability of a loop: a forced and a learned spectral radius",
        f"Measured by `{done.command}` on {data['date']} ({versions}; one thread a run).",
        READING,
    ]
    return "\n\n".join(parts) + "\n\n" + tables(done, markdown=True)


def tables(done: Study, *, markdown: bool = False) -> str:
    """Both tables and the findings, for a terminal (with how to read them) or as Markdown."""
    write = _markdown if markdown else _aligned
    parts = []
    mark = "## " if markdown else ""
    if done.forced:
        parts += [
            f"{mark}Forced spectral radius: nothing trained, Ā = ρ · 1, B̄ = 0.8 · 1",
            write(FORCED_HEADING, [_forced_cells(row) for row in done.forced]),
        ]
    if done.outcomes:
        seeds = sorted({outcome.run.seed for outcome in done.outcomes})
        named = ", ".join(map(str, seeds))
        many = f"median and range of {len(seeds)} seeds," if len(seeds) > 1 else "seed"
        steps = done.outcomes[0].run.steps
        parts += [
            f"{mark}Trained for {steps} steps: {many} {named}",
            write(SWEEP_HEADING, [_sweep_cells(group) for group in groups(done.outcomes)]),
        ]
    parts.append("\n".join(f"- {sentence}" for sentence in findings(done)))
    if not markdown:
        parts.append(READING.replace("*", ""))
    return "\n\n".join(parts) + "\n"


def _forced_cells(row: ForcedRow) -> list[tuple[str, str]]:
    check = row.check
    numbers = [
        *(row.norms[t] for t in SHOWN_LOOPS), row.growth, row.relative_residual, row.block,
        check.block, check.state, check.bound, check.limit if check.limit is not None else math.nan,
    ]  # fmt: skip
    texts = [short(x) for x in numbers]
    texts[len(SHOWN_LOOPS)] = f"{row.growth:.4f}"
    return [(str(row.rho), ""), *((text, "") for text in texts)]


def _sweep_cells(group: Sequence[Outcome]) -> list[tuple[str, str]]:
    """(median, range) of every column."""
    run = group[0].run
    columns: list[list[float]] = [
        [o.rho for o in group], [o.max_rho for o in group], [o.state_norm for o in group],
        [o.relative_residual for o in group], [o.max_state_norm for o in group],
        [o.loss for o in group], [o.check.block for o in group], [o.check.fits for o in group],
    ]  # fmt: skip
    return [(run.arm.name, ""), (f"{run.learning_rate:g}", ""), *map(_spread, columns)]


def _spread(values: Sequence[float]) -> tuple[str, str]:
    low, high = short(min(values)), short(max(values))
    return short(statistics.median(values)), "" if low == high else f"{low} – {high}"


def _markdown(heading: Sequence[str], rows: Sequence[Sequence[tuple[str, str]]]) -> str:
    lines = [heading, ["---"] * len(heading)]
    lines += [[f"{first} ({second})" if second else first for first, second in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _aligned(heading: Sequence[str], rows: Sequence[Sequence[tuple[str, str]]]) -> str:
    lines: list[Sequence[str]] = [heading]
    for row in rows:
        lines.append([first for first, _ in row])
        if any(second for _, second in row):
            lines.append([second for _, second in row])
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    padded = (
        [" " * (width - _width(cell)) + cell for cell, width in zip(line, widths, strict=True)]
        for line in lines
    )
    return "\n".join("  ".join(line) for line in padded)


def _width(text: str) -> int:
    """Columns on a screen: a combining bar takes none."""
    return len(text.replace("\u0304", ""))
