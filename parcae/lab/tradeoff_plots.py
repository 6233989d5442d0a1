"""`tradeoff.study` in three pictures.

matplotlib (extra `course`) is imported on first use. Colours are those of Okabe and Ito, "Color
Universal Design", https://jfly.uni-koeln.de/color/.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Data = Mapping[str, Any]
_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#767676"
_SIZE = (7.2, 4.4)


def save_plots(data: Data, folder: Path, stem: str = "parcae_tradeoff") -> list[Path]:
    """Write STEM.svg (speed against loss), STEM_exit.svg and STEM_kv.svg; the paths."""
    paths = []
    for suffix, draw in (("", speed_figure), ("_exit", exit_figure), ("_kv", kv_figure)):
        paths.append(folder / f"{stem}{suffix}.svg")
        # No date and fixed ids: the same data give the same file.
        from matplotlib import rc_context

        with rc_context({"svg.hashsalt": stem}):
            draw(data).savefig(paths[-1], metadata={"Date": None})
    return paths


def speed_figure(data: Data) -> Figure:
    """Loss against tokens/s relative to the first setting: one request, and several at a time."""
    figure = _figure((9.6, 4.4))
    left, right = figure.subplots(1, 2, sharey=True)
    at = data["plan"]["concurrency"]
    for axes, traffic, title in (
        (left, "single", "one request at a time"),
        (right, "concurrent", f"{at} requests at a time"),
    ):
        points = [e for e in data["tradeoff"] if e["loss"] is not None and traffic in e]
        for prefix, colour, marker in (("depth", _BLUE, "o"), ("exit", _RED, "D")):
            own = [e for e in points if e["name"].startswith(prefix)]
            plain = [e for e in own if not e["name"].endswith("lockstep")]
            waits = [e for e in own if e["name"].endswith("lockstep")]
            for group, fill in ((plain, colour), (waits, "white")):
                axes.plot(
                    [e[traffic]["ratio"] for e in group],
                    [e["loss"] for e in group],
                    marker,
                    color=colour,
                    markerfacecolor=fill,
                )
        _annotate(axes, [(e[traffic]["ratio"], e["loss"], e["name"]) for e in points])
        first = data["tradeoff"][0]["name"]
        _label(axes, title, f"generated tokens/s ÷ those of {first}", "")
        axes.set_xlim(left=0, right=1.3 * max(e[traffic]["ratio"] for e in points))
    left.set_ylabel("loss, nats a token")
    figure.suptitle(f"{data['name']}: what speed costs, through the server", fontsize=11)
    return figure


def exit_figure(data: Data) -> Figure:
    """Loss against mean loops: fixed depths, early exit, early exit with exact KV."""
    figure = _figure(_SIZE)
    axes = figure.subplots()
    mean = data["model"]["loop"]["mean_recurrence"]
    depths = data["depths"]
    axes.plot(
        [row["mean_loops"] for row in depths],
        [row["loss"] for row in depths],
        "o-",
        color=_BLUE,
        label="every token at one depth",
    )
    for kind, colour, style, label in (
        ("engine", _RED, "D-", "early exit"),
        ("exact", _ORANGE, "s--", "early exit, keys and values of all loops"),
    ):
        rows = [entry[kind] for entry in data["exits"]]
        axes.plot(
            [row["mean_loops"] for row in rows],
            [row["loss"] for row in rows],
            style,
            color=colour,
            label=label,
            markersize=5,
        )
    axes.axvline(mean, color=_GREY, linestyle=":", linewidth=1, label="mean depth in training")
    _label(axes, f"{data['name']}: loss by loops", "mean loops a token", "loss, nats a token")
    axes.legend(fontsize=9, frameon=False)
    return figure


def kv_figure(data: Data) -> Figure:
    """Loss above `full` against KV bytes, one labelled point a policy."""
    figure = _figure(_SIZE)
    axes = figure.subplots()
    points = []
    for prefix, colour, marker in (
        ("full", _BLUE, "o"),
        ("first", _GREEN, "s"),
        ("cyclic", _ORANGE, "^"),
        ("terminal", _RED, "v"),
    ):
        for row in data["policies"]:
            if row["name"].startswith(prefix):
                x, y = row["kv_bytes"] / 1024, row["excess"]
                axes.errorbar(x, y, 2 * row["error"], fmt=marker, color=colour, capsize=3)
                points.append((x, y, row["name"]))
    axes.axhline(0, color=_GREY, linewidth=0.8)
    _annotate(axes, points)
    _label(
        axes,
        f"{data['name']}: what KV bytes buy (bars: two standard errors)",
        "KV KiB a token, bfloat16",
        "nats a token above full",
    )
    axes.set_xlim(0, 1.2 * max(x for x, *_ in points))
    return figure


def _figure(size: tuple[float, float]) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError('a plot needs matplotlib: pip install "minifer[course]"') from None
    return Figure(figsize=size, dpi=120, layout="constrained")


def _annotate(axes: Axes, points: Sequence[tuple[float, float, str]]) -> None:
    """Names beside their points; of points that lie close together, above and below in turn."""
    above = True
    for x, y, name in sorted(points):
        axes.annotate(
            name,
            (x, y),
            xytext=(5, 5 if above else -11),
            textcoords="offset points",
            fontsize=8,
        )
        above = not above


def _label(axes: Axes, heading: str, x: str, y: str) -> None:
    axes.set_title(heading, fontsize=10, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
