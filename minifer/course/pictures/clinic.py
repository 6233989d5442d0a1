"""Pictures of the bug clinic: symptoms side by side, who is ill in which layer and step, chances.

What they draw comes from `clinic_data`, which claims and tests check.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minifer.claims.rare_bugs import RATE, chance_to_see, chance_with_repeats
from minifer.course.figures import (
    HATCHES,
    PALETTE,
    SERIES,
    finish,
    label_axes,
    new_figure,
    patch,
)
from minifer.course.pictures.clinic_cases import Case
from minifer.course.pictures.clinic_data import NAN, WELL, WRONG, Content

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SMALL, _NORMAL = 9, 10  # points
_COLOURS = {WELL: PALETTE["free"], WRONG: PALETTE["decode"], NAN: "black"}
_GREY, _WRAP = "#767676", "white-space:pre-wrap;overflow-wrap:anywhere"


def gallery_html(cases: Sequence[Case]) -> str:
    """A row a fault: what a healthy engine says, and what comes with the fault, as HTML.

    What both begin with is grey.
    """
    style = "vertical-align:top;text-align:left;padding:4px 10px"
    head = f'<th style="{style}">a healthy engine</th><th style="{style}">with the fault</th>'
    rows = []
    for case in cases:
        pairs = zip(case.healthy, case.broken, strict=False)
        same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        cells = "".join(
            f'<td style="{style};width:50%"><code style="{_WRAP}">'
            f'<span style="color:{_GREY}">{html.escape(text[:same])}</span>'
            f"{html.escape(text[same:])}</code></td>"
            for text in (case.healthy, case.broken)
        )
        title = html.escape(case.title)
        rows.append(f'<tr><th colspan="2" style="{style}">{title}</th></tr><tr>{cells}</tr>')
    return f'<table style="width:100%;table-layout:fixed"><tr>{head}</tr>{"".join(rows)}</table>'


def health_figure(
    grid: Sequence[Sequence[str]],
    *,
    title: str,
    looked: Sequence[tuple[int, int]] | None = None,
    found: tuple[int, int] | None = None,
) -> Figure:
    """A column a step, a row a layer, the logits on top: well, wrong, or NaN.

    looked: (step, row) of the cells that were looked at, in order; the others are not shown.
    found: the cell that a search says is the first.
    """
    rows, steps = len(grid), len(grid[0])
    figure = new_figure(2.2 + 0.31 * steps, 1.9 + 0.36 * rows)
    axes = figure.subplots()
    order = {cell: number for number, cell in enumerate(looked or (), start=1)}
    for row, states in enumerate(grid):
        for step, state in enumerate(states):
            hidden = looked is not None and (step, row) not in order
            _cell(axes, step, row, None if hidden else state)
            if (step, row) in order:
                ink = "black" if state == WELL else "white"
                _mark(axes, step, row, str(order[step, row]), ink)
    if found is not None:
        _frame(axes, *found)
    axes.set_xlim(-0.5, steps - 0.5)
    axes.set_ylim(-0.5, rows - 0.5)
    axes.set_xticks(range(0, steps, 2))
    axes.set_yticks(range(rows), [*(f"layer {n}" for n in range(rows - 1)), "logits"])
    axes.set_xlabel("step (0 is the prefill, then a token each)")
    legend = [
        patch("as it should be", _COLOURS[WELL]),
        patch("another number", _COLOURS[WRONG], HATCHES["decode"], "white"),
    ]
    if any(NAN in states for states in grid):
        legend.append(patch("NaN", _COLOURS[NAN]))
    if looked is not None:
        legend.append(patch("not looked at", "white"))
    finish(figure, axes, title, legend)
    return figure


def _cell(axes: Axes, step: int, row: int, state: str | None) -> None:
    from matplotlib.patches import Rectangle

    corner = (step - 0.46, row - 0.44)
    if state is None:
        box = Rectangle(corner, 0.92, 0.88, facecolor="white", edgecolor=PALETTE["waiting"])
    else:
        hatch = HATCHES["decode"] if state == WRONG else ""
        colour = _COLOURS[state]
        box = Rectangle(corner, 0.92, 0.88, facecolor=colour, edgecolor="white", hatch=hatch)
    axes.add_patch(box)


def _mark(axes: Axes, step: int, row: int, text: str, ink: str) -> None:
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": _NORMAL}
    label = axes.text(step, row, text, color=ink, weight="bold", **style)
    if ink == "white":
        label.set_bbox({"facecolor": PALETTE["decode"], "edgecolor": "none", "pad": 1})


def _frame(axes: Axes, step: int, row: int) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(
        Rectangle((step - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="black", linewidth=2.5)
    )


def gap_figure(differences: Any, *, title: str) -> Figure:
    """How far each layer's output is from the healthy one's, by step: shades, a decade each."""
    values = np.log10(np.clip(np.asarray(differences), 1e-7, 1))
    rows, steps = values.shape
    figure = new_figure(2.6 + 0.31 * steps, 1.6 + 0.36 * rows)
    axes = figure.subplots()
    image = axes.imshow(
        values, cmap="Blues", vmin=-7, vmax=0, origin="lower", aspect="auto", interpolation="none"
    )
    axes.set_xticks(range(0, steps, 2))
    axes.set_yticks(range(rows), [*(f"layer {n}" for n in range(rows - 1)), "logits"])
    bar = figure.colorbar(image, ax=axes, ticks=[-6, -4, -2, 0])
    bar.ax.set_yticklabels(["0.000001", "0.0001", "0.01", "1"], fontsize=_SMALL)
    bar.set_label("relative difference", fontsize=_SMALL)
    label_axes(axes, title=title, x="step (0 is the prefill, then a token each)", y="")
    return figure


def slot_figure(contents: Sequence[Content], *, title: str) -> Figure:
    """What one slot too many does to the logits, by what lies in it."""
    figure = new_figure(9.0, 1.2 + 0.5 * len(contents))
    axes = figure.subplots()
    finite = [content.kl for content in contents if content.kl is not None]
    right = max(finite) * 10
    for row, content in enumerate(contents):
        kl = right if content.kl is None else content.kl
        hatch = "xx" if content.kl is None else ""
        colour = PALETTE["waiting"] if content.kl is None else PALETTE["decode"]
        axes.barh(row, kl, 0.6, color=colour, hatch=hatch, edgecolor="black", linewidth=0.5)
        told = f" {content.changed} of {content.steps} tokens change"
        if content.kl is None:
            told = " no logits at all: the request ends"
        axes.text(kl, row, told, va="center", fontsize=_SMALL)
    axes.set_xscale("log")
    axes.set_xlim(1e-6, right * 1e4)
    ticks = (1e-6, 1e-4, 1e-2, 1, 100)
    axes.set_xticks(ticks, ["0.000001", "0.0001", "0.01", "1", "100"])
    axes.minorticks_off()
    axes.set_yticks(range(len(contents)), [content.name for content in contents])
    axes.invert_yaxis()
    label_axes(
        axes, title=title, x="distance of the worst step from the truth (KL divergence, nats)", y=""
    )
    return figure


def chance_figure(rate: float = RATE, repeats: int = 1000, *, title: str) -> Figure:
    """The chance that a test campaign sees a rare fault, by the replies that it checks."""
    figure = new_figure(8.6, 3.9)
    axes = figure.subplots()
    sizes = [10 ** (k / 8) for k in range(16, 57)]
    kinds = {
        "every reply another prompt": [chance_to_see(n, rate) for n in sizes],
        f"each prompt {repeats:,} times": [
            chance_with_repeats(int(n), repeats, rate) for n in sizes
        ],
    }
    for (colour, _, line), (label, chances) in zip(SERIES, kinds.items(), strict=False):
        shares = [100 * chance for chance in chances]
        axes.plot(sizes, shares, color=colour, linestyle=line, linewidth=2, label=label)
    axes.axhline(95, color=PALETTE["waiting"], linewidth=1)
    axes.text(110, 96.5, "95 %", fontsize=_SMALL)
    axes.set_xscale("log")
    ticks = (100, 1000, 10_000, 100_000, 1_000_000, 10_000_000)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, 105)
    label_axes(axes, title=title, x="replies that are checked", y="chance to see the fault (%)")
    return figure


def lengths_figure(series: Mapping[str, Any], *, title: str) -> Figure:
    """How many replies have which length, one panel of bars a series, on log axes."""
    figure = new_figure(8.6, 3.6)
    axes = figure.subplots()
    edges = np.geomspace(8, 20_000, 40)
    for (colour, _, line), (label, lengths) in zip(SERIES, series.items(), strict=False):
        counts, _ = np.histogram(lengths, edges)
        axes.stairs(counts, edges, color=colour, linestyle=line, linewidth=2, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks((10, 100, 1000, 10_000), ["10", "100", "1,000", "10,000"])
    axes.set_yticks((1, 10, 100, 1000, 10_000), ["1", "10", "100", "1,000", "10,000"])
    axes.minorticks_off()
    label_axes(axes, title=title, x="tokens of the reply", y="replies (of 100,000)")
    return figure


def alarms_figure(
    caught: Mapping[str, Sequence[str]], detectors: Sequence[str], *, title: str
) -> Figure:
    """A row a fault, a column a detector: a dot where it rang. caught: fault → who did."""
    figure = new_figure(8.6, 2.0 + 0.36 * len(caught))
    axes = figure.subplots()
    for row, names in enumerate(caught.values()):
        for column, name in enumerate(detectors):
            rang = name in names
            size, colour = (90, PALETTE["prefill"]) if rang else (12, PALETTE["waiting"])
            axes.scatter(column, row, s=size, color=colour)
    axes.set_xlim(-0.6, len(detectors) - 0.4)
    axes.set_ylim(len(caught) - 0.5, -0.5)
    axes.set_xticks(range(len(detectors)), detectors, rotation=35, ha="right")
    axes.set_yticks(range(len(caught)), list(caught))
    label_axes(axes, title=title, x="", y="")
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    return figure
