"""Pictures of routing: replicas side by side, what a score weighs, what a router believes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from minifer.course.figures import (
    HATCHES,
    PALETTE,
    SERIES,
    finish,
    label_axes,
    new_figure,
    patch,
    request_colours,
)
from minifer.course.pictures.disaggregation import COMES, Stall
from minifer.course.pictures.routing_data import Served
from minifer.course.pictures.routing_view import Beliefs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HEIGHT = 0.84  # of a bar, where a lane is 1


def replica_gantt(panels: Mapping[str, Served], *, title: str) -> Figure:
    """A panel a policy, a band a replica, a lane a request: who was where, and did what, when.

    panels: of real engines. Waiting is grey, prefill bears its tokens, decode is hatched; the
    colour is the chat's. Raises `ValueError` for a panel without work.
    """
    if any(not served.work for served in panels.values()):
        raise ValueError("panels must be of real engines, got one without work")
    lanes = {
        name: {
            replica: 1 + max((w.lane for w in served.work if w.replica == replica), default=0)
            for replica in sorted({w.replica for s in panels.values() for w in s.work})
        }
        for name, served in panels.items()
    }
    heights = [sum(found.values()) for found in lanes.values()]
    right = max(w.step + 1 for served in panels.values() for w in served.work)
    figure = new_figure(9.0, 1.5 + 0.24 * sum(heights) + 0.3 * len(panels))
    all_axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights)
    for axes, (name, served) in zip(all_axes[:, 0], panels.items(), strict=True):
        _draw_replicas(axes, served, lanes[name], right)
        finish(figure, axes, name, [])
    all_axes[-1, 0].set_xlabel("time (steps)", fontsize=10)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left", wrap=True)
    figure.legends.clear()
    legend = [
        patch("waiting", PALETTE["waiting"]),
        patch("prefill, its tokens", "white"),
        patch("decode", "white", HATCHES["decode"]),
    ]
    finish(figure, all_axes[-1, 0], all_axes[-1, 0].get_title(loc="left"), legend)
    return figure


def _draw_replicas(axes: Axes, served: Served, lanes: Mapping[str, int], right: int) -> None:
    from matplotlib.patches import Rectangle

    starts: dict[str, int] = {}
    top = 0
    for replica, number in lanes.items():
        starts[replica], top = top, top + number
    colours = request_colours(dict.fromkeys(name.partition(".")[0] for name in served.where))
    begun: set[str] = set()
    for work in served.work:
        chat = work.name.partition(".")[0]
        waits = work.kind == "waiting"
        y = starts[work.replica] + work.lane
        axes.add_patch(
            Rectangle(
                (work.step, y - _HEIGHT / 2),
                1,
                _HEIGHT,
                facecolor=PALETTE["waiting"] if waits else colours[chat],
                hatch=HATCHES["decode"] if work.kind == "decode" else "",
                edgecolor="white",
                linewidth=0.5,
            )
        )
        if work.kind == "prefill":
            axes.text(
                work.step + 0.5, y, str(work.num_tokens), ha="center", va="center", fontsize=9
            )
        if work.name not in begun:
            begun.add(work.name)
            axes.text(work.step - 0.15, y, chat, ha="right", va="center", fontsize=9)
    for start in starts.values():
        if start:
            axes.axhline(start - 0.5, color="black", linewidth=0.8)
    middles = [starts[r] + (number - 1) / 2 for r, number in lanes.items()]
    axes.set_yticks(middles, list(lanes))
    axes.set_ylim(top - 0.5, -0.5)
    axes.set_xlim(-1, right)


def score_figure(costs: Mapping[str, Mapping[str, float]], *, title: str) -> Figure:
    """A stacked bar a replica: what it would have to do first. costs: replica → part → blocks."""
    figure = new_figure(8.0, 1.6 + 0.5 * len(costs))
    axes = figure.subplots()
    parts = list(next(iter(costs.values())))
    colours = (PALETTE["waiting"], PALETTE["prefill"], PALETTE["decode"])
    hatches = (HATCHES["waiting"], "", HATCHES["decode"])
    lowest = min(sum(cost.values()) for cost in costs.values())
    longest = max(sum(cost.values()) for cost in costs.values())
    for row, cost in enumerate(costs.values()):
        left = 0.0
        for part, colour, hatch in zip(parts, colours, hatches, strict=True):
            width = cost[part]
            axes.barh(row, width, 0.6, left, color=colour, hatch=hatch, edgecolor="white")
            left += width
        mark = "  ← chosen" if left == lowest else ""
        axes.text(left + longest * 0.01, row, f"{left:.1f}{mark}", va="center", fontsize=9)
    axes.set_yticks(range(len(costs)), list(costs))
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.22)
    axes.set_xlabel("cost (blocks of 16 tokens)")
    legend = [
        patch(part, colour, hatch)
        for part, colour, hatch in zip(parts, colours, hatches, strict=True)
    ]
    finish(figure, axes, title, legend)
    return figure


def belief_figure(seen: Beliefs, *, title: str) -> Figure:
    """Blocks that a replica holds, and that two routers believe it holds, request by request."""
    series = {
        "what it remembers having sent": seen.remembered,
        "what its events say": seen.heard,
        "what it holds": seen.truth,
    }
    xs = range(1, len(seen.truth) + 1)
    figure, axes = _lines(series, xs)
    axes.set_ylim(bottom=0)
    axes.set_xticks(xs)
    label_axes(axes, title=title, x="requests served", y="blocks the replica is said to hold")
    return figure


def goodput_figure(
    curves: Mapping[str, Sequence[float]], rates: Sequence[float], *, title: str
) -> Figure:
    """Requests within their limits a second, against the rate at which they come."""
    figure, axes = _lines(curves, rates)
    axes.set_ylim(bottom=0)
    axes.set_xticks(rates)
    label_axes(
        axes, title=title, x="requests a second that come", y="within the SLO, a second (simulated)"
    )
    return figure


def break_even_figure(
    times: Mapping[str, Sequence[float]], lengths: Sequence[int], *, title: str
) -> Figure:
    """Seconds to have the KV of a prefix here, by computing or by moving it, on log axes."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    series = {label: [1e3 * value for value in values] for label, values in times.items()}
    figure, axes = _lines(series, lengths)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{value:,}" for value in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    label_axes(axes, title=title, x="tokens of the prefix", y="time (ms, modelled)")
    return figure


def _lines(series: Mapping[str, Sequence[float]], xs: Sequence[float]) -> tuple[Figure, Axes]:
    """Curves over the same xs."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(8.0, 3.9)
    axes = figure.subplots()
    for (label, ys), (colour, marker, dash) in zip(series.items(), SERIES, strict=False):
        axes.plot(xs, ys, color=colour, marker=marker, markersize=5, linestyle=dash, label=label)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def late_figure(late: Mapping[str, tuple[float, float]], *, title: str) -> Figure:
    """Two bars a deployment: the share of warm and of cold prompts that come too late."""
    figure = new_figure(8.0, 1.5 + 0.62 * len(late))
    axes = figure.subplots()
    kinds = (("warm prompts", PALETTE["decode"], ""), ("cold prompts", PALETTE["prefill"], "////"))
    for row, shares in enumerate(late.values()):
        for i, ((_, colour, hatch), share) in enumerate(zip(kinds, shares, strict=True)):
            y = row + (i - 0.5) * 0.38
            axes.barh(y, 100 * share, 0.36, color=colour, hatch=hatch, edgecolor="white")
            axes.text(100 * share + 0.6, y, f"{share:.0%}", va="center", fontsize=9)
    axes.axvline(10, color="black", linewidth=1, linestyle=":")
    axes.set_yticks(range(len(late)), list(late))
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("came too late (%); the dotted line is what is allowed")
    finish(figure, axes, title, [patch(*kind) for kind in kinds])
    return figure


def progress_figure(runs: Mapping[str, Stall], *, title: str) -> Figure:
    """Tokens that the reader of a short request has, over time; a level piece is a pause."""
    figure = new_figure(8.0, 3.8)
    axes = figure.subplots()
    for (label, run), (colour, _, dash) in zip(runs.items(), SERIES, strict=False):
        axes.plot(
            run.tokens,
            range(1, len(run.tokens) + 1),
            color=colour,
            linestyle=dash,
            linewidth=2,
            label=label,
            drawstyle="steps-post",
        )
    axes.axvline(COMES, color="black", linewidth=1, linestyle=":")
    axes.text(COMES + 0.02, 1, "the long prompt comes", fontsize=9, va="bottom")
    axes.set_ylim(bottom=0)
    label_axes(axes, title=title, x="time (s, modelled)", y="tokens of the answer")
    return figure
