"""The figures of scaling laws: curves, parabolas, fits; `scaling_data.py` has what they draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minifer.course.figures import SERIES, label_axes, log_axes, new_figure
from minifer.course.pictures.scaling_data import (
    Experiment,
    Worth,
    iso_flop,
    iso_parameter,
    lab_curves,
)
from minifer.parcae.lab.laws.counter_evidence import DEPTH_CURVES
from minifer.parcae.lab.laws.depth_law import DEPTHS, group
from minifer.parcae.lab.laws.fits import FORMS, PowerLaw, fit_curve
from minifer.parcae.lab.laws.isoflop import Budget

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GREY = "#767676"  # of what is not data

# What each figure shows, for those who do not see it.
ALT = {
    "iso": "Two panels over the mean loops 1 to 12. At equal tokens the loss falls all the way, "
    "ever less. At equal FLOPs three curves: for 1e18 FLOPs the lowest point is at 2 loops, for "
    "4e18 at 5, for 16e18 at 12, the edge.",
    "protocol": "Left: losses of six budgets over the mean loops 1 to 12 with a parabola each; "
    "the lowest point moves from 2 to about 10. Right: the lowest points over the budget on log "
    "axes, near a straight line of slope 0.38.",
    "tokens": "Loss over tokens of training, 10 to 170 thousand, on log axes, for 1, 2, 4 and 8 "
    "loops with the spread of three seeds. All twelve points lie near one falling line, which was "
    "fitted to one loop alone; two points of 2 loops lie a little above it.",
    "pareto": "Loss against milliseconds a token for one request. Depths 1, 2, 4 and 8 form a "
    "steeply falling, then flat curve from 1.85 nats at 1.9 ms to 1.16 at 8 ms. Three early exits "
    "lie between 4 and 8 loops, all on the flat part.",
    "worth": "Over 1 to 16 loops, all relative to one loop: arithmetic and weights read again "
    "rise to 5.9, quality to 1.8, memory and weights read once stay at 1.",
    "evidence": "Left, perplexities of three OpenMythos models of 118M over 1 to 64 loops: trained "
    "at a constant 8 loops, 58 at 8 and 171 at 16; with random loops, flat near 65 from 4 on; "
    "without a halting unit, falling to 60 and rising slightly to 62 at 64. Right, Ouro 1.4B: "
    "accuracy rises to 0.79 at 4 loops and falls to 0.02 at 20.",
}


def depth_alt(training: str) -> str:
    """The words for `depth_figure`."""
    return (
        f"Loss over 1 to 24 loops, depth in training: {training}. The loss falls, then stays or "
        "rises a little. Where at least four depths lie below the mean, an exponential and a power "
        "law fitted to them go on: the first stays, the second falls."
    )


def iso_figure(size: str, tokens: float, budgets: Sequence[float], *, title: str) -> Figure:
    """The reported law, twice: at equal tokens, and at equal training FLOPs."""
    mus = [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    figure = new_figure(9.0, 4.0)
    left, right = figure.subplots(1, 2)
    colour, marker, line = SERIES[0]
    left.plot(mus, iso_parameter(size, mus, tokens), color=colour, marker=marker, linestyle=line)
    x = "mean loops in training, μ"
    label_axes(left, title=f"equal tokens ({tokens / 1e9:.1f} B)", x=x, y="loss (nats a token)")
    for (colour, marker, line), budget in zip(SERIES, budgets, strict=False):
        losses = iso_flop(size, mus, budget)
        label = f"{budget / 1e18:g}e18 FLOPs"
        right.plot(mus, losses, color=colour, linestyle=line, label=label)
        best = int(np.argmin(losses))
        right.plot(mus[best], losses[best], color=colour, marker=marker, markersize=8)
    label_axes(right, title="equal FLOPs, lowest point marked", x=x, y="loss (nats a token)")
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure


def protocol_figure(experiment: Experiment, *, title: str) -> Figure:
    """Losses of each budget with their parabola and vertex; the vertices over the budget."""
    figure = new_figure(9.0, 4.2)
    left, right = figure.subplots(1, 2)
    law, minima = experiment.law(), experiment.minima()
    fine = np.geomspace(1, experiment.mus[-1], 60)
    rows = zip(experiment.budgets, experiment.losses, minima, SERIES, strict=False)
    for budget, losses, best, (colour, marker, _) in rows:
        curve = np.polynomial.Polynomial.fit(np.log(experiment.mus), losses, 2)
        left.plot(experiment.mus, losses, color=colour, marker=marker, linestyle="none")
        left.plot(fine, curve(np.log(fine)), color=colour)
        left.plot(best, float(curve(np.log(best))), color="black", marker="|", markersize=14)
        right.plot(budget, best, color=colour, marker=marker, markersize=8)
    left.set_xscale("log", base=2)
    left.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    label_axes(left, title="a parabola a budget, | its lowest point",
               x="mean loops in training, μ", y="loss (nats a token)")  # fmt: skip
    wide = np.array([experiment.budgets[0], experiment.budgets[-1]])
    right.plot(wide, law(wide), color="black", label=f"μ* ∝ C^{law.exponent:.2f}")
    right.set_xscale("log")
    right.set_yscale("log", base=2)
    right.set_yticks([2, 4, 8], ["2", "4", "8"])
    label_axes(right, title="a straight line in logarithms",
               x="training budget C (FLOPs)", y="best μ of the budget")  # fmt: skip
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure


def tokens_figure(budgets: Sequence[Budget], law: PowerLaw, *, title: str) -> Figure:
    """The lab's losses over the tokens they were trained on, and a law fitted to μ = 1 alone."""
    figure = new_figure(8.0, 4.2)
    axes = figure.subplots()
    for place, mu in enumerate(budgets[0].mus):
        colour, marker, _ = SERIES[place]
        tokens = [b.tokens[place] / 1e3 for b in budgets]
        mean, spread = ([getattr(b, name)[place] for b in budgets] for name in ("mean", "spread"))
        axes.errorbar(tokens, mean, yerr=spread, color=colour, marker=marker,
                      linestyle="none", capsize=3, label=f"μ = {mu}")  # fmt: skip
    wide = np.geomspace(9e3, 190e3, 40)
    axes.plot(wide / 1e3, law(wide), color="black", label="power law through μ = 1")
    log_axes(axes, (10, 20, 40, 80, 160))
    axes.set_yticks([2.0, 2.2, 2.4, 2.6], ["2.0", "2.2", "2.4", "2.6"])
    label_axes(axes, title=title, x="tokens of training (thousands)", y="loss (nats a token)")
    return figure


def depth_figure(depth: str, mu: int, forms: Sequence[str], *, title: str) -> Figure:
    """The lab's mean loss by depth, and forms fitted to the depths up to μ, carried on beyond."""
    (found,) = [g for g in group(lab_curves()) if (g.depth, g.mu) == (depth, mu)]
    figure = new_figure(8.0, 4.0)
    axes = figure.subplots()
    axes.errorbar(DEPTHS, found.mean, yerr=found.spread, color="black", marker="o",
                  linestyle="none", capsize=3, label="measured, mean of 3 seeds")  # fmt: skip
    inside = [place for place, T in enumerate(DEPTHS) if mu >= T]
    fine = np.linspace(1, DEPTHS[-1], 120)
    for (colour, _, line), form in zip(SERIES, forms, strict=False):
        if len(inside) >= 4:
            fit = fit_curve([DEPTHS[i] for i in inside], [found.mean[i] for i in inside], form)
            axes.plot(fine, fit(fine), color=colour, linestyle=line, label=FORMS[form].formula)
    axes.axvline(mu, color=_GREY, linewidth=1, linestyle=":")
    top = max(found.mean) + max(found.spread)
    axes.text(mu + 0.15, top, f"T = μ = {mu}", fontsize=9, color=_GREY, va="top")
    label_axes(axes, title=title, x="loops at test time, T", y="loss (nats a token)")
    return figure


def worth_figure(rows: Sequence[Worth], *, title: str) -> Figure:
    """Quality that loops buy, against what each resource is asked for, all at one loop = 1."""
    figure = new_figure(8.0, 4.0)
    axes = figure.subplots()
    lines = {
        "arithmetic, and weights read again each loop": [row.read for row in rows],
        "quality: as good as a plain model of … times the size": [row.quality for row in rows],
        "memory held, and weights read once": [row.resident for row in rows],
    }
    loops = [row.loops for row in rows]
    for (colour, marker, line), (label, values) in zip(SERIES, lines.items(), strict=False):
        axes.plot(loops, values, color=colour, marker=marker, linestyle=line, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(loops, [str(n) for n in loops])
    label_axes(axes, title=title, x="loops, T = μ", y="times the model of one loop")
    return figure


def pareto_figure(rows: Sequence[Mapping[str, Any]], *, title: str) -> Figure:
    """Loss against milliseconds a token, as the server measured them: depths, and early exits."""
    figure = new_figure(8.0, 4.2)
    axes = figure.subplots()
    kinds = {"fixed depth T": "depth", "early exit, by threshold": "exit"}
    for (colour, marker, line), (label, kind) in zip(SERIES, kinds.items(), strict=False):
        own = [row for row in rows if row["name"].startswith(kind)]
        places = sorted((1e3 / row["single"]["tokens_per_second"], row["loss"]) for row in own)
        axes.plot(*zip(*places, strict=True), color=colour, marker=marker, linestyle=line,
                  label=label)  # fmt: skip
        for row in own:
            place = 1e3 / row["single"]["tokens_per_second"], row["loss"]
            text = row["name"].replace("depth ", "T = ").replace("exit ", "")
            away = (4, 6) if kind == "depth" else (2, 20 if row["name"].endswith("0.01") else 8)
            axes.annotate(text, place, xytext=away, textcoords="offset points", fontsize=9)
    axes.margins(0.08, 0.12)
    label_axes(axes, title=title, x="milliseconds a token, one request", y="loss (nats a token)")
    return figure


def evidence_figure(*, title: str) -> Figure:
    """What others reported of four looped models, by loops: perplexities, and one accuracy."""
    figure = new_figure(9.0, 4.0)
    left, right = figure.subplots(1, 2)
    labels = ("constant 8 loops", "random 4 to 16 loops", "random, no halting unit")
    for (colour, marker, line), label, item in zip(SERIES, labels, DEPTH_CURVES, strict=False):
        _by_depth(left, item.by_depth, colour, marker, line, label)
    left.set_yscale("log")
    left.set_yticks([60, 100, 200, 500, 1000], ["60", "100", "200", "500", "1000"])
    left.minorticks_off()
    _loops(left, (1, 2, 4, 8, 16, 64), "OpenMythos, 118M", "perplexity")
    colour, marker, line = SERIES[3]
    _by_depth(right, DEPTH_CURVES[3].by_depth, colour, marker, line, "trained at 4 loops")
    _loops(right, (1, 2, 4, 10, 20), "Ouro, 1.4B", "GSM8K accuracy (share right)")
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure


def _by_depth(
    axes: Axes, values: Mapping[int, float], colour: str, marker: str, line: str, label: str
) -> None:
    axes.plot(list(values), list(values.values()), color=colour, marker=marker, linestyle=line,
              label=label)  # fmt: skip


def _loops(axes: Axes, ticks: Sequence[int], title: str, y: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    label_axes(axes, title=title, x="loops at test time, T", y=y)
