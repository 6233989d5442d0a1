"""The stability experiments in two pictures: a radius that is forced, and one that is learned.

matplotlib (extra `course`) is imported on first use. Colours are those of Okabe and Ito, "Color
Universal Design", https://jfly.uni-koeln.de/color/.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifer.parcae.lab.stability.forced import ForcedRow
from minifer.parcae.lab.stability.sweep import Arm, Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORCED_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#767676")
_COLOURS = {"diagonal": "#0072B2", "concat": "#D55E00", "add": "#009E73"}
_TOP = 1e20  # the square of what is longer is no float32: drawn at the edge
_PANELS = (
    ("rho", "ρ(Ā)", "spectral radius"),
    ("state_norm", "mean ‖h_T‖", "state"),
    ("loss", "nats a character", "training loss"),
)


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError('a plot needs matplotlib: pip install "minifer[course]"') from None
    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def forced_figure(rows: Sequence[ForcedRow]) -> Figure:
    """‖h_t‖ with its bound, and what the blocks add, over the iterations."""
    figure = _figure(10, 4.4)
    figure.suptitle("Nothing trained: the same random blocks, Ā = ρ · 1", fontsize=11)
    state, block = figure.subplots(1, 2, width_ratios=(1.6, 1))
    for row, colour in zip(rows, _cycle(len(rows)), strict=True):
        loops = range(len(row.norms))
        label = f"ρ = {row.rho:g}"
        state.plot(loops[1:], row.norms[1:], color=colour, linewidth=1.8, label=label)
        state.plot(loops[1:], row.bounds[1:], color=colour, linestyle=":", linewidth=1.2)
        block.plot(loops[1:], row.blocks, color=colour, linewidth=1.5, label=label)
    state.plot([], [], color="black", linestyle=":", linewidth=1.2, label="its bound")
    state.set_yscale("log")
    _label(state, "State: levels off, grows with t, explodes", "iteration t", "‖h_t‖, mean")
    block.set_ylim(0, 1.25 * max(max(row.blocks) for row in rows))
    _label(block, "What the blocks add: as much in all", "iteration t", "‖R̄‖, mean")
    state.legend(fontsize=9, loc="upper left")
    return figure


def training_figure(outcomes: Sequence[Outcome]) -> Figure:
    """ρ, ‖h_T‖ and loss over the steps: a column a learning rate, a line a seed."""
    rates = sorted({outcome.run.learning_rate for outcome in outcomes})
    arms = list(dict.fromkeys(outcome.run.arm for outcome in outcomes))
    seeds = sorted({outcome.run.seed for outcome in outcomes})
    figure = _figure(3 * len(rates) + 1, 8.4)
    figure.suptitle(
        f"Trained: a thin line a seed ({', '.join(map(str, seeds))}), Poisson depth of mean 8",
        fontsize=11,
    )
    grid = figure.subplots(len(_PANELS), len(rates), sharex=True, sharey="row", squeeze=False)
    for axes, (name, unit, title) in zip(grid, _PANELS, strict=True):
        for column, rate in enumerate(rates):
            one = axes[column]
            for outcome in outcomes:
                if outcome.run.learning_rate == rate:
                    _draw(one, outcome, name)
            heading = f"{title}, learning rate {rate:g}"
            last = name == _PANELS[-1][0]
            _label(one, heading, "step" if last else "", unit if column == 0 else "")
            if name == "rho":
                one.axhline(1, color="black", linewidth=0.8, zorder=0)
                one.set_yscale("log")
                one.set_yticks([0.5, 1, 2, 5], ["0.5", "1", "2", "5"], minor=False)
                one.minorticks_off()
            elif name == "state_norm":
                one.set_yscale("log")
    handles = [grid[0, 0].plot([], [], label=arm.name, **_style(arm))[0] for arm in arms]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(arms), fontsize=9)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG: the same numbers give the same bytes."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "minifer"}):
        figure.savefig(path, metadata={"Date": None})


def _draw(axes: Axes, outcome: Outcome, name: str) -> None:
    values = [getattr(record, name) for record in outcome.records]
    if name == "state_norm":
        values = [min(value, _TOP) for value in values]
    values = [value if math.isfinite(value) else math.nan for value in values]
    steps = [record.step for record in outcome.records]
    axes.plot(steps, values, linewidth=1, alpha=0.85, **_style(outcome.run.arm))


def _style(arm: Arm) -> dict[str, Any]:
    plain = arm.name == arm.injection
    return {"color": _COLOURS[arm.injection], "linestyle": "-" if plain else ":"}


def _cycle(count: int) -> list[str]:
    return [_FORCED_COLOURS[i % len(_FORCED_COLOURS)] for i in range(count)]


def _label(axes: Axes, heading: str, x: str, y: str) -> None:
    axes.set_title(heading, fontsize=10, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
