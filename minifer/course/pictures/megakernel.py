"""Fusion to megakernel: the kernels of a layer, blocks on SMs, a step's time, published figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minifer.course.figures import (
    HATCHES,
    PALETTE,
    finish,
    label_axes,
    new_figure,
    patch,
    request_colours,
)
from minifer.course.pictures.megakernel_data import Dealt, Published, StepTime
from minifer.course.pictures.megakernel_run import NAMES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Fused kernel → the kernels it does the work of, in their order.
FUSED_OF: Mapping[str, tuple[str, ...]] = {
    "QKV": ("norm", "QKV"),
    "RoPE": ("RoPE", "append"),
    "ATTENTION": ("ATTENTION",),
    "MERGE": ("MERGE",),
    "OUTPUT": ("OUTPUT", "residual"),
    "GATE_UP": ("norm", "gate", "up", "silu·mul"),
    "DOWN": ("DOWN", "residual"),
}


def kernels_figure(names: Sequence[str], fused: Sequence[str], *, title: str) -> Figure:
    """A layer's kernels as boxes: apart, fused, and all in one."""
    figure = new_figure(9.0, 4.2)
    axes = figure.subplots()
    for x, name in enumerate(names):
        _box(axes, x, 2, 1, NAMES.get(name, name), PALETTE["free"], rotation=90)
    left = 0
    for name in fused:
        width = len(FUSED_OF[name])
        label = " + ".join(NAMES.get(part, part) for part in FUSED_OF[name])
        rotation = 0 if width > 2 else 90
        _box(axes, left, 1, width, label.replace(" + ", "\n+ "), PALETTE["cached"], rotation)
        left += width
    whole = "one kernel: no launch between two operations, of this layer or of any other"
    _box(axes, 0, 0, left, whole, PALETTE["decode"])
    axes.set_xlim(-0.1, left + 0.1)
    axes.set_ylim(-0.1, 3.1)
    rows = ["megakernel", f"fused: {len(fused)} launches", f"un-fused: {len(names)} launches"]
    axes.set_yticks([0.45, 1.45, 2.45], [row.replace(": ", ":\n") for row in rows])
    axes.set_xticks([])
    label_axes(axes, title=title, x="", y="")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    return figure


def _box(
    axes: Any, x: float, y: float, width: float, text: str, colour: str, rotation: int = 0
) -> None:
    from matplotlib.patches import Rectangle

    frame = Rectangle((x + 0.06, y), width - 0.12, 0.9, facecolor=colour, edgecolor="black")
    frame.set_linewidth(0.8)
    axes.add_patch(frame)
    white = colour in (PALETTE["decode"], PALETTE["cached"], PALETTE["prefill"])
    place = {"ha": "center", "va": "center", "fontsize": 9, "rotation": rotation}
    axes.text(x + width / 2, y + 0.45, text, color="white" if white else "black", **place)


def tail_figure(dealt: Dealt, *, title: str) -> Figure:
    """Rows are SMs, boxes are blocks in their request's colour; what is white is idle."""
    figure = new_figure(8.5, 1.5 + 0.32 * dealt.num_sms)
    axes = figure.subplots()
    colours = request_colours(dict.fromkeys(block.request for block in dealt.blocks))
    for block in dealt.blocks:
        axes.barh(
            block.sm, block.end - block.start, 0.8, block.start,
            color=colours[block.request], edgecolor="black", linewidth=0.6,
        )  # fmt: skip
        if dealt.overhead:
            axes.barh(
                block.sm, dealt.overhead, 0.8, block.end - dealt.overhead, linewidth=0.6,
                color=PALETTE["waiting"], hatch=HATCHES["waiting"], edgecolor="black",
            )  # fmt: skip
    axes.axvline(dealt.end, color="black", linewidth=1.5, linestyle="--")
    axes.set_xlim(0, dealt.end * 1.02)
    axes.set_ylim(dealt.num_sms - 0.4, -0.6)
    axes.set_yticks(range(dealt.num_sms), [f"SM {sm}" for sm in range(dealt.num_sms)])
    axes.set_xlabel("time (tokens read by one SM); dashed: the next kernel may start")
    legend = [patch(f"request {name}", colour) for name, colour in colours.items()]
    if dealt.overhead:
        legend.append(patch("overhead of a block", PALETTE["waiting"], HATCHES["waiting"]))
    finish(figure, axes, title, legend)
    return figure


def time_figure(steps: Sequence[StepTime], *, title: str) -> Figure:
    """One bar a way to run a step: what its SMs do, in µs."""
    figure = new_figure(9.0, 1.6 + 0.5 * len(steps))
    axes = figure.subplots()
    kinds = {
        "stream": ("bytes arrive", PALETTE["prefill"], ""),
        "overhead": ("overhead of blocks, instructions", PALETTE["waiting"], ""),
        "tail": ("waits while others read", PALETTE["cached"], HATCHES["cached"]),
        "bubble": ("waits, and nobody reads", PALETTE["decode"], HATCHES["decode"]),
    }
    for row, step in enumerate(steps):
        left = 0.0
        for kind, (_, colour, hatch) in kinds.items():
            width = getattr(step, kind)
            axes.barh(row, width, 0.7, left, color=colour, hatch=hatch, edgecolor="white")
            left += width
        axes.text(left + 8, row, f"{step.total:,.0f} µs", va="center", fontsize=9)
    axes.set_yticks(range(len(steps)), [step.name for step in steps])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * max(step.total for step in steps))
    axes.set_xlabel("time of a step, shared out by what the SMs do (µs, modelled)")
    finish(figure, axes, title, [patch(*entry) for entry in kinds.values()])
    return figure


def bars_figure(values: Mapping[str, float], *, title: str, x: str) -> Figure:
    """One labelled bar a name, in per cent."""
    figure = new_figure(8.0, 0.9 + 0.38 * len(values))
    axes = figure.subplots()
    places = range(len(values))
    axes.barh(places, list(values.values()), 0.65, color=PALETTE["decode"])
    for place, value in zip(places, values.values(), strict=True):
        axes.text(value, place, f" {value:.1f} %", va="center", fontsize=9)
    axes.set_yticks(places, list(values))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(values.values()))
    label_axes(axes, title=title, x=x, y="")
    return figure


def published_figure(rows: Sequence[Published], *, title: str) -> Figure:
    """Times of one decode step, each with the share of the bandwidth and where it comes from."""
    figure = new_figure(9.0, 1.5 + 0.4 * len(rows))
    axes = figure.subplots()
    kinds = {
        "limit": ("no kernel can be faster", PALETTE["free"], ""),
        "reported": ("reported", PALETTE["prefill"], ""),
        "modelled": ("modelled here, nothing measured", PALETTE["decode"], HATCHES["decode"]),
    }
    for place, row in enumerate(rows):
        _, colour, hatch = kinds[row.kind]
        axes.barh(place, row.microseconds, 0.7, color=colour, hatch=hatch, edgecolor="black")
        text = f" {row.microseconds:,.0f} µs, {row.share:.0%} ({row.source})"
        axes.text(row.microseconds, place, text, va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max(row.microseconds for row in rows))
    axes.set_xlabel("a decode step of Llama 3.2 1B, batch 1, H100 (µs)")
    finish(figure, axes, title, [patch(*entry) for entry in kinds.values()])
    return figure
