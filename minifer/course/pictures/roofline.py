"""Rooflines, predicted against measured: where operations stand below what a machine can do.

`roofline_data.py` turns costs, devices and measured steps into plain values, which tests and claims
check; here they are drawn. A roofline: the intensity of a piece of work (FLOPs a byte) to the
right, the FLOP/s it reaches up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minifer.config import ModelConfig
from minifer.course.figures import HATCHES, PALETTE, SERIES, finish, label_axes, new_figure, patch
from minifer.course.pictures.roofline_data import (
    BatchRow,
    EngineStep,
    Point,
    attainable,
    batch_rows,
    engine_steps,
    floor_intensity,
    operation_points,
    powers_of_two,
    step_points,
)
from minifer.perf.costs import OpCost, decode_cost
from minifer.perf.devices import Device

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from minifer.perf.steps import StepGroup

__all__ = [
    "BatchRow",
    "EngineStep",
    "Point",
    "attainable",
    "batch_rows",
    "draw_roof",
    "draw_steps",
    "engine_steps",
    "floor_intensity",
    "limit_figure",
    "lines",
    "operation_points",
    "powers_of_two",
    "roofline",
    "step_alt",
    "step_bars",
    "step_points",
    "step_view",
]


def roofline(
    device: Device,
    points: Sequence[Point],
    *,
    title: str,
    measured: Sequence[Point] = (),
    labels: Mapping[str, str] | None = None,
) -> Figure:
    """One roof with what stands under it. labels: what to write beside points, by name."""
    figure = new_figure(7.2, 4.4)
    axes = figure.subplots()
    draw_roof(axes, device, points, measured, labels or {})
    label_axes(axes, title=title, x="arithmetic intensity (FLOPs a byte)", y="FLOP/s")
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(fontsize=9, frameon=False, loc="lower right")
    elif (legend := axes.get_legend()) is not None:
        legend.remove()
    return figure


def draw_roof(
    axes: Axes,
    device: Device,
    points: Sequence[Point],
    measured: Sequence[Point],
    labels: Mapping[str, str],
) -> None:
    """The roof over all points, and the points: hollow where predicted, full where measured."""
    everything = [*points, *measured]
    left = min([device.ridge_point / 30, *(p.intensity / 2 for p in everything)])
    right = max([device.ridge_point * 8, *(p.intensity * 2 for p in everything)])
    xs = [left, device.ridge_point, right]
    axes.loglog(xs, [attainable(device, x) for x in xs], color="black", linewidth=1.5)
    axes.axvline(device.ridge_point, color=PALETTE["waiting"], linewidth=1, linestyle=":")
    axes.annotate(
        f"ridge {device.ridge_point:.3g}",
        (device.ridge_point, device.peak_flops),
        xytext=(0, 6),
        textcoords="offset points",
        fontsize=9,
        ha="center",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )
    markers = {"prefill": "o", "decode": "s", "cached": "^"}
    named: set[str] = set()
    for group, filled in ((points, False), (measured, True)):
        for point in group:
            colour = PALETTE[point.kind]
            label = f"{point.kind}, {'measured' if filled else 'predicted'}"
            axes.plot(
                [point.intensity],
                [point.rate],
                markers[point.kind],
                markersize=7,
                color=colour,
                markerfacecolor=colour if filled else "white",
                label=None if label in named else label,
            )
            named.add(label)
            if point.name in labels:
                axes.annotate(
                    labels[point.name],
                    (point.intensity, point.rate),
                    xytext=(6, -10),
                    textcoords="offset points",
                    fontsize=9,
                )


def limit_figure(
    here: Device,
    groups: Sequence[StepGroup],
    operations: Mapping[str, Sequence[OpCost]],
    others: Sequence[Point] = (),
) -> Figure:
    """Left: this machine's roof, the model's operations on it, the engine's steps below. Right:
    seconds of each step, predicted and measured. others: steps measured elsewhere, by name."""
    figure = new_figure(10.5, 4.6)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    points = [
        point
        for name, ops in operations.items()
        for point in operation_points(ops, here, name.split()[0])
    ]
    names = {point.name: point.name for point in others}
    draw_roof(left, here, points, [*step_points(groups), *others], names)
    label_axes(
        left,
        title="Operations on the roof, the engine's steps below",
        x="arithmetic intensity (FLOPs a byte)",
        y="FLOP/s",
    )
    left.legend(fontsize=9, frameon=False, loc="lower right")
    draw_steps(right, here, groups)
    ratios = sorted(g.best / g.floor(here) for g in groups)
    label_axes(
        right,
        title=f"Measured is {ratios[0]:.1f} to {ratios[-1]:.1f} times the floor",
        x="seconds of a forward pass",
        y="",
    )
    right.legend(fontsize=9, frameon=False)
    return figure


def draw_steps(axes: Axes, here: Device, groups: Sequence[StepGroup]) -> None:
    """A line a step, from its floor (hollow) to its fastest forward pass (full); log seconds."""
    markers = {"prefill": "o", "decode": "s"}
    for row, steps in enumerate(groups):
        colour, marker = PALETTE[steps.kind], markers[steps.kind]
        floor, named = steps.floor(here), row == 0
        axes.plot([floor, steps.best], [row, row], color=PALETTE["waiting"], zorder=0)
        axes.plot(
            [floor],
            [row],
            marker,
            color=colour,
            markerfacecolor="white",
            label="predicted: the floor" if named else None,
        )
        axes.plot(
            [steps.best],
            [row],
            marker,
            color=colour,
            label="measured: the engine" if named else None,
        )
        axes.annotate(
            f"×{steps.best / floor:.1f}",
            (max(steps.best, floor), row),
            xytext=(8, -3),
            textcoords="offset points",
            fontsize=9,
        )
    axes.set_xscale("log")
    axes.set_yticks(range(len(groups)), [g.label for g in groups])
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.margins(x=0.18)


def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    x: str,
    y: str,
    log: str = "xy",
    marks: Mapping[float, str] | None = None,
    levels: Mapping[float, str] | None = None,
) -> Figure:
    """Curves by name, in the book's series. log: axes on a log scale. marks, levels: vertical and
    horizontal lines, and what is written at them."""
    figure = new_figure(7.2, 4.0)
    axes = figure.subplots()
    for (name, (xs, ys)), (colour, marker, line) in zip(series.items(), SERIES, strict=False):
        axes.plot(xs, ys, color=colour, marker=marker, linestyle=line, markersize=5, label=name)
    if "x" in log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if "y" in log:
        axes.set_yscale("log")
    for at, text in (marks or {}).items():
        axes.axvline(at, color="black", linewidth=1, linestyle=":")
        axes.annotate(
            text,
            (at, 0.98),
            xycoords=("data", "axes fraction"),
            xytext=(3, 0),
            textcoords="offset points",
            fontsize=9,
            rotation=90,
            va="top",
        )
    for at, text in (levels or {}).items():
        axes.axhline(at, color="black", linewidth=1, linestyle=":")
        axes.annotate(
            text,
            (0.01, at),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            fontsize=9,
        )
    label_axes(axes, title=title, x=x, y=y)
    return figure


def step_bars(steps: Sequence[EngineStep], *, title: str) -> Figure:
    """FLOPs a byte of every step of an engine run, in the colours of prefill and decode."""
    figure = new_figure(7.2, 3.6)
    axes = figure.subplots()
    for entry in steps:
        height = floor_intensity(entry.cost)
        axes.bar(
            entry.step,
            height,
            0.8,
            color=PALETTE[entry.kind],
            edgecolor="white",
            hatch=HATCHES.get(entry.kind, ""),
        )
        tokens = sum(query for query, _ in entry.batch)
        axes.text(entry.step, height, str(tokens), ha="center", va="bottom", fontsize=9)
    axes.set_xticks([entry.step for entry in steps])
    axes.set_xlabel("engine step")
    axes.set_ylabel("FLOPs a byte")
    legend = [
        patch("prefill in the step, tokens above", PALETTE["prefill"]),
        patch("decode only", PALETTE["decode"], HATCHES["decode"], "white"),
    ]
    finish(figure, axes, title, legend)
    return figure


def step_view(config: ModelConfig, device: Device) -> Any:
    """A view for `explore`: one decode step under the roof, by batch and context."""

    def view(batch: int, context: int) -> Figure:
        cost = decode_cost(config, batch, context)
        (row,) = batch_rows(config, device, [batch], context)
        parts = (("gate_up", "prefill"), ("attention_scores", "cached"))
        points = [
            Point("step", row.intensity, attainable(device, row.intensity), "decode"),
            *(
                Point(name, cost[name].intensity, attainable(device, cost[name].intensity), kind)
                for name, kind in parts
            ),
        ]
        figure = new_figure(7.2, 4.2)
        axes = figure.subplots()
        draw_roof(axes, device, points, (), {})
        names = (("whole step", (-8, 8), "right"), ("MLP product", (8, -14), "left"))
        for point, (name, shift, side) in zip(
            points, (*names, ("attention", (8, -14), "left")), strict=True
        ):
            where = (point.intensity, point.rate)
            axes.annotate(
                name, where, xytext=shift, textcoords="offset points", fontsize=9, ha=side
            )
        label_axes(
            axes,
            title=_step_title(config, device, batch, context),
            x="arithmetic intensity (FLOPs a byte)",
            y="FLOP/s",
        )
        if (legend := axes.get_legend()) is not None:
            legend.remove()
        axes.set_xlim(0.3, 3000)
        axes.set_ylim(device.memory_bandwidth / 4, device.peak_flops * 2)
        return figure

    return view


def _step_title(config: ModelConfig, device: Device, batch: int, context: int) -> str:
    total = decode_cost(config, batch, context).total()
    (row,) = batch_rows(config, device, [batch], context)
    fit = "fits" if row.fits else "does NOT fit one chip"
    share = total.kv_bytes / (total.kv_bytes + total.weight_bytes)
    return (
        f"{batch} × {context:,} tokens: {row.seconds * 1e3:.1f} ms a step, "
        f"{row.tokens_per_second:,.0f} tokens/s, {row.joules_per_token:.2g} J/token\n"
        f"{share:.0%} of the bytes are KV; {fit}"
    )


def step_alt(config: ModelConfig, device: Device, batch: int, context: int) -> str:
    """What `step_view` shows, in words."""
    (row,) = batch_rows(config, device, [batch], context)
    return (
        f"Roofline of {device.name} with one decode step, {row.intensity:.1f} FLOPs a byte. "
        + _step_title(config, device, batch, context).replace("\n", "; ")
    )
