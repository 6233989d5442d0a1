"""The sweeps of `bench scaling` on log-log paper: a cost that grows as size^e has slope e.

matplotlib (extra `course`) is imported on first use. Colours are those of Okabe and Ito, each with
a marker of its own.
"""

from __future__ import annotations

from math import ceil, floor, log10
from pathlib import Path

from minifer.perf.scaling_bench import ScalingReport

_STYLES = (
    ("#0072B2", "o"),
    ("#E69F00", "s"),
    ("#009E73", "^"),
    ("#D55E00", "v"),
    ("#CC79A7", "D"),
    ("#000000", "x"),
)


def save_plot(path: str | Path, report: ScalingReport) -> None:
    """A panel a sweep, a line a stage with its exponent; PNG, SVG or PDF by the name.

    Raises `RuntimeError` where matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError('a plot needs matplotlib: pip install "minifer[course]"') from None
    rows = -(-len(report.series) // 2)
    figure = Figure(figsize=(14, 2.8 * rows), dpi=110, layout="constrained")
    figure.suptitle("cost of a step against what grows; in brackets the exponent", fontsize=11)
    for place, one in enumerate(report.series, start=1):
        axes = figure.add_subplot(rows, 2, place)
        for metric, (colour, marker) in zip(one.metrics, _STYLES, strict=False):
            fit = report.fits[one.name][metric]
            label = f"{metric} ({fit.exponent:.2f} ± {fit.error:.2f})"
            milliseconds = [cost * 1e3 for cost in fit.costs]
            axes.loglog(fit.sizes, milliseconds, color=colour, marker=marker, ms=4, label=label)
        axes.set_title(one.title, fontsize=9)
        axes.set_ylabel("ms")
        axes.grid(alpha=0.3)
        costs = [cost for metric in one.metrics for cost in report.fits[one.name][metric].costs]
        lowest, highest = (log10(edge(costs) * 1e3) for edge in (min, max))
        axes.set_ylim(10 ** floor(lowest), 10 ** ceil(highest))
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path)
