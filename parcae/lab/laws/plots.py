"""`laws.study` in pictures: loss by depth, the published law, the budgets, the task.

Drawn lines and dots are measured here unless the picture says reported or computed. matplotlib
(extra `course`) is imported on first use. Colours are those of Okabe and Ito, "Color Universal
Design", https://jfly.uni-koeln.de/color/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minifer.parcae.lab.laws.fits import CurveFit, LogParabola
from minifer.parcae.lab.laws.report import SHOWN_HOPS
from minifer.parcae.lab.laws.training_law import LAWS, training_loss

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Data = Mapping[str, Any]
_BLUE, _ORANGE, _GREEN, _RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
_SKY, _PURPLE, _GREY = "#56B4E9", "#CC79A7", "#767676"
_COLOURS = (_BLUE, _ORANGE, _GREEN, _RED, _SKY, _PURPLE, "black", _GREY)
_MARKERS = "osD^vPXp"
_SHORT = {"poisson": "Poisson", "poisson-batch": "Poisson a batch", "constant": "constant"}


def save_plots(data: Data, folder: Path, stem: str = "parcae_laws") -> list[Path]:
    """Write one SVG for each part that `data` holds: STEM.svg (loss by depth), STEM_training.svg,
    STEM_isoflop.svg, STEM_task.svg. Returns their paths."""
    from matplotlib import rc_context

    figures: dict[str, tuple[str, Callable[[Data], Figure]]] = {
        "test_time": ("", depth_figure),
        "training": ("_training", training_figure),
        "isoflop": ("_isoflop", isoflop_figure),
        "depth_task": ("_task", task_figure),
    }
    paths = []
    for part, (suffix, draw) in figures.items():
        if part in data:
            paths.append(folder / f"{stem}{suffix}.svg")
            # No date and fixed ids: the same data give the same file.
            with rc_context({"svg.hashsalt": stem}):
                draw(data[part]).savefig(paths[-1], metadata={"Date": None})
    return paths


def depth_figure(part: Data) -> Figure:
    """Loss by T of every setting; what each loses by looping on; one curve and its fits."""
    figure = _figure((14.4, 4.6))
    left, middle, right = figure.subplots(1, 3, width_ratios=(5, 4, 4))
    depths = part["depths"]
    for i, group in enumerate(part["groups"]):
        left.errorbar(
            depths,
            group["mean"],
            yerr=group["spread"] if len(group["seeds"]) > 1 else None,
            color=_COLOURS[i % len(_COLOURS)],
            marker=_MARKERS[i % len(_MARKERS)],
            linestyle="--" if group["depth"] == "constant" else "-",
            markersize=5,
            linewidth=1.5,
            capsize=3,
            label=f"{_SHORT[group['depth']]}, μ = {group['mu']}",
        )
    _depth_axis(left, depths)
    left.set_ylabel("validation loss, nats a token")
    left.set_title(_seeds("measured here: trained with …", part["groups"][0]["seeds"]))
    left.legend(title="training depth", frameon=False)
    _excess(middle, part)
    _one_curve(right, part)
    return figure


def _excess(axes: Axes, part: Data) -> None:
    """Mean over seeds of L(T) − its lowest, near 0."""
    top = 0.0
    for i, group in enumerate(part["groups"]):
        own = [c for c in part["curves"] if (c["depth"], c["mu"]) == (group["depth"], group["mu"])]
        excess = np.mean([np.array(c["losses"]) - min(c["losses"]) for c in own], axis=0)
        top = max(top, 1000 * excess[-1])
        axes.plot(
            part["depths"],
            1000 * excess,
            color=_COLOURS[i % len(_COLOURS)],
            marker=_MARKERS[i % len(_MARKERS)],
            linestyle="--" if group["depth"] == "constant" else "-",
            markersize=5,
            linewidth=1.5,
        )
    axes.set_ylim(-0.5, max(2.0, 2 * top))
    _depth_axis(axes, part["depths"])
    axes.set_ylabel("loss above the curve's lowest, 0.001 nats a token")
    axes.set_title("measured here: looped on past the best T")


def _one_curve(axes: Axes, part: Data) -> None:
    """The Poisson curve nearest to μ = 8."""
    curves = [c for c in part["curves"] if c["depth"] == "poisson"] or part["curves"]
    curve = min(curves, key=lambda c: (abs(c["mu"] - 8), c["seed"]))
    depths, losses, mu = np.array(part["depths"], float), np.array(curve["losses"]), curve["mu"]
    seen = depths <= mu
    axes.plot(depths[seen], losses[seen], "o", color="black", label="measured, fitted")
    axes.plot(
        depths[~seen], losses[~seen], "o", color="black", fillstyle="none", label="measured, not"
    )
    fine = np.geomspace(1, depths.max(), 200)
    for (form, formula), colour, dash in zip(
        part["formulas"].items(), (_BLUE, _ORANGE, _RED), ("-", "--", ":"), strict=False
    ):
        found = curve["fits"][form]["seen"]
        if found is not None:
            fit = CurveFit(form, found["floor"], found["scale"], found["z"], 0.0)
            axes.plot(fine, fit(fine), dash, color=colour, linewidth=1.5, label=formula)
    axes.axvline(mu, color=_GREY, linewidth=0.8, linestyle=":")
    _depth_axis(axes, part["depths"])
    axes.set_title(f"measured here: fits on T ≤ μ = {mu} (seed {curve['seed']})")
    axes.legend(frameon=False)


def training_figure(part: Data) -> Figure:
    """Left: the published law over μ at several D. Right: what a token costs over μ."""
    figure = _figure((10.4, 4.6))
    left, right = figure.subplots(1, 2)
    mus = np.linspace(1, 12, 60)
    size = next(iter(LAWS))
    for tokens, colour in zip((2e9, 5e9, 11.2e9), (_SKY, _GREEN, _BLUE), strict=True):
        losses = [training_loss(mu, tokens, size) for mu in mus]
        left.plot(mus, losses, color=colour, label=f"law, {tokens / 1e9:g}B tokens")
    reported = part["held_out"][size]["reported"]
    left.plot(8, reported, "D", color="black", label="reported, 11.2B tokens (held out)")
    left.set_xlabel("μ, mean loops in training (run at T = μ)")
    left.set_ylabel("validation loss, nats a token")
    left.set_title(f"reported: the training law of {size}")
    left.legend(frameon=False)
    counts = part["flops_per_token"]
    for name, colour, marker in (("parcae-140m", _BLUE, "o"), ("parcae-370m", _RED, "s")):
        keys = sorted({int(key.partition("_")[0]) for key in counts[name]})
        for suffix, dash, words in (("", "-", "here"), ("_public_script", ":", "public script")):
            relative = [counts[name][f"{mu}{suffix}"] / counts[name][f"1{suffix}"] for mu in keys]
            right.plot(keys, relative, dash, color=colour, marker=marker, label=f"{name}, {words}")
    right.set_xlabel("μ, mean loops in training")
    right.set_ylabel("FLOPs a training token, times those at μ = 1")
    right.set_title("computed: what depth costs, by two counts")
    right.legend(frameon=False)
    return figure


def isoflop_figure(part: Data) -> Figure:
    """Each budget's losses over μ, every seed a dot, with the parabola through the means."""
    figure = _figure((7.2, 4.6))
    axes = figure.subplots()
    budgets = part["budgets"]
    for i, budget in enumerate(budgets):
        colour = _COLOURS[i % len(_COLOURS)]
        own = [point for point in part["points"] if point["budget"] == budget["budget"]]
        axes.plot(
            [point["mu"] for point in own],
            [point["loss"] for point in own],
            ".",
            color=colour,
            alpha=0.5,
        )
        axes.plot(
            budget["mus"],
            budget["mean"],
            _MARKERS[i % len(_MARKERS)],
            color=colour,
            label=f"{budget['budget'] / 1e9:g} GFLOPs",
        )
        found = budget["parabola"]
        if found is not None:
            fine = np.geomspace(budget["mus"][0], budget["mus"][-1], 100)
            axes.plot(fine, LogParabola(**found)(fine), color=colour, linewidth=1.2)
            if found["inside"]:
                axes.plot(found["best"], found["lowest"], "*", color=colour, markersize=14)
    axes.set_xscale("log")
    axes.set_xticks(budgets[0]["mus"], [str(mu) for mu in budgets[0]["mus"]])
    axes.minorticks_off()
    axes.set_xlabel("μ, mean loops in training (run at T = μ)")
    axes.set_ylabel("validation loss, nats a token")
    seeds = sorted({point["seed"] for point in part["points"]})
    axes.set_title(f"measured here, noisy: one budget, loops or tokens (seeds {seeds})")
    axes.legend(title="mean over seeds; small: each seed", frameon=False)
    return figure


def task_figure(part: Data) -> Figure:
    """Share of right answers over T, a line for each number of hops, named where it rises."""
    from matplotlib import colormaps

    figure = _figure((8.4, 4.8))
    axes = figure.subplots()
    hops = len(part["solved_from"])
    depths, mean, deviation = (np.array(part[key]) for key in ("depths", "mean", "spread"))
    from_the_start = []
    for k in (k for k in range(hops) if k in SHOWN_HOPS):
        colour = colormaps["viridis"](0.85 * k / max(1, hops - 1))
        low, high = mean[:, k] - deviation[:, k], mean[:, k] + deviation[:, k]
        if len(part["seeds"]) > 1:
            axes.fill_between(
                depths, low.clip(0, 1), high.clip(0, 1), color=colour, alpha=0.2, linewidth=0
            )
        axes.plot(depths, mean[:, k], ".-", color=colour, markersize=6, linewidth=1.6)
        place = _rise(depths, mean[:, k])
        if place is None:
            from_the_start.append(str(k))
        else:
            axes.annotate(
                str(k),
                place,
                color=colour,
                fontweight="bold",
                ha="center",
                va="center",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.9},
            )
    if from_the_start:
        axes.annotate(f"{', '.join(from_the_start)} hops", (depths[0], 1.02), fontweight="bold")
    axes.axhline(1 / 6, color=_GREY, linewidth=1, linestyle=":")
    axes.annotate("guessing", (depths[-1], 1 / 6), ha="right", va="bottom", color=_GREY)
    _depth_axis(axes, part["depths"])
    axes.set_ylim(0, 1.1)
    axes.set_ylabel("share of right answers")
    title = "measured here: products of permutations, by hops"
    axes.set_title(_seeds(title, part["seeds"], "band: ±"))
    return figure


def _rise(depths: np.ndarray, mean: np.ndarray) -> tuple[float, float] | None:
    """Where a curve is halfway from its lowest to its highest, on a logarithmic axis of depths;
    None if it starts above that."""
    half = (mean.min() + mean.max()) / 2
    i = int(np.argmax(mean >= half))
    if i == 0:
        return None
    x = np.interp(half, mean[i - 1 : i + 1], np.log(depths[i - 1 : i + 1]))
    return float(np.exp(x)), float(half)


def _depth_axis(axes: Axes, depths: list[int]) -> None:
    axes.set_xscale("log")
    shown = [depth for depth in depths if depth in (1, 2, 3, 4, 6, 8, 12, 16, 24)]
    axes.set_xticks(shown, [str(depth) for depth in shown])
    axes.minorticks_off()
    axes.set_xlabel("T, loops when the model runs")


def _seeds(title: str, seeds: list[int], drawn: str = "±") -> str:
    count = len(seeds)
    return f"{title} ({count} seeds, {drawn} deviation)" if count > 1 else f"{title} (one seed)"


def _figure(size: tuple[float, float]) -> Figure:
    from matplotlib.figure import Figure  # no window, no global state

    figure = Figure(figsize=size, layout="constrained")
    figure.set_facecolor("white")
    return figure
