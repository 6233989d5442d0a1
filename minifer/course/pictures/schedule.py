"""Pictures of scheduling: timelines by request or by seat, states, curves, a load explorer.

The data half is `schedule_data.py`; here values are only drawn. matplotlib is imported on first
use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Literal

from minifer.course.figures import (
    HATCHES,
    PALETTE,
    SERIES,
    finish,
    label_axes,
    new_figure,
    patch,
)
from minifer.course.pictures.schedule_data import Bar, Load

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_THROWN = "\\\\\\\\"  # hatch of everything that a preemption has caused
_STYLE = {  # kind → colour, hatch, colour of the hatch
    "waiting": (PALETTE["waiting"], HATCHES["waiting"], "white"),
    "prefill": (PALETTE["prefill"], "", "white"),
    "decode": (PALETTE["decode"], HATCHES["decode"], "white"),
    "preempted": (PALETTE["waiting"], _THROWN, "black"),
    "recompute": (PALETTE["prefill"], _THROWN, "white"),
}
_NAMES = {
    "waiting": "waiting",
    "prefill": "prefill, its tokens",
    "decode": "decode",
    "preempted": "preempted, waiting again",
    "recompute": "prefill of thrown-away tokens",
}
_HEIGHT = 0.62  # of a bar, where a row is 1


def gantt(
    panels: Mapping[str, Sequence[Bar]] | Sequence[Bar],
    *,
    title: str,
    rows: Literal["request", "seat"] = "request",
    x: Literal["step", "time"] = "step",
) -> Figure:
    """Timelines, one below the other on one axis: a row a request or a seat, colour the phase.

    panels: name → bars, or the bars of the only one. title: the finding. By seat, waiting requests
    are not drawn and a bar is marked with its request's name. Raises `ValueError` for a panel
    without bars.
    """
    panels = panels if isinstance(panels, Mapping) else {"timeline": panels}
    for name, found in panels.items():
        if not found:
            raise ValueError(f"panel {name!r} must have at least one bar, got none")
    lines = {name: _rows(found, rows) for name, found in panels.items()}
    heights = [len(names) for names in lines.values()]
    right = max(_right(found, x) for found in panels.values())
    width = min(11.0, max(7.0, 1.4 + 0.4 * right)) if x == "step" else 9.0
    figure = new_figure(width, 1.3 + 0.4 * sum(heights) + 0.45 * len(heights))
    all_axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights)
    kinds = set()
    for axes, (name, found) in zip(all_axes[:, 0], panels.items(), strict=True):
        if rows == "seat":
            _draw_seats(axes, len(lines[name]), _right(found, x), x)
        for bar in found:
            row = bar.name if rows == "request" else bar.seat
            if row is not None:
                kinds.add(bar.kind)
                _draw_bar(axes, bar, lines[name].index(row), rows, x, found[0].begin, right)
        axes.set_ylim(len(lines[name]) - 0.5, -0.5)
        axes.set_yticks(range(len(lines[name])), [str(row) for row in lines[name]])
        axes.set_xlim(0.5 if x == "step" else 0, right)
        axes.set_ylabel(rows)
        finish(figure, axes, name if len(panels) > 1 else title, [])
    all_axes[-1, 0].set_xlabel("engine step" if x == "step" else "time (ms)")
    if x == "step" and right < 20:
        all_axes[-1, 0].set_xticks(range(1, int(right) + 1))
    if len(panels) > 1:
        figure.suptitle(title, fontsize=11, x=0.01, ha="left", wrap=True)
    names = _NAMES
    if rows == "seat":
        names = names | {"prefill": "prefill of the request named"}
    legend = [patch(names[kind], *_STYLE[kind]) for kind in _STYLE if kind in kinds]
    if rows == "seat":
        legend.append(patch("nobody", PALETTE["free"]))
    figure.legends.clear()
    finish(figure, all_axes[-1, 0], all_axes[-1, 0].get_title(loc="left"), legend)
    return figure


def _rows(found: Sequence[Bar], rows: str) -> list[str | int]:
    if rows == "request":
        return list(dict.fromkeys(bar.name for bar in found))
    return sorted({bar.seat for bar in found if bar.seat is not None})


def _right(found: Sequence[Bar], x: str) -> float:
    return found[-1].step + 0.5 if x == "step" else (found[-1].end - found[0].begin) * 1e3


def _draw_seats(axes: Axes, count: int, right: float, x: str) -> None:
    """Seats as they are while nobody sits there."""
    from matplotlib.patches import Rectangle

    left = 0.5 if x == "step" else 0.0
    for row in range(count):
        box = (left, row - _HEIGHT / 2)
        axes.add_patch(Rectangle(box, right - left, _HEIGHT, facecolor=PALETTE["free"]))


def _draw_bar(
    axes: Axes, bar: Bar, row: int, rows: str, x: str, origin: float, right: float
) -> None:
    from matplotlib.patches import Rectangle

    left, end = bar.step - 0.5, bar.step + 0.5
    if x == "time":
        left, end = (bar.begin - origin) * 1e3, (bar.end - origin) * 1e3
    colour, hatch, edge = _STYLE[bar.kind]
    box = (left, row - _HEIGHT / 2)
    axes.add_patch(
        Rectangle(
            box, end - left, _HEIGHT, facecolor=colour, hatch=hatch, edgecolor=edge, linewidth=0.8
        )
    )
    text = str(bar.num_tokens) if bar.kind in ("prefill", "recompute") else ""
    if rows == "seat":
        text = bar.name
    if text and (end - left) / right > 0.015 * len(text):
        label = axes.text((left + end) / 2, row, text, ha="center", va="center", fontsize=9)
        label.set_color("white")
        if hatch:
            label.set_bbox({"facecolor": colour, "edgecolor": "none", "pad": 2.2})


def state_machine(counts: Mapping[tuple[str, str], int], *, title: str) -> Figure:
    """The states of a request, and how often each arrow was taken (`transitions`)."""
    from matplotlib.patches import FancyArrowPatch

    figure = new_figure(8.5, 2.8)
    axes = figure.subplots()
    places = {"new": (0.0, 0.0), "waiting": (1.6, 0.0), "running": (3.6, 0.0), "finished": (5.4, 0)}
    colours = {
        "new": "white",
        "waiting": PALETTE["waiting"],
        "running": PALETTE["decode"],
        "finished": PALETTE["free"],
    }
    arrows = {
        ("new", "waiting"): ("admission", 0.0),
        ("waiting", "running"): ("seat, budget\nand blocks", -0.35),
        ("running", "waiting"): ("preempted:\nblocks given up", -0.35),
        ("running", "finished"): ("last token", 0.0),
    }
    for (before, after), (label, bend) in arrows.items():
        start, end = places[before], places[after]
        axes.add_patch(
            FancyArrowPatch(
                start,
                end,
                arrowstyle="-|>",
                mutation_scale=14,
                shrinkA=36,
                shrinkB=36,
                connectionstyle=f"arc3,rad={bend}",
                color="black",
            )
        )
        middle = (start[0] + end[0]) / 2
        side = 0.0 if not bend else (1.0 if before == "waiting" else -1.0)
        height = 0.68 * side + (0.1 if not bend else 0)
        text = f"{label}\n{counts.get((before, after), 0)} ×"
        axes.text(middle, height, text, ha="center", va="center" if bend else "bottom", fontsize=9)
    for name, (left, height) in places.items():
        box = {"boxstyle": "round,pad=0.5", "facecolor": colours[name], "edgecolor": "black"}
        color = "white" if name == "running" else "black"
        axes.text(left, height, name, ha="center", va="center", fontsize=11, color=color, bbox=box)
    axes.set_xlim(-0.5, 6.0)
    axes.set_ylim(-1.0, 1.0)
    axes.set_xticks([])
    axes.set_yticks([])
    finish(figure, axes, title, [])
    return figure


@dataclass(frozen=True)
class Panel:
    """What `curves` draws. x, y: names of the axes, with units. series: label → (xs, ys).

    spans: a y is what held since the x before, so the line is level up to its point.
    """

    x: str
    y: str
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    log_y: bool = False
    spans: bool = False


def curves(panel: Panel, *, title: str, line: float | None = None) -> Figure:
    """One plot. title: the finding. line: a height to compare with."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(7.5, 3.6)
    axes = figure.subplots()
    if line is not None:
        axes.axhline(line, color=PALETTE["waiting"], linewidth=4)
    for (label, (xs, ys)), (colour, marker, dash) in zip(
        panel.series.items(), SERIES, strict=False
    ):
        axes.plot(
            xs, ys, color=colour, marker=marker, linestyle=dash, markersize=5, label=label,
            drawstyle="steps-pre" if panel.spans else "default",
        )  # fmt: skip
    if panel.log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    label_axes(axes, title=title, x=panel.x, y=panel.y)
    return figure


def load_view(curves: Mapping[int, Sequence[Load]], *, rate: float, budget: int) -> str:
    """SVG: p50 and p99 of TTFT and TPOT over the arrival rate for one token budget.

    curves: budget → loads, of the same rates. rate: the one that is marked and said in words.
    """
    loads = sorted(curves[budget], key=lambda load: load.rate)
    here = next(load for load in loads if load.rate == rate)
    ttft = [value * 1e3 for found in curves.values() for load in found for value in load.ttft]
    tpot = [value * 1e3 for found in curves.values() for load in found for value in load.tpot]
    words = (
        f"{rate:g} requests a second, budget {budget}: "
        f"TTFT p50 {here.ttft[0] * 1e3:.0f} ms, p99 {here.ttft[1] * 1e3:.0f} ms; "
        f"TPOT p50 {here.tpot[0] * 1e3:.1f} ms, p99 {here.tpot[1] * 1e3:.1f} ms"
    )
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 270" width="760" height="270" '
        f'font-family="sans-serif" font-size="12" role="img" aria-label="{escape(words)}">',
        '<rect width="760" height="270" fill="white"/>',
        f'<text x="10" y="18" font-size="13">{escape(words)}</text>',
        _svg_plot(60, "TTFT (ms)", [(load.rate, load.ttft) for load in loads], rate, max(ttft)),
        _svg_plot(440, "TPOT (ms)", [(load.rate, load.tpot) for load in loads], rate, max(tpot)),
        "</svg>",
    ]
    return "".join(parts)


def _svg_plot(
    left: int,
    label: str,
    points: Sequence[tuple[float, tuple[float, float]]],
    rate: float,
    highest: float,
) -> str:
    """One plot of 290 × 170 px, whose upper edge is the highest value of all budgets."""
    width, height, top = 290, 170, 50
    last = points[-1][0]

    def place(at: float, milliseconds: float) -> tuple[float, float]:
        x = left + width * at / last
        return round(x, 1), round(top + height * (1 - milliseconds / highest), 1)

    bottom = top + height
    drawn = [
        f'<path d="M{left},{top} V{bottom} H{left + width}" stroke="black" fill="none"/>',
        f'<text x="{left}" y="{top - 10}">{label}</text>',
        f'<text x="{left - 6}" y="{top + 5}" text-anchor="end">{highest:.0f}</text>',
        f'<text x="{left - 6}" y="{bottom}" text-anchor="end">0</text>',
        f'<text x="{left + width / 2}" y="{bottom + 34}" text-anchor="middle">'
        "requests a second</text>",
    ]
    for at, _ in points:
        x, _y = place(at, 0)
        drawn.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{at:g}</text>')
    x, _y = place(rate, 0)
    drawn.append(
        f'<path d="M{x},{top} V{bottom}" stroke="{PALETTE["waiting"]}" stroke-width="6" '
        'opacity="0.6"/>'
    )
    for index, name in enumerate(("p50", "p99")):
        colour, dash = SERIES[index][0], ("none", "6 3")[index]
        line = " ".join("{},{}".format(*place(at, both[index] * 1e3)) for at, both in points)
        drawn.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2" '
            f'stroke-dasharray="{dash}"/>'
        )
        for at, both in points:
            cx, cy = place(at, both[index] * 1e3)
            drawn.append(f'<circle cx="{cx}" cy="{cy}" r="3" fill="{colour}"/>')
        _x, y = place(last, points[-1][1][index] * 1e3)
        y -= 14 * index if points[-1][1][1] - points[-1][1][0] < highest * 1e-4 else 0
        drawn.append(f'<text x="{left + width + 6}" y="{y + 4}" fill="{colour}">{name}</text>')
    return "".join(drawn)


__all__ = ["Panel", "curves", "gantt", "load_view", "state_machine"]
