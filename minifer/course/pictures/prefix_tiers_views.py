"""The pictures of lecture 5, drawn from the values of `prefix_tiers`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from minifer.course.figures import (
    HATCHES,
    PALETTE,
    SERIES,
    finish,
    label_axes,
    new_figure,
    patch,
    request_colour,
)
from minifer.course.pictures.prefix_tiers import (
    TIERS,
    Occupancy,
    ReloadTimes,
    TreeBlock,
    Visit,
    VisitsRun,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def owner_colour(label: str) -> str:
    """A, B, C and the chat keep their colours; a label begins with its owner's name."""
    names = ("A", "B", "C")
    return request_colour(names.index(label[0]) if label[0] in names else 3)


def tree_figure(blocks: Sequence[TreeBlock], *, title: str) -> Figure:
    """The tree of prefixes, from left to right; a block is as wide as its text."""
    from matplotlib.patches import Rectangle

    width, rows = 1 + max(b.place for b in blocks), 1 + max(b.row for b in blocks)
    figure = new_figure(1.0 + 1.25 * width, 1.3 + 0.62 * rows)
    axes = figure.subplots()
    for block in blocks:
        left, top = block.place, block.row - 0.3
        if block.above is not None and block.above != block.row:
            axes.plot([left - 0.02] * 2, [block.above + 0.3, block.row], color="black", lw=1)
        axes.add_patch(
            Rectangle(
                (left + 0.02, top), 0.94, 0.6, facecolor=owner_colour(block.owner),
                edgecolor="black", linewidth=0.5,
            )
        )  # fmt: skip
        text = bytes(block.tokens).decode(errors="replace").replace(" ", "␣").replace("\n", "↵")
        middle = left + 0.49
        axes.text(middle, block.row - 0.1, text, ha="center", va="center", fontsize=9,
                  family="monospace")  # fmt: skip
        if block.found_by:
            axes.add_patch(
                Rectangle((left + 0.02, top + 0.4), 0.94, 0.2, facecolor=PALETTE["cached"])
            )
            axes.text(middle, top + 0.5, "found by " + ", ".join(block.found_by), ha="center",
                      va="center", fontsize=8.5, color="white")  # fmt: skip
    axes.set_xlim(-0.1, width)
    axes.set_ylim(rows - 0.6, -0.45)
    axes.set_xticks([p + 0.49 for p in range(width)], [f"block {p}" for p in range(width)])
    axes.set_yticks([])
    owners = dict.fromkeys(block.owner.split()[0] for block in blocks)
    legend = [patch(f"computed by {owner}", owner_colour(owner)) for owner in owners]
    legend.append(patch("found again", PALETTE["cached"]))
    finish(figure, axes, title, legend)
    return figure


def difference_figure(keys: Sequence[float], values: Sequence[float], *, title: str) -> Figure:
    """Largest difference of a block's keys and values, a pair of bars a layer."""
    figure = new_figure(6.0, 2.8)
    axes = figure.subplots()
    colour = PALETTE["cached"]  # both are KV; those of prefill and decode would mislead
    for shift, numbers, label, face in (
        (-0.2, keys, "keys", colour),
        (0.2, values, "values", "white"),
    ):
        places = [layer + shift for layer in range(len(numbers))]
        axes.bar(places, numbers, 0.38, color=face, edgecolor=colour, linewidth=1.5, label=label)
    axes.set_xticks(range(len(keys)))
    label_axes(axes, title=title, x="layer", y="largest difference")
    return figure


def hit_rate_figure(
    curves: Mapping[str, tuple[Sequence[int], Sequence[float]]],
    bounds: Mapping[str, float],
    *,
    title: str,
) -> Figure:
    """Share of blocks found against the size of the cache. bounds: with nothing evicted."""
    figure = new_figure(7.0, 3.8)
    axes = figure.subplots()
    for (name, (sizes, rates)), (colour, marker, line) in zip(curves.items(), SERIES, strict=False):
        axes.plot(sizes, [100 * r for r in rates], line, marker=marker, color=colour, label=name)
        axes.axhline(100 * bounds[name], color=colour, lw=0.9, ls=":")
    axes.plot([], [], ":", color="black", lw=0.9, label="nothing evicted")
    axes.set_ylim(-4, 104)
    axes.set_xscale("log", base=2)
    ticks = [size for size in next(iter(curves.values()))[0] if size & (size - 1) == 0]
    axes.set_xticks(ticks, [str(size) for size in ticks])
    label_axes(axes, title=title, x="cache size (blocks)", y="blocks found (%)")
    legend = axes.get_legend()
    if legend is not None:
        legend.remove()
    figure.legend(loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    return figure


def occupancy_figure(
    columns: Sequence[Occupancy], held: Sequence[tuple[int, int]], *, title: str
) -> Figure:
    """Three rows, device, DRAM and disk: blocks over the steps; marks where tokens were found.

    held: (DRAM, disk) blocks after each of these steps.
    """
    figure = new_figure(8.5, 4.6)
    rows = figure.subplots(3, 1, sharex=True)
    x = [column.number for column in columns]
    in_use, cached = [c.in_use for c in columns], [c.cached for c in columns]
    rows[0].bar(x, in_use, 1.0, color=[owner_colour(c.request) for c in columns])
    rows[0].bar(x, cached, 1.0, bottom=in_use, color="white", hatch=HATCHES["cached"],
                edgecolor=PALETTE["cached"], linewidth=0)  # fmt: skip
    for row, counts in ((rows[1], [n for n, _ in held]), (rows[2], [n for _, n in held])):
        row.bar(x, counts, 1.0, color=PALETTE["waiting"])
    for row, tier in zip(rows, TIERS, strict=True):
        label_axes(row, title="", x="", y=f"{tier}\n(blocks)")
        top = row.get_ylim()[1] * 1.35
        row.set_ylim(0, top)
        for column in columns:
            if count := column.hits.get(tier):
                place = (column.number, top * 0.97)
                row.annotate(f"+{count}", (column.number, top * 0.7), xytext=place, fontsize=9,
                             ha="center", va="top", arrowprops={"arrowstyle": "->"})  # fmt: skip
    starts = [columns[0], *(b for a, b in pairwise(columns) if a.request != b.request)]
    rows[0].secondary_xaxis("top").set_xticks(
        [c.number for c in starts], [c.request for c in starts], fontsize=9
    )
    rows[2].set_xlabel("steps that computed something", fontsize=10)
    figure.suptitle(title, fontsize=11, x=0.02, ha="left")
    legend = [
        *(patch(f"held by {name}", owner_colour(name)) for name in ("A", "B", "C", "chat")),
        patch("free, cached", "white", HATCHES["cached"], PALETTE["cached"]),
        patch("a copy", PALETTE["waiting"]),
        patch("+n: tokens found", "white", edge="white"),
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=7, fontsize=9, frameon=False,
                  columnspacing=1.0)  # fmt: skip
    return figure


def found_words(visit: Visit) -> str:
    """ "8 in DRAM, 8 on disk", "nothing"."""
    where = {"device": "on the device", "DRAM": "in DRAM", "disk": "on disk"}
    return ", ".join(f"{n} {where[tier]}" for tier, n in visit.found.items() if n) or "nothing"


def shelves_figure(visit: Visit, *, num_blocks: int, dram_blocks: int) -> Figure:
    """The three tiers after a visit, a box a block, in the colour of the request it came from."""
    from matplotlib.patches import Rectangle

    shelves = visit.shelves
    figure = new_figure(8.0, 2.7)
    axes = figure.subplots()
    sizes = (num_blocks, dram_blocks, max(num_blocks + dram_blocks, len(shelves.disk)))
    held = (shelves.device, shelves.dram, shelves.disk)
    for row, (labels, size) in enumerate(zip(held, sizes, strict=True)):
        for place in range(size):
            label = labels[place] if place < len(labels) else ""
            colour = owner_colour(label) if label else PALETTE["free"]
            edge = "black" if label else "white"
            axes.add_patch(
                Rectangle((place, row - 0.35), 0.92, 0.7, facecolor=colour, edgecolor=edge)
            )
            text = label.replace("chat", "D")
            axes.text(place + 0.46, row, text, ha="center", va="center", fontsize=9)
    axes.set_xlim(-0.1, max(sizes))
    axes.set_ylim(2.5, -0.5)
    axes.set_xticks([])
    axes.set_yticks(range(3), ["device", "DRAM\n(oldest first)", "disk"], fontsize=10)
    found = found_words(visit)
    title = f"{visit.name}: of {visit.num_prompt_tokens} prompt tokens found {found}"
    owners = {"A": "A", "B": "B", "C": "C", "chat": "chat (D)"}
    legend = [patch(name, owner_colour(owner)) for owner, name in owners.items()]
    finish(figure, axes, title, [*legend, patch("free", PALETTE["free"])])
    return figure


def reload_figure(
    times: ReloadTimes, predicted: Mapping[str, Sequence[float]], *, title: str
) -> Figure:
    """Seconds against prefix length: measured as points, predicted as lines.

    predicted: "recompute", "from disk", "from DRAM", and further tiers that are only modelled.
    """
    figure = new_figure(7.2, 4.2)
    axes = figure.subplots()
    measured = {"recompute": times.recompute, "from disk": times.disk, "from DRAM": times.dram}
    for (name, seconds), (colour, marker, line) in zip(measured.items(), SERIES, strict=False):
        axes.plot(times.num_tokens, [1e3 * s for s in seconds], marker, color=colour,
                  label=f"{name}, measured", ls="none")  # fmt: skip
        axes.plot(times.num_tokens, [1e3 * s for s in predicted[name]], line, color=colour,
                  label=f"{name}, predicted")  # fmt: skip
    for name in predicted.keys() - measured.keys():
        milliseconds = [1e3 * s for s in predicted[name]]
        axes.plot(times.num_tokens, milliseconds, SERIES[3][2], color=SERIES[3][0],
                  label=f"from {name}, modelled")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(times.num_tokens, [str(n) for n in times.num_tokens])
    label_axes(axes, title=title, x="prefix (tokens)", y="time (ms)")
    axes.legend(fontsize=9, frameon=False, ncols=1, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def shelves_view(
    run: VisitsRun, *, num_blocks: int, dram_blocks: int
) -> tuple[Callable[[str], Figure], Callable[[str], str], list[str]]:
    """For `explore`: a view of one visit by name, its alt text, and the names in order."""
    by_name = {visit.name: visit for visit in run.visits}

    def view(visit: str) -> Figure:
        return shelves_figure(by_name[visit], num_blocks=num_blocks, dram_blocks=dram_blocks)

    def alt(visit: str) -> str:
        found = found_words(by_name[visit])
        return f"Blocks on the device, in DRAM and on disk after {visit}, which found {found}."

    return view, alt, list(by_name)
