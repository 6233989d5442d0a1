"""Pictures of an event stream: where KV lies, and who was worked on when.

A picture comes in two halves: `figure_data.py` turns events into plain values, which tests and
claim cells check; `block_map` and `timeline` here only draw them. matplotlib (extra `course`) is
imported on first use.

Colours are those of Okabe and Ito, "Color Universal Design", https://jfly.uni-koeln.de/color/;
every colour comes with a hatch or a label, so that a grey print says the same.
"""

from __future__ import annotations

import base64
import html
import io
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from minifer.course.figure_data import BlockColumn, Span, block_map_data, timeline_data
from minifer.events import Event

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE: Mapping[str, str] = MappingProxyType(
    {
        "prefill": "#0072B2",
        "decode": "#D55E00",
        "cached": "#009E73",
        "waiting": "#BBBBBB",
        "free": "#F2F2F2",
    }
)
REQUEST_COLOURS = ("#56B4E9", "#E69F00", "#CC79A7", "#F0E442")  # in order of appearance
HATCHES: Mapping[str, str] = MappingProxyType({"waiting": "....", "decode": "////", "cached": "xx"})
# Series of a plot, in order: colour, marker, line. Grey prints tell them by marker and line.
SERIES: tuple[tuple[str, str, str], ...] = (
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "--"),
    ("#009E73", "^", "-."),
    ("#CC79A7", "D", ":"),
    ("#E69F00", "v", "-"),
    ("#56B4E9", "P", "--"),
    ("#000000", "x", "-."),
)
_SMALL, _NORMAL = 9, 10  # points
_LABEL = 5  # characters that fit into a cell of the block map


def block_map(events: Iterable[Event], num_blocks: int, *, title: str) -> Figure:
    """A row a block, a column a step: whose table holds it, and whether its content can be found.

    num_blocks: N of the pool. title: the finding, not the subject.
    """
    columns = block_map_data(events)
    requests = list(dict.fromkeys(r for column in columns for r in column.tables))
    colours = request_colours(requests)
    figure = new_figure(2.2 + 0.48 * len(columns), 1.5 + 0.3 * num_blocks)
    axes = figure.subplots()
    for x, column in enumerate(columns):
        copied = {destination: source for source, destination in column.copies}
        for block_id in range(num_blocks):
            _draw_block(axes, x, block_id, column, colours, copied.get(block_id))
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(num_blocks - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), [str(c.step or "end") for c in columns])
    axes.set_yticks(range(num_blocks))
    axes.set_xlabel("engine step")
    axes.set_ylabel("block id")
    legend = [patch(f"held by {r}", colour) for r, colour in colours.items()]
    legend.append(patch("full, can be found", PALETTE["cached"]))
    legend.append(patch("free, still cached", "white", HATCHES["cached"], PALETTE["cached"]))
    legend.append(patch("free", PALETTE["free"]))
    finish(figure, axes, title, legend)
    return figure


def timeline(events: Iterable[Event], *, title: str, x: Literal["step", "time"] = "step") -> Figure:
    """A row a request: waiting, prefill chunks with their tokens, decode steps.

    title: the finding, not the subject. x: one column a step, or milliseconds on the engine's
    clock since the first step began. Raises `ValueError` when the events hold no finished step.
    """
    spans = timeline_data(events)
    if not spans:
        raise ValueError("events must hold at least one finished step, got none")
    requests = list(dict.fromkeys(span.request_id for span in spans))
    width = 1.2 + 0.48 * len({span.step for span in spans}) if x == "step" else 8.0
    figure = new_figure(min(11.0, max(6.5, width)), 1.7 + 0.62 * len(requests))
    axes = figure.subplots()
    origin = spans[0].begin
    for span in spans:
        left, right = span.step - 0.5, span.step + 0.5
        if x == "time":
            left, right = (span.begin - origin) * 1e3, (span.end - origin) * 1e3
        _draw_span(axes, left, right, requests.index(span.request_id), span)
    first, last = spans[0].step - 0.5, spans[-1].step + 0.5
    axes.set_xlim(*((first, last) if x == "step" else (0, (spans[-1].end - origin) * 1e3)))
    axes.set_ylim(len(requests) - 0.6, -0.65)
    axes.set_yticks(range(len(requests)), requests)
    axes.set_ylabel("request")
    axes.set_xlabel("engine step" if x == "step" else "time (ms)")
    if x == "step":
        axes.set_xticks(sorted({span.step for span in spans}))
    legend = [
        patch("waiting", PALETTE["waiting"], HATCHES["waiting"]),
        patch("prefill, tokens of the chunk", PALETTE["prefill"]),
        patch("decode, one token", PALETTE["decode"], HATCHES["decode"], "white"),
        patch("tokens found in the cache", PALETTE["cached"]),
    ]
    finish(figure, axes, title, legend)
    return figure


def show(figure: Figure, *, alt: str) -> None:
    """Display a figure as PNG, and what it shows in words below it, folded; close the figure.

    alt: what it shows, for those who do not see it. It is the output's plain text, too, and in its
    metadata, which neither JupyterLab nor nbconvert hands on to the page: hence the folded words.
    Raises `ValueError` when it is empty.
    """
    if not alt.strip():
        raise ValueError(f"alt must say what the figure shows, got {alt!r}")
    from IPython.display import display

    buffer = io.BytesIO()
    # Without the version of matplotlib in the file, one machine draws the same bytes again.
    figure.savefig(buffer, format="png", dpi=100, metadata={"Software": None})
    png = base64.b64encode(buffer.getvalue()).decode()
    data = {"image/png": png, "text/plain": alt}
    display(data, raw=True, metadata={"image/png": {"alt": alt}})
    words = f"<details><summary>The figure in words</summary>{html.escape(alt)}</details>"
    display({"text/html": words, "text/plain": "The figure in words"}, raw=True)
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close(figure)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that pyplot does not know: nothing to leak or to draw twice."""
    # On first use matplotlib may say on stderr that it builds its font cache: no news to a reader.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def request_colour(index: int) -> str:
    """The colour of the n-th request of a picture; A, B and C are 0, 1 and 2."""
    return REQUEST_COLOURS[index % len(REQUEST_COLOURS)]


def request_colours(names: Iterable[str]) -> dict[str, str]:
    """Name → colour: A, B, C and D have the same one in every picture, others by their order."""
    places = {name: place for place, name in enumerate("ABCD")}
    return {name: request_colour(places.get(name, i)) for i, name in enumerate(names)}


def patch(label: str, colour: str, hatch: str = "", edge: str = "black") -> Any:
    """An entry of a legend."""
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, edgecolor=edge, hatch=hatch, label=label, linewidth=0.5)


def label_axes(axes: Axes, *, title: str, x: str, y: str) -> None:
    """Title (the finding), axis labels with units, and sizes that can be read, for any plot."""
    axes.set_title(title, fontsize=_NORMAL + 1, loc="left", wrap=True)
    axes.set_xlabel(x, fontsize=_NORMAL)
    axes.set_ylabel(y, fontsize=_NORMAL)
    axes.tick_params(labelsize=_SMALL)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=_SMALL, frameon=False)


def log_axes(axes: Axes, ticks: Sequence[int]) -> None:
    """Logarithmic axes that can be read: the ticks given along x, plain numbers along y."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def finish(figure: Figure, axes: Axes, title: str, legend: list[Any]) -> None:
    """Title, sizes and a legend of `patch`es below, for pictures made of boxes."""
    axes.set_title(title, fontsize=_NORMAL + 1, loc="left", wrap=True)
    axes.tick_params(labelsize=_SMALL, length=0)
    axes.xaxis.label.set_fontsize(_NORMAL)
    axes.yaxis.label.set_fontsize(_NORMAL)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    columns = max(1, int(figure.get_figwidth() / 2.2))  # inches of the longest entry
    figure.legend(
        handles=legend, loc="outside lower center", ncols=columns, fontsize=_SMALL, frameon=False
    )


def _draw_block(
    axes: Axes,
    x: int,
    block_id: int,
    column: BlockColumn,
    colours: Mapping[str, str],
    copied_from: int | None,
) -> None:
    """One cell: split among its holders; a green foot when a look-up can find the block."""
    from matplotlib.patches import Rectangle

    left, top, size = x - 0.46, block_id - 0.44, 0.92
    holders = column.holders(block_id)
    cached = block_id in column.cached
    if not holders:
        face, edge = ("white", PALETTE["cached"]) if cached else (PALETTE["free"], "white")
        hatch = HATCHES["cached"] if cached else ""
        axes.add_patch(
            Rectangle((left, top), size, 0.88, facecolor=face, edgecolor=edge, hatch=hatch)
        )
        return
    for i, request_id in enumerate(holders):
        share = size / len(holders)
        corner = (left + i * share, top)
        axes.add_patch(Rectangle(corner, share, 0.88, facecolor=colours[request_id], linewidth=0))
    if cached:
        axes.add_patch(
            Rectangle((left, top + 0.72), size, 0.16, facecolor=PALETTE["cached"], linewidth=0)
        )
    label = "+".join(holders)
    if len(label) > _LABEL:  # does not fit: the colours say who
        label = f"×{len(holders)}" if len(holders) > 1 else ""
    if copied_from is not None:
        label += f"←{copied_from}"
    axes.text(x, block_id - 0.06, label, ha="center", va="center", fontsize=_SMALL)


def _draw_span(axes: Axes, left: float, right: float, row: int, span: Span) -> None:
    from matplotlib.patches import Rectangle

    height = 0.5
    axes.add_patch(
        Rectangle(
            (left, row - height / 2),
            right - left,
            height,
            facecolor=PALETTE[span.kind],
            edgecolor="white",
            hatch=HATCHES.get(span.kind, ""),
            linewidth=1,
        )
    )
    middle = (left + right) / 2
    if span.kind == "prefill" and span.tokens:
        count = span.tokens[1] - span.tokens[0]
        axes.text(
            middle, row, str(count), ha="center", va="center", fontsize=_NORMAL, color="white"
        )
    if span.cached:
        bottom = row - height / 2 - 0.12
        axes.add_patch(
            Rectangle((left, bottom), right - left, 0.1, facecolor=PALETTE["cached"], linewidth=0)
        )
        axes.text(
            middle, bottom - 0.04, f"+{span.cached}", ha="center", va="bottom", fontsize=_SMALL
        )
