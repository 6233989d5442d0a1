"""A routing benchmark in words and in a picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from minifer.perf.load import metrics
from minifer.perf.load.generator import LoadRun
from minifer.simulation.calibration.routing_bench import RoutingBench, summarize_predicted
from minifer.simulation.result import SimulationResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Metric → what it is called, and how it is shown.
ROWS: Mapping[str, tuple[str, float, str]] = {
    "ttft_mean": ("TTFT, mean", 1e3, "ms"),
    "ttft_p50": ("TTFT, median", 1e3, "ms"),
    "ttft_p99": ("TTFT, p99", 1e3, "ms"),
    "ttft_first_turn_mean": ("TTFT of first turns, mean", 1e3, "ms"),
    "ttft_later_turns_mean": ("TTFT of later turns, mean", 1e3, "ms"),
    "computed_tokens": ("prompt tokens computed", 1.0, ""),
}
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")  # Okabe and Ito's


def predicted_medians(bench: RoutingBench) -> dict[str, dict[str, float]]:
    """Policy → metric → median over the rounds."""
    out = {}
    for policy, results in bench.predicted.items():
        rounds = [summarize_predicted(result) for result in results]
        out[policy] = {
            name: statistics.median(r[name] for r in rounds)
            for name in ROWS
            if all(name in r for r in rounds)
        }
    return out


def table(bench: RoutingBench) -> str:
    """Policies side by side: measured, and predicted beside it; medians over the rounds."""
    predicted = predicted_medians(bench)
    width = max(17, *(len(policy) + 2 for policy in bench.runs))
    head = "".join(f"{policy:>{width}}" for policy in bench.runs)
    under = "".join(f"{'measured  sim.':>{width}}" for _ in bench.runs)
    lines = [f"{'':27}{head}", f"{'':27}{under}"]
    for name, (label, factor, unit) in ROWS.items():
        cells = []
        for policy in bench.runs:
            measured = bench.result.arms[policy].get(name)
            if measured is None:
                break
            pair = f"{measured.median * factor:.0f} {predicted[policy][name] * factor:7.0f}"
            cells.append(f"{pair:>{width}}")
        else:
            lines.append(f"{label:27}{''.join(cells)}  {unit}".rstrip())
    return "\n".join([*lines, "", *_ratios(bench, predicted), *_notes(bench)])


def _ratios(bench: RoutingBench, predicted: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Of each policy to the first, round by round."""
    baseline, *others = bench.runs
    lines = []
    for policy in others:
        parts = []
        for name in ("ttft_mean", "ttft_later_turns_mean", "computed_tokens"):
            ratio = bench.result.ratios[policy].get(name)
            if ratio is None or not predicted[baseline].get(name):
                continue
            simulated = predicted[policy][name] / predicted[baseline][name]
            label = ROWS[name][0].removesuffix(", mean")
            parts.append(f"{label} {ratio.median:.2f}× (simulated {simulated:.2f}×)")
        lines.append(f"{policy} ÷ {baseline}: {'; '.join(parts)}")
    return lines


def _notes(bench: RoutingBench) -> list[str]:
    fit = bench.fit
    notes = [
        f"simulated with prices fitted to {fit.num_steps} steps of the first policy's engines "
        f"(R² {fit.r2:.3f}, mean error {fit.mape:.0%}); without HTTP"
    ]
    failed = sum(
        r.error is not None for runs in bench.runs.values() for run in runs for r in run.records
    )
    if failed:
        notes.append(f"{failed} requests failed and are in no number")
    return ["", *(f"note: {note}" for note in notes)]


def draw(bench: RoutingBench, title: str) -> Figure:
    """How TTFT is distributed, measured and simulated; and how many prompt tokens were computed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    figure.suptitle(title, fontsize=11)
    left, right = figure.subplots(1, 2, width_ratios=(1.6, 1))
    colours = dict(zip(bench.runs, _COLOURS, strict=False))
    for policy, colour in colours.items():
        _cdf(left, _measured(bench.runs[policy]), colour, "-", f"{policy}, measured")
        _cdf(left, _simulated(bench.predicted[policy]), colour, "--", f"{policy}, simulated")
    left.set_xlabel("time to first token, ms")
    left.set_ylabel("share of requests at or below")
    left.set_xlim(left=0)
    left.set_ylim(0, 1.02)
    left.legend(fontsize=8, loc="lower right")
    predicted = predicted_medians(bench)
    for place, (policy, colour) in enumerate(colours.items()):
        measured = bench.result.arms[policy]["computed_tokens"].median
        right.bar(place - 0.2, measured, 0.36, color=colour)
        right.bar(
            place + 0.2,
            predicted[policy]["computed_tokens"],
            0.36,
            color="none",
            edgecolor=colour,
            hatch="///",
        )
    right.set_xticks(range(len(colours)), list(colours))
    right.set_ylabel("prompt tokens computed in a round")
    right.set_title("filled: measured, hatched: simulated", fontsize=9)
    return figure


def _measured(runs: Sequence[LoadRun]) -> list[float]:
    return [
        metrics.ttft(record) * 1e3 for run in runs for record in run.records if record.error is None
    ]


def _simulated(results: Sequence[SimulationResult]) -> list[float]:
    return [r.ttft * 1e3 for result in results for r in result.requests if r.ttft is not None]


def _cdf(axes: Axes, values: Sequence[float], colour: str, style: str, label: str) -> None:
    ordered = sorted(values)
    shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
    axes.step(ordered, shares, where="post", color=colour, linestyle=style, label=label)
