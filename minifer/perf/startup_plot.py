"""A start drawn as bars, a stage a colour, and what memory it took.

matplotlib (extra `course`) is imported on first use. Colours are those of Okabe and Ito.
"""

from __future__ import annotations

from typing import Any

from minifer.perf.bench import BenchmarkResult
from minifer.perf.startup import STAGES

_COLOURS = ("#999999", "#0072B2", "#56B4E9", "#009E73", "#F0E442", "#D55E00", "#CC79A7", "#000000")


def figure(result: BenchmarkResult) -> Any:
    """A bar an arm, its medians end to end; the whisker is the spread of the whole (IQR)."""
    from matplotlib.figure import Figure

    arms = list(result.arms)
    picture = Figure(figsize=(10, 1.8 + 0.5 * len(arms)), layout="constrained")
    axes = picture.add_subplot()
    model = result.settings.get("model", "")
    axes.set_title(f"minifer generate, from the command to its first text: {model}", loc="left")
    stages = [(name, what) for name, what in STAGES if name != "seconds"]
    ends = [0.0] * len(arms)
    for (stage, what), colour in zip(stages, _COLOURS, strict=False):
        widths = [_median(result, arm, stage) for arm in arms]
        axes.barh(arms, widths, left=ends, color=colour, edgecolor="white", label=what)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    commands = [_median(result, arm, "first_byte") for arm in arms]
    axes.barh(arms, commands, color="none", edgecolor="black", hatch="//", label="first byte")
    for row, (arm, end) in enumerate(zip(arms, ends, strict=True)):
        whole = result.arms[arm].get("seconds" if end else "first_byte")
        assert whole is not None  # an arm is one kind or the other
        axes.errorbar(whole.median, row, xerr=whole.iqr / 2, color="black", capsize=3)
        axes.text(whole.median + whole.iqr / 2, row, f"  {_label(result, arm)}", va="center")
    axes.set_xlim(0, 1.35 * max(max(ends), *commands))
    axes.set_xlabel("seconds")
    axes.invert_yaxis()
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.4, -0.18), ncols=4)
    return picture


def _median(result: BenchmarkResult, arm: str, metric: str) -> float:
    found = result.arms[arm].get(metric)
    return found.median if found is not None else 0.0


def _label(result: BenchmarkResult, arm: str) -> str:
    if "first_byte" in result.arms[arm]:
        return f"{_median(result, arm, 'first_byte'):.2f} s"
    whole = f"{_median(result, arm, 'seconds'):.2f} s"
    if "memory_ratio" not in result.arms[arm]:
        return whole
    megabytes = _median(result, arm, "peak_bytes") / 1e6
    return f"{whole}, {megabytes:,.0f} MB ({_median(result, arm, 'memory_ratio'):.2f} ×)"
