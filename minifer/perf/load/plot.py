"""A run in one picture: how latencies are distributed, and how they moved with the load.

matplotlib (extra `course`) is imported on first use. Colours are those of Okabe and Ito, "Color
Universal Design", https://jfly.uni-koeln.de/color/; each comes with a line style of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minifer.perf.load import metrics
from minifer.perf.load.generator import LoadRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#767676"
_PANELS = (
    ("Time to first token", (("ttft", "TTFT", _BLUE, "-"),)),
    ("Between tokens", (("itl", "ITL", _ORANGE, "-"), ("tpot", "TPOT", _GREEN, "--"))),
    ("Whole answer", (("e2e", "E2E", _RED, "-"),)),
)


def save_plot(
    path: str | Path, run: LoadRun, *, title: str, slo: Mapping[str, float] | None = None
) -> None:
    """Draw one run into a file (PNG, SVG or PDF by its name). title: what was run."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError('a plot needs matplotlib: pip install "minifer[course]"') from None
    figure = Figure(figsize=(9.6, 6.6), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=11)
    grid = figure.add_gridspec(2, 3, height_ratios=(1, 1.15))
    values = metrics.latencies(run)
    for column, (heading, curves) in enumerate(_PANELS):
        axes = figure.add_subplot(grid[0, column])
        factor, unit = _unit([value for name, *_ in curves for value in values[name]])
        for name, label, colour, style in curves:
            _draw_cdf(axes, [value * factor for value in values[name]], label, colour, style)
            if name in (slo or {}):
                limit = (slo or {})[name] * factor
                axes.axvline(limit, color=_GREY, linestyle=":", label=f"SLO {label}")
        _label(axes, heading, unit, "share at or below" if column == 0 else "")
        axes.set_ylim(0, 1.02)
        axes.set_xlim(0, 1.05 * axes.get_xlim()[1])  # equal values draw one line: off the edge
        axes.legend(fontsize=8, loc="lower right", title="p50 / p99", title_fontsize=8)
    _draw_timeline(figure.add_subplot(grid[1, :]), run)
    figure.savefig(path)


def _draw_cdf(axes: Axes, values: Sequence[float], label: str, colour: str, style: str) -> None:
    """The empirical distribution, its p50 and p99 named in the legend."""
    if not values:
        return
    p50, p99 = (metrics.percentile(values, q) for q in (50, 99))
    label = f"{label} {_short(p50)} / {_short(p99)}"
    axes.ecdf(values, color=colour, linestyle=style, label=label)


def _draw_timeline(axes: Axes, run: LoadRun) -> None:
    """Requests in flight over time, and each request's TTFT where it was due."""
    from matplotlib.ticker import MaxNLocator

    steps = [(run.start, 0), *metrics.in_flight(run.records), (run.end, 0)]
    times = [time - run.start for time, _ in steps]
    counts = [count for _, count in steps]
    axes.fill_between(times, counts, step="post", color=_GREY, alpha=0.22, linewidth=0)
    axes.step(times, counts, where="post", color=_GREY, linewidth=1, label="in flight (left)")
    _label(axes, "Load and time to first token", "seconds since the start", "requests in flight")
    axes.set_xlim(0, max(times) or 1)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    right = axes.twinx()
    done = [r for r in run.records if r.error is None]
    factor, unit = _unit(metrics.latencies(run)["ttft"])
    right.plot(
        [r.intended - run.start for r in done],
        [metrics.ttft(r) * factor for r in done],
        "o",
        markersize=4,
        color=_BLUE,
        alpha=0.75,
        clip_on=False,  # in a closed loop the first ones are due at 0
        label="TTFT (right)",
    )
    right.set_ylim(0, 1.05 * right.get_ylim()[1])
    right.set_ylabel(f"TTFT, {unit}", color=_BLUE)
    right.spines["top"].set_visible(False)
    if failed := [r.intended - run.start for r in run.records if r.error is not None]:
        right.plot(failed, [0] * len(failed), "x", color=_RED, clip_on=False, label="failed")
    handles = [*axes.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    right.legend(
        handles=handles,
        fontsize=8,
        ncols=3,
        frameon=False,
        loc="lower right",
        bbox_to_anchor=(1, 1),
    )


def _unit(values: Sequence[float]) -> tuple[float, str]:
    """What seconds are multiplied by to be readable, and the name of the result."""
    return (1.0, "seconds") if max(values, default=0.0) >= 10 else (1e3, "milliseconds")


def _short(value: float) -> str:
    """Three digits, none of them in an exponent."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _label(axes: Axes, heading: str, x: str, y: str) -> None:
    axes.set_title(heading, fontsize=10, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
