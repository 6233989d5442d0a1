"""The figures of lecture 02; `prefill_decode_data.py` holds the values they draw."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from minifer.config import ModelConfig
from minifer.course.figures import (
    HATCHES,
    PALETTE,
    SERIES,
    finish,
    label_axes,
    new_figure,
    patch,
    request_colour,
    request_colours,
)
from minifer.course.pictures.prefill_decode_data import (
    Layout,
    Pass,
    Series,
    chunk_rows,
    computed_cells,
    generation_passes,
    rope_pairs,
    step_passes,
    token_times,
    total_flops,
)
from minifer.course.shapes import LLAMA_8B
from minifer.events import Event
from minifer.perf.costs import ElementBytes, kv_bytes_per_token, step_cost

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WAYS = (SERIES[6], SERIES[2])  # naive and cached: neither prefill's nor decode's colour

# What each figure shows, for those who do not see it.
ALT = {
    "cells": "Two grids, a row a forward pass, a column a position. Without a cache, pass 1 "
    "computes positions 0 to 3, and each later pass computes all positions again and one more. "
    "With a cache, pass 1 is the same, and each later pass computes one position and reads the "
    "keys and values of those before it.",
    "chunks": "Three attention masks of 8 tokens, a row a query, a column a key. In one chunk, a "
    "triangle of new keys. As 5 + 3, the last three rows see five cached keys and a small triangle "
    "of new ones. One by one, each row sees cached keys and its own, and nothing is masked.",
    "pairs": "A head of 8 dimensions, twice. Half-split: the pairs are 0 and 4, 1 and 5, 2 and 6, "
    "3 and 7. Interleaved: the pairs are 0 and 1, 2 and 3, 4 and 5, 6 and 7.",
    "work": "Two bar charts over 13 engine steps of A, B and C. Arithmetic: large and about equal "
    "in steps 1 to 3, almost all of it prefill, smaller in step 4, and from step 5 on a fraction "
    "of that, all decode. Bytes: nearly the same in every step, mostly weights with a thin layer "
    "of keys and values on top.",
    "ticks": "Token times of A, B and D. A and B produce tokens at a steady pace, then both have "
    "one long gap while D's prompt is computed, then all three go on together, more slowly until "
    "D is done.",
    "passes": "Time of a pass against tokens drawn so far, predicted and measured. Naive passes "
    "rise steadily, cached passes stay flat.",
    "totals": "Time of a generation against tokens wanted, both logarithmic, predicted and "
    "measured. Naive and cached begin together at one token and part more and more.",
}


def draw_cells(naive: Sequence[Pass], cached: Sequence[Pass], prompt: int, *, title: str) -> Figure:
    """Two grids side by side: a row a pass, a column a position."""
    positions = naive[-1][1]
    figure = new_figure(2.4 + 0.52 * positions * 2, 1.9 + 0.42 * len(naive))
    for axes, passes, name in zip(
        figure.subplots(1, 2), (naive, cached), ("without a cache", "with a cache"), strict=True
    ):
        for cell in computed_cells(passes, prompt):
            kind = "prefill" if cell.given else "decode"
            colour = PALETTE["cached"] if cell.kind == "read" else PALETTE[kind]
            hatch = HATCHES["decode"] if cell.kind != "read" and not cell.given else ""
            _box(axes, cell.position, cell.step, colour, hatch)
            if cell.kind == "again":
                axes.text(
                    cell.position, cell.step, "×", ha="center", va="center", fontsize=11,
                    weight="bold", bbox={"boxstyle": "circle,pad=0.1", "fc": "white", "lw": 0},
                )  # fmt: skip
        axes.set_xlim(-0.5, positions - 0.5)
        axes.set_ylim(len(passes) + 0.5, 0.5)
        axes.set_xticks(range(positions))
        axes.set_yticks(range(1, len(passes) + 1))
        axes.set_xlabel("position of the token")
        axes.set_ylabel("forward pass")
        finish(figure, axes, name, [])
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    _legend(
        figure,
        patch("computed, a given token", PALETTE["prefill"]),
        patch("computed, a drawn token", PALETTE["decode"], HATCHES["decode"], "white"),
        patch("its key and value are read", PALETTE["cached"]),
        patch("×  computed again", "white"),
    )
    return figure


def draw_chunks(ways: Sequence[Sequence[int]], *, title: str) -> Figure:
    """The masks of one prompt, cut in several ways: a panel a way, a row a query."""
    total = sum(ways[0])
    colours = {
        "cached": PALETTE["cached"],
        "new": PALETTE["prefill"],
        "hidden": PALETTE["waiting"],
        "absent": "white",
    }
    figure = new_figure(0.8 + (0.9 + 0.31 * total) * len(ways), 1.6 + 0.3 * total)
    for axes, chunks in zip(figure.subplots(1, len(ways)), ways, strict=True):
        for y, row in enumerate(chunk_rows(chunks)):
            for x, kind in enumerate(row):
                _box(axes, x, y, colours[kind], HATCHES["waiting"] if kind == "hidden" else "")
        for boundary in itertools.accumulate(chunks[:-1]):
            axes.axhline(boundary - 0.5, color="black", linewidth=2)
        axes.set_xlim(-0.5, total - 0.5)
        axes.set_ylim(total - 0.5, -0.5)
        axes.set_xticks(range(total))
        axes.set_yticks(range(total))
        axes.set_xlabel("key position")
        axes.set_ylabel("query position")
        finish(figure, axes, _chunking(chunks), [])
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    _legend(
        figure,
        patch("key read from the cache", colours["cached"]),
        patch("key of this chunk", colours["new"]),
        patch("masked: it comes later", colours["hidden"], HATCHES["waiting"]),
        patch("does not exist yet", "white"),
    )
    return figure


def _chunking(chunks: Sequence[int]) -> str:
    if len(chunks) == 1:
        return f"one chunk of {chunks[0]}"
    if len(set(chunks)) == 1:
        return f"{len(chunks)} chunks of {chunks[0]}"
    return f"chunks of {', '.join(map(str, chunks[:-1]))} and {chunks[-1]}"


def draw_pairs(head_dim: int, *, title: str) -> Figure:
    """Which dimensions turn together, in both layouts: one colour and marker a pair."""
    figure = new_figure(7.2, 2.6)
    axes = figure.subplots()
    layouts: tuple[Layout, Layout] = ("half", "interleaved")
    for y, layout in enumerate(layouts):
        for i, pair in enumerate(rope_pairs(head_dim, layout)):
            for x in pair:
                _box(axes, x, y, request_colour(i), "")
                axes.text(x, y, f"pair {i}", ha="center", va="center", fontsize=10)
    axes.set_xlim(-0.5, head_dim - 0.5)
    axes.set_ylim(1.6, -0.6)
    axes.set_xticks(range(head_dim))
    axes.set_yticks(range(2), ["half-split", "interleaved"])
    axes.set_xlabel("dimension of the head")
    finish(figure, axes, title, [])
    return figure


def draw_work(config: ModelConfig, events: Iterable[Event], *, title: str) -> Figure:
    """Arithmetic and traffic of every engine step in float32, from its events: two panels."""
    steps, element, highest = step_passes(events), ElementBytes(4, 4, 4), 0.0
    figure = new_figure(8.0, 4.6)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for x, entries in enumerate(steps, start=1):
        pairs = [(query, context) for *_, query, context in entries]
        whole = step_cost(config, pairs, element=element).total()
        below = 0.0
        for kind in ("prefill", "decode"):
            batch = [(query, context) for _, k, query, context in entries if k == kind]
            flops = step_cost(config, batch).total().flops / 1e6 if batch else 0.0
            _bar(upper, x, flops, below, PALETTE[kind], HATCHES.get(kind, ""))
            below += flops
        highest = max(highest, below)
        _bar(lower, x, whole.weight_bytes / 1e6, 0, PALETTE["free"], "")
        _bar(lower, x, whole.kv_bytes / 1e6, whole.weight_bytes / 1e6, PALETTE["cached"], "")
    upper.set_ylim(top=1.08 * highest)
    label_axes(upper, title=title, x="", y="arithmetic (MFLOP)")
    label_axes(lower, title="", x="engine step", y="read and written (MB)")
    lower.set_xticks(range(1, len(steps) + 1))
    _legend(
        figure,
        patch("prefill", PALETTE["prefill"]),
        patch("decode", PALETTE["decode"], HATCHES["decode"], "white"),
        patch("weights", PALETTE["free"]),
        patch("keys and values", PALETTE["cached"]),
    )
    return figure


def draw_ticks(events: Iterable[Event], *, title: str) -> Figure:
    """When each token of each request came, in milliseconds since the first request arrived."""
    times = token_times(events)
    origin = min(arrival for arrival, _ in times.values())
    colours = request_colours(times)
    figure = new_figure(8.0, 1.6 + 0.5 * len(times))
    axes = figure.subplots()
    for y, (name, (arrival, drawn)) in enumerate(times.items()):
        x = [(time - origin) * 1e3 for time in drawn]
        first = (arrival - origin) * 1e3
        axes.plot([first, x[0]], [y, y], color=PALETTE["prefill"], linewidth=7, zorder=1)
        axes.plot([x[0], x[-1]], [y, y], color="black", linewidth=1, zorder=1)
        axes.plot(
            x, [y] * len(x), linestyle="", marker="o", markersize=9, color=colours[name],
            markeredgecolor="black",
        )  # fmt: skip
    axes.set_ylim(len(times) - 0.5, -0.5)
    axes.set_yticks(range(len(times)), list(times))
    axes.set_xlabel("time since arrival (ms)")
    axes.set_ylabel("request")
    finish(figure, axes, title, [])
    figure.legend(
        handles=[
            patch("time to the first token", PALETTE["prefill"]),
            *(patch(f"tokens of {name}", colour) for name, colour in colours.items()),
        ],
        loc="outside lower center", ncols=4, fontsize=9, frameon=False,
    )  # fmt: skip
    return figure


def draw_times(
    series: Sequence[Series], *, title: str, x: str, y: str, log: bool = False
) -> Figure:
    """Measured points between two predictions: the roofline's floor, and floor plus fixed price."""
    figure = new_figure(7.6, 4.2)
    axes = figure.subplots()
    for one, (colour, marker, _) in zip(series, _WAYS, strict=True):
        kinds = ("floor", "predicted", "measured")
        ms = {kind: [t * 1e3 for t in getattr(one, kind)] for kind in kinds}
        axes.plot(one.x, ms["floor"], color=colour, linestyle=":", label=f"{one.name}: floor")
        axes.plot(one.x, ms["predicted"], color=colour, label=f"{one.name}: predicted")
        axes.plot(
            one.x, ms["measured"], color=colour, linestyle="", marker=marker, markersize=6,
            label=f"{one.name}: measured",
        )  # fmt: skip
    if log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = list(series[0].x)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    else:
        axes.set_ylim(bottom=0)
    label_axes(axes, title=title, x=x, y=y)
    axes.legend(fontsize=9, frameon=False, ncols=len(series))
    return figure


def saved_view(prompt: int, output: int) -> str:
    """SVG for the widget: FLOPs without and with a cache, and the KV bytes that buys it."""
    naive = total_flops(LLAMA_8B, generation_passes(prompt, output, cached=False))
    cached = total_flops(LLAMA_8B, generation_passes(prompt, output, cached=True))
    kept = kv_bytes_per_token(LLAMA_8B) * (prompt + output - 1)
    rows = [
        ("without a cache", 1.0, f"{naive / 1e12:,.1f} TFLOP", PALETTE["waiting"]),
        ("with a cache", cached / naive, f"{cached / 1e12:,.1f} TFLOP", PALETTE["prefill"]),
    ]
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 132" width="640" role="img"'
        ' font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="13">',
        f"<title>{prompt} tokens given, {output} wanted: {naive / cached:,.1f} times the "
        "arithmetic without a cache</title>",
        '<rect width="640" height="132" fill="#FFFFFF"/>',
    ]
    for row, (name, share, text, colour) in enumerate(rows):
        y, width = 10 + 36 * row, max(1, round(330 * share))
        lines.append(f'<text x="8" y="{y + 17}" fill="#111111">{name}</text>')
        lines.append(
            f'<rect x="130" y="{y}" width="{width}" height="24" fill="{colour}" stroke="#111111"/>'
        )
        lines.append(f'<text x="{140 + width}" y="{y + 17}" fill="#111111">{text}</text>')
    lines.append(
        f'<text x="8" y="100" fill="#111111">The cache saves {naive / cached:,.1f}× and keeps '
        f"{kept / 1e6:,.0f} MB of keys and values.</text>"
    )
    lines.append(
        '<text x="8" y="120" fill="#444444">Llama 3.1 8B in bfloat16, modelled: '
        f"{prompt:,} tokens given, {output:,} wanted.</text></svg>"
    )
    return "\n".join(lines)


def _box(axes: Axes, x: float, y: float, colour: str, hatch: str) -> None:
    from matplotlib.patches import Rectangle

    edge = "white" if hatch == HATCHES["decode"] else "#777777"
    corner = (x - 0.45, y - 0.45)
    axes.add_patch(
        Rectangle(corner, 0.9, 0.9, facecolor=colour, edgecolor=edge, hatch=hatch, linewidth=0.5)
    )


def _bar(axes: Axes, x: float, height: float, bottom: float, colour: str, hatch: str) -> None:
    edge = "white" if hatch else "black"
    axes.bar(x, height, bottom=bottom, color=colour, hatch=hatch, edgecolor=edge, linewidth=0.5)


def _legend(figure: Figure, *entries: object) -> None:
    figure.legend(
        handles=list(entries), loc="outside lower center", ncols=4, fontsize=9, frameon=False
    )
