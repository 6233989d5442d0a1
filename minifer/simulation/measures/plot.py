"""Pictures of simulated runs. Past saturation nothing is drawn as if it were a result.

matplotlib (extra `course`) is imported on first use. Colours are those of Okabe and Ito, each with
a marker of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from minifer.simulation.measures.metrics import RunMetrics, Slo, computed_most
from minifer.simulation.result import RequestRecord, SimulationResult

BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999"
_PERCENTILES = (("p50", BLUE, "o"), ("p90", ORANGE, "s"), ("p99", GREEN, "^"))


def draw_run(
    result: SimulationResult, metrics: RunMetrics, title: str, slo: Slo | None = None
) -> Any:
    """One run: requests in the system over time, TTFT of each by arrival, and its distribution.

    Returns a matplotlib figure. Raises `RuntimeError` where matplotlib is missing.
    """
    figure = _figure(12, 4)
    axes = figure.subplots(1, 3)
    _headline(figure, title, metrics.saturation.reason)
    _draw_in_system(axes[0], result)
    done = [record for record in result.requests if record.ttft is not None]
    cold = [record for record in done if computed_most(record)]
    warm = [record for record in done if not computed_most(record)]
    for records, name, colour, marker in (
        (cold, "cold", ORANGE, "s"),
        (warm, "warm", BLUE, "o"),
    ):
        points = [(r.arrived, r.ttft) for r in records if r.ttft is not None]
        if points:
            ordered = sorted(ttft for _, ttft in points)
            axes[1].plot(*zip(*points, strict=True), marker, color=colour, ms=2.5, label=name)
            shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
            axes[2].step(ordered, shares, color=colour, where="post", label=f"TTFT, {name}")
    gaps = sorted(gap for record in done if (gap := record.max_gap) is not None)
    if gaps:
        shares = [(i + 1) / len(gaps) for i in range(len(gaps))]
        axes[2].step(gaps, shares, color=GREEN, ls="--", where="post", label="longest gap")
    for name, limit in (slo or {}).items():
        axes[2].axvline(limit, color=GREY, lw=0.8, ls=":")
        axes[2].text(limit, 0.02, name, fontsize=7, rotation=90, ha="right", color=GREY)
    axes[1].set(xlabel="arrival (s)", ylabel="TTFT (s)", title="each request")
    axes[2].set(xlabel="seconds", ylabel="share of requests", title="distribution", ylim=(0, 1))
    if any(record.ttft for record in done):  # steps may take no time
        axes[1].set_yscale("log")
        axes[2].set_xscale("log")
    for one in axes:
        one.grid(alpha=0.3)
        if one.get_legend_handles_labels()[0]:
            one.legend(fontsize=8)
    return figure


def draw_rates(runs: Mapping[float, RunMetrics], title: str) -> Any:
    """Several rates: TTFT, and attainment of the SLO if there is one. A rate past saturation is a
    cross on the edge: how bad it would be depends on how long one waits.

    runs: rate → what was measured there. Returns a matplotlib figure.
    """
    with_slo = any(run.attainment is not None for run in runs.values())
    figure = _figure(10 if with_slo else 6, 4)
    axes = figure.subplots(1, 2 if with_slo else 1, squeeze=False)[0]
    _headline(figure, title, "")
    stable = {rate: run for rate, run in sorted(runs.items()) if not run.saturation.unstable}
    unstable = [rate for rate, run in sorted(runs.items()) if run.saturation.unstable]
    for name, colour, marker in _PERCENTILES:
        pairs = [(rate, getattr(run.ttft, name)) for rate, run in stable.items() if run.ttft]
        if pairs:
            axes[0].semilogy(
                *zip(*pairs, strict=True), color=colour, marker=marker, ms=4, label=name
            )
    axes[0].set(xlabel="requests/s", ylabel="TTFT (s)", title="time to first token")
    if with_slo:
        rates = [rate for rate, run in stable.items() if run.attainment]
        intervals = [run.attainment for run in stable.values() if run.attainment]
        low = [interval.value - interval.low for interval in intervals]
        high = [interval.high - interval.value for interval in intervals]
        axes[1].errorbar(
            rates,
            [interval.value for interval in intervals],
            yerr=[[max(0.0, x) for x in low], [max(0.0, x) for x in high]],
            color=BLUE,
            marker="o",
            ms=4,
            capsize=3,
            label="attainment, 95 % interval",
        )
        axes[1].set(xlabel="requests/s", ylabel="share of requests", ylim=(0, 1.05))
        axes[1].set_title("within the SLO")
    for one, height in zip(axes, (0.97, 0.03), strict=False):  # where bad values are
        _cross_out(one, unstable, height)
        one.grid(alpha=0.3)
        one.legend(fontsize=8)
    return figure


def _cross_out(axes: Any, rates: Sequence[float], height: float) -> None:
    if rates:
        axes.plot(
            rates,
            [height] * len(rates),
            "x",
            color=RED,
            ms=7,
            mew=2,
            transform=axes.get_xaxis_transform(),
            clip_on=False,
            label="past saturation",
        )
        axes.axvspan(rates[0], rates[-1], color=RED, alpha=0.08, lw=0)


def _draw_in_system(axes: Any, result: SimulationResult) -> None:
    times, counts = in_system(result.requests)
    axes.step(times, counts, color=BLUE, where="post")
    axes.fill_between(times, counts, step="post", color=BLUE, alpha=0.15)
    axes.axvline(result.requests[-1].arrived, color=GREY, lw=0.8, ls=":", label="last arrival")
    axes.set(xlabel="time (s)", ylabel="requests in the system", title="load")


def in_system(records: Sequence[RequestRecord]) -> tuple[list[float], list[int]]:
    """(times, requests in the system from then on), at every change."""
    changes = [(record.arrived, 1) for record in records]
    changes += [(record.end, -1) for record in records if record.end is not None]
    changes.sort()
    return [time for time, _ in changes], list(accumulate(change for _, change in changes))


def _headline(figure: Any, title: str, warning: str) -> None:
    if warning:
        figure.suptitle(f"{title}\nPAST SATURATION: {warning}", fontsize=10, color=RED)
    else:
        figure.suptitle(title, fontsize=10)


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError('a plot needs matplotlib: pip install "minifer[course]"') from None
    return Figure(figsize=(width, height), dpi=110, layout="constrained")
