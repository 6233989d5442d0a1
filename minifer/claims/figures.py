"""Draws the figure of a claim: panels below each other, to be read at 900 pixels' width.

matplotlib (extra `course`) is imported on first use. Colours are those of Okabe and Ito, "Color
Universal Design", https://jfly.uni-koeln.de/color/; each comes with a marker or a hatch of its own.
An empty point or bar is one that must not be read as a success: `hollow_label` says why.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minifer.claims.claim import BarPanel, Claim, CurvePanel, Findings, Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# colour, marker, hatch
_STYLES = (
    ("#0072B2", "o", ""),
    ("#E69F00", "s", "///"),
    ("#009E73", "^", "..."),
    ("#D55E00", "v", "\\\\\\"),
    ("#CC79A7", "D", "xxx"),
    ("#56B4E9", "P", "---"),
    ("#000000", "X", "++"),
)
_GREY = "#5F5F5F"
_WIDTH = 9.0  # inches; 100 pixels each at 900
_TITLE = 104  # characters of a line
_BAR, _LETTER = 0.24, 0.075  # inches a bar, and a letter of a mark's name


def draw(claim: Claim, findings: Findings) -> Any:
    """A matplotlib Figure. Raises `RuntimeError` where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError('a figure needs matplotlib: pip install "minifer[course]"') from None
    title = [f"{claim.name}: {claim.statement}", findings.basis]
    lines = [line for text in title for line in textwrap.wrap(text, _TITLE)]
    heights = [_height(panel) for panel in findings.panels]
    figure = Figure(figsize=(_WIDTH, sum(heights) + 0.25 * len(lines)), layout="constrained")
    figure.suptitle("\n".join(lines), fontsize=10)
    # A figure of its own for each panel: a long legend makes only its own axes narrower.
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
    for part, panel in zip(parts.flat, findings.panels, strict=True):
        axes = part.add_subplot()
        if isinstance(panel, CurvePanel):
            _draw_curves(axes, panel)
        else:
            _draw_bars(axes, panel)
        axes.set_title(panel.title, fontsize=10, loc="left")
        axes.tick_params(labelsize=9)
    return figure


def _height(panel: Panel) -> float:
    if isinstance(panel, CurvePanel):
        return 3.3
    return max(1.8, 1.0 + _row(panel) * (len(panel.names) + _headroom(panel)))


def _row(panel: BarPanel) -> float:
    """Inches that the bars of one name take."""
    return _BAR * (len(panel.bars) + 0.6)


def _headroom(panel: BarPanel) -> float:
    """Rows above the bars, for the names of marks: they stand upright."""
    return max((_LETTER * len(name) for name in panel.x_marks), default=0.0) / _row(panel)


def _draw_curves(axes: Axes, panel: CurvePanel) -> None:
    for curve, (colour, marker, _) in zip(panel.curves, _STYLES, strict=False):
        style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5}
        line = "" if curve.points else "-"
        axes.plot(curve.x, curve.y, linestyle=line, label=curve.label, **style)
        empty = [(curve.x[i], curve.y[i]) for i in curve.hollow]
        if empty:
            x, y = zip(*empty, strict=True)
            axes.plot(x, y, marker, color=colour, markersize=6, markerfacecolor="white")
    if any(curve.hollow for curve in panel.curves):
        axes.plot([], [], "o", color=_GREY, markerfacecolor="white", label=panel.hollow_label)
    _scale(axes, panel.log)
    if "y" not in panel.log:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    _marks(axes, panel.x_marks, vertical=True)
    _marks(axes, panel.y_marks, vertical=False)
    axes.set_xlabel(panel.x_label, fontsize=9)
    axes.set_ylabel(panel.y_label, fontsize=9)
    axes.grid(alpha=0.3)
    if len(panel.curves) > 1 or panel.curves[0].hollow:
        _legend(axes)


def _draw_bars(axes: Axes, panel: BarPanel) -> None:
    """Bars from 0; on a logarithmic axis, which has no 0, points."""
    thickness = 0.8 / len(panel.bars)
    for row, ((legend, values), style) in enumerate(zip(panel.bars.items(), _STYLES, strict=False)):
        colour, marker, hatch = style
        offset = (row - (len(panel.bars) - 1) / 2) * thickness
        places = [place + offset for place in range(len(values))]
        empty = [(legend, name) in panel.hollow for name in panel.names]
        faces = ["white" if e else colour for e in empty]
        if panel.log:
            axes.scatter(values, places, c=faces, edgecolors=colour, marker=marker, label=legend)
        else:
            edges = [colour if e else "white" for e in empty]
            bars = axes.barh(places, values, 0.92 * thickness, color=faces, edgecolor=edges)
            for bar, e in zip(bars, empty, strict=True):
                bar.set_hatch(None if e else hatch)
            axes.barh([0], [0], color=colour, edgecolor="white", hatch=hatch, label=legend)
        for value, place in zip(values, places, strict=True):
            axes.annotate(
                _short(value),
                (value, place),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                zorder=4,
            )
    if panel.hollow:
        axes.barh([0], [0], color="white", edgecolor=_GREY, label=panel.hollow_label)
    axes.set_yticks(range(len(panel.names)), panel.names, fontsize=9)
    axes.set_ylim(len(panel.names) - 0.4, -0.6 - _headroom(panel))  # from the top down
    _scale(axes, panel.log)
    axes.margins(x=0.12)
    _marks(axes, panel.x_marks, vertical=True)
    axes.set_xlabel(panel.x_label, fontsize=9)
    axes.grid(axis="both" if panel.log else "x", alpha=0.3)
    if len(panel.bars) > 1 or panel.hollow:
        _legend(axes)


def _scale(axes: Axes, log: str) -> None:
    """Logarithmic axes, their ticks as plain numbers."""
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        if name in log:
            axes.set(**{f"{name}scale": "log"})
            low, high = axis.get_view_interval()
            axis.set_major_formatter(_short)
            narrow = high < 20 * low  # with one power of ten, the ticks between have names too
            axis.set_minor_formatter(_short if narrow else _nothing)


def _nothing(value: float, place: float) -> str:
    return ""


def _short(value: float, place: float = 0) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _marks(axes: Axes, marks: Mapping[str, float], *, vertical: bool) -> None:
    for name, value in marks.items():
        line = axes.axvline if vertical else axes.axhline
        line(value, color=_GREY, linestyle=":", linewidth=1.2)
        across = axes.get_xaxis_transform() if vertical else axes.get_yaxis_transform()
        axes.annotate(
            name,
            (value, 0.98) if vertical else (0.01, value),
            xycoords=across,
            fontsize=8,
            color=_GREY,
            rotation=90 if vertical else 0,
            ha="center" if vertical else "left",
            va="top" if vertical else "center",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1},
        )


def _legend(axes: Axes) -> None:
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
