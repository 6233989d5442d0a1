"""What `study` found, in four pictures.

matplotlib (extra `course`) is imported on first use. Colours are those of Okabe and Ito, "Color
Universal Design", https://jfly.uni-koeln.de/color/.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minifer.parcae.lab.tradeoff.cells import Data

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#767676"
_ONE_PANEL, _TWO_PANELS = (7.2, 4.4), (9.6, 4.4)  # inches


def save_plots(data: Data, folder: Path, stem: str = "parcae_tradeoff") -> list[Path]:
    """Write STEM.svg (speed against loss), STEM_batching.svg, STEM_exit.svg and STEM_kv.svg; the
    paths."""
    try:
        from matplotlib import rc_context
    except ImportError:
        raise RuntimeError('a plot needs matplotlib: pip install "minifer[course]"') from None
    paths = []
    for suffix, draw in (
        ("", speed_figure),
        ("_batching", batching_figure),
        ("_exit", exit_figure),
        ("_kv", kv_figure),
    ):
        paths.append(folder / f"{stem}{suffix}.svg")
        # No date and fixed ids: the same data give the same file.
        with rc_context({"svg.hashsalt": stem}):
            draw(data).savefig(paths[-1], metadata={"Date": None})
    return paths


def speed_figure(data: Data) -> Figure:
    """Loss against speed relative to the first setting: one request, and several at a time.

    Speed is by CPU time: with one thread on an idle machine it is tokens/s, and on a busy one it
    still says what a token costs.
    """
    figure = _figure(_TWO_PANELS)
    panels = figure.subplots(1, 2, sharey=True)
    first, at = data["tradeoff"][0]["name"], data["plan"]["concurrency"]
    named = []
    for axes, traffic, title in (
        (panels[0], "single", "one request at a time"),
        (panels[1], "concurrent", f"{at} requests at a time"),
    ):
        points = []
        for entry in data["tradeoff"]:
            x, name = entry[traffic]["ratios"]["cpu_second"]["median"], entry["name"]
            colour, marker = (_BLUE, "o") if name.startswith("depth") else (_RED, "D")
            axes.plot(x, entry["loss"], marker, color=colour)
            points.append((x, entry["loss"], name))
        _label(axes, title, f"tokens a CPU second ÷ those of {first}")
        axes.set_xlim(0, 1.3 * max(x for x, *_ in points))
        axes.margins(y=0.25)
        named.append(points)
    panels[0].set_ylabel("loss, nats a token")
    figure.suptitle(f"{data['name']}: what speed costs, through the server", fontsize=11)
    for axes, points in zip(panels, named, strict=True):  # when both have their limits
        _annotate(figure, axes, points)
    return figure


def batching_figure(data: Data) -> Figure:
    """What each way to end a step takes, as a multiple of lockstep: a panel for each workload."""
    workloads = list(dict.fromkeys(entry["workload"] for entry in data["batching"]))
    figure = _figure(_TWO_PANELS)
    panels = figure.subplots(1, len(workloads), sharey=True)
    for axes, workload in zip(panels, workloads, strict=True):
        costs = {
            entry["batching"]: _costs(data["name"], entry)
            for entry in data["batching"]
            if entry["workload"] == workload
        }
        base = costs.pop("lockstep")
        for number, (way, cost) in enumerate(costs.items()):
            height = 0.8 / len(costs)
            bars = axes.barh(
                [place + (number - (len(costs) - 1) / 2) * height for place in range(len(cost))],
                [value / base[name] for name, value in cost.items()],
                height,
                color=(_ORANGE, _BLUE)[number],
                label=way,
            )
            white = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8, bbox=white)
        axes.set_yticks(range(len(base)), list(base))
        axes.axvline(1, color=_GREY, linestyle="--", linewidth=1, label="lockstep")
        _label(axes, workload, "÷ lockstep (less is better)")
        axes.margins(x=0.12)
    panels[0].invert_yaxis()  # shared: both start at the top
    panels[-1].legend(fontsize=9, frameon=False)
    figure.suptitle(f"{data['name']}: when a step ends, and what that takes", fontsize=11)
    return figure


def _costs(name: str, entry: Data) -> dict[str, float]:
    """By what it is called in the picture; time is the inverse of a ratio to lockstep already."""
    sizes = {name if size == "own" else size: n for size, n in entry["weight_bytes"].items()}
    return {
        "core applications": entry["core_applications"],
        "steps": entry["steps"],
        **{f"weight bytes,\n{size}": found for size, found in sizes.items()},
        "CPU time,\nmeasured": 1 / entry["ratios"]["cpu_second"]["median"],
    }


def exit_figure(data: Data) -> Figure:
    """Loss against mean loops: fixed depths, early exit, early exit with exact KV."""
    figure = _figure(_ONE_PANEL)
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
    figure = _figure(_ONE_PANEL)
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
    _label(
        axes,
        f"{data['name']}: what KV bytes buy (bars: two standard errors)",
        "KV KiB a token, bfloat16",
        "nats a token above full",
    )
    axes.set_xlim(0, 1.2 * max(x for x, *_ in points))
    _annotate(figure, axes, points)
    return figure


def _figure(size: tuple[float, float]) -> Figure:
    from matplotlib.figure import Figure  # no window, no global state

    return Figure(figsize=size, dpi=120, layout="constrained")


# Where a name may stand beside its point: offset in points, and which end of it is there.
_PLACES = (
    (6, 4, "left"),
    (6, -11, "left"),
    (-6, 4, "right"),
    (-6, -11, "right"),
    (0, 14, "center"),
    (0, -22, "center"),
    (14, 20, "left"),
    (14, -28, "left"),
    (-10, 20, "right"),
    (20, 34, "left"),
)
_HEIGHT, _WIDTH = 9.0, 4.4  # of a character at size 8, in points; a little generous


def _annotate(figure: Figure, axes: Axes, points: Sequence[tuple[float, float, str]]) -> None:
    """Names beside their points, each at the first place where it covers no point and no name."""
    figure.draw_without_rendering()  # now limits and layout are what they will be
    scale = 72 / figure.dpi
    pixels = [axes.transData.transform((x, y)) for x, y, _ in points]
    spots = [(float(x) * scale, float(y) * scale) for x, y in pixels]
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in spots]
    for (x, y, name), spot in zip(points, spots, strict=True):
        boxes = [_box(spot, place, len(name)) for place in _PLACES]
        crowds = [sum(_overlap(box, other) for other in taken) for box in boxes]
        best = crowds.index(min(crowds))
        taken.append(boxes[best])
        dx, dy, side = _PLACES[best]
        axes.annotate(
            name,
            (x, y),
            xytext=(dx, dy),
            textcoords="offset points",
            fontsize=8,
            ha=side,
            arrowprops={"arrowstyle": "-", "linewidth": 0.5, "color": _GREY},
        )


Box = tuple[float, float, float, float]  # left, bottom, right, top


def _box(spot: Sequence[float], place: tuple[float, float, str], characters: int) -> Box:
    width = characters * _WIDTH
    left = spot[0] + place[0] - {"left": 0.0, "center": width / 2, "right": width}[place[2]]
    return left, spot[1] + place[1], left + width, spot[1] + place[1] + _HEIGHT


def _overlap(a: Box, b: Box) -> float:
    """Area in common."""
    wide = min(a[2], b[2]) - max(a[0], b[0])
    high = min(a[3], b[3]) - max(a[1], b[1])
    return max(0.0, wide) * max(0.0, high)


def _label(axes: Axes, heading: str, x: str, y: str = "") -> None:
    axes.set_title(heading, fontsize=10, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
