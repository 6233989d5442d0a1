"""Pictures of paged KV: the pool with its tokens, three ways to keep memory, what blocks cost.

What they draw comes from `paged_kv_data`, which claims and tests check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from minifer.course.pictures.paged_kv_data import DRAWN, PoolState, Shares

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 4  # blocks side by side in the grid of the pool
_SMALL = 9  # points
_INK = "black"


def pool_figure(state: PoolState) -> Figure:
    """Above, each request's tokens in order, cut into blocks; below, where these blocks lie."""
    P = state.block_size
    rows = -(-state.num_blocks // _COLUMNS)
    figure = new_figure(9.2, 4.9)
    axes = figure.subplots()
    colours = {name: request_colour("ABC".index(name)) for name in state.tables}
    for row, name in enumerate("ABC"):
        y = 2.0 * row
        axes.text(-0.6, y + 0.5, name, ha="right", va="center", fontsize=11, weight="bold")
        for place, block in enumerate(state.tables.get(name, ())):
            x = place * (P + 0.7)
            owners = [colours[holder] for holder in state.holders(block)]
            axes.text(x, y - 0.12, f"block {block}", fontsize=_SMALL, va="bottom")
            text = state.text[name][place * P : (place + 1) * P]
            written = {slot % P for slot in state.written if slot // P == block}
            _block(axes, x, y, text.ljust(P), owners, written)
        if name not in state.tables:
            axes.text(0, y + 0.5, "holds no blocks", fontsize=_SMALL, va="center")
    slots, top = state.slots(), 7.0
    axes.text(-0.6, top + rows * 1.0, "cache", ha="right", va="center", fontsize=11, weight="bold")
    for block in range(state.num_blocks):
        x, y = block % _COLUMNS * (P + 0.7), top + block // _COLUMNS * 2.0
        holders = state.holders(block)
        mark = f"block {block}" + (f": {' + '.join(holders)}" if holders else "")
        axes.text(x, y - 0.12, mark, fontsize=_SMALL, va="bottom")
        here = range(block * P, block * P + P)
        content = [slots.get(slot, " ") for slot in here]
        written = {slot % P for slot in state.written if slot // P == block}
        _block(axes, x, y, "".join(content), [colours[h] for h in holders], written)
        if block in state.cached:
            _box(axes, x, y + 1.0, P, 0.16, PALETTE["cached"])
    width = max(_COLUMNS, *(len(table) for table in state.tables.values()), 5) * (P + 0.7)
    axes.set_xlim(-3.6, width)
    axes.set_ylim(top + rows * 2.0 - 0.6, -1.1)
    axes.set_xticks([])
    axes.set_yticks([])
    legend = [patch(f"token of {n}", c) for n, c in colours.items()]
    legend.append(patch("held, no token yet", "white"))
    legend.append(patch("free", PALETTE["free"]))
    written_now = patch("written in this step", "white")
    written_now.set_linewidth(2)
    legend.append(written_now)
    legend.append(patch("full, can be found", PALETTE["cached"]))
    finish(figure, axes, f"Step {state.step}: in order above, where it lies below", legend)
    return figure


def _block(
    axes: Axes, x: float, y: float, text: str, colours: Sequence[str], written: set[int]
) -> None:
    """One block, a box a slot; more than one colour: shared."""
    for i, character in enumerate(text):
        filled = character != " "
        if not colours:
            _box(axes, x + i, y, 1, 1, PALETTE["free"], edge="white")
            continue
        _box(axes, x + i, y, 1, 1, "white", edge="gray")
        if filled:
            height = 1 / len(colours)
            for k, colour in enumerate(colours):
                _box(axes, x + i, y + k * height, 1, height, colour)
            weight = "bold" if i in written else "normal"
            size = 11 if character == DRAWN else _SMALL
            axes.text(
                x + i + 0.5, y + 0.54, character, ha="center", va="center", fontsize=size,
                weight=weight,
            )  # fmt: skip
    for i in sorted(written) if colours else ():
        if text[i] != " ":
            _box(axes, x + i, y, 1, 1, "none", edge=_INK, line=2.0)
    if colours:
        _box(axes, x, y, len(text), 1, "none", edge=_INK, line=0.8)


def _box(
    axes: Axes,
    x: float,
    y: float,
    wide: float,
    high: float,
    colour: str,
    *,
    edge: str = "none",
    hatch: str = "",
    line: float = 0.5,
) -> None:
    from matplotlib.patches import Rectangle

    box = Rectangle((x, y), wide, high, facecolor=colour, edgecolor=edge, linewidth=line)
    box.set_hatch(hatch)
    axes.add_patch(box)


def reservation_figure(state: PoolState, finals: Mapping[str, int], longest: int) -> Figure:
    """One cache, three ways to hand it out to the requests of `state`; a strip of slots each.

    finals: request id → the tokens whose KV it will have in the end. longest: tokens that a
    reservation without knowledge has to allow for.
    """
    size, P = state.num_blocks * state.block_size, state.block_size
    figure = new_figure(9.2, 3.9)
    axes = figure.subplots()
    names = list(finals)
    for row, kept in enumerate((dict.fromkeys(names, longest), dict(finals))):
        start = 0
        for index, name in enumerate(names):
            if start + kept[name] > size:
                continue
            tokens = len(state.text.get(name, ""))
            colour = request_colour(index)
            _box(axes, start, row, tokens, 0.62, colour, edge=_INK)
            later = finals[name] - tokens
            _box(axes, start + tokens, row, later, 0.62, "white", edge=colour, hatch="////")
            never = kept[name] - finals[name]
            waste = PALETTE["waiting"]
            _box(axes, start + finals[name], row, never, 0.62, waste, edge="white", hatch="....")
            axes.text(start + tokens / 2, row + 0.31, name, ha="center", va="center", fontsize=11)
            start += kept[name]
        _box(axes, start, row, size - start, 0.62, PALETTE["free"], edge="white")
    slots = state.slots()
    for block in range(state.num_blocks):
        holders = state.holders(block)
        for slot in range(block * P, block * P + P):
            if not holders:
                _box(axes, slot, 2, 1, 0.62, PALETTE["free"])
            elif slot in slots:
                height = 0.62 / len(holders)
                for k, name in enumerate(holders):
                    _box(axes, slot, 2 + k * height, 1, height, request_colour(names.index(name)))
            else:
                _box(axes, slot, 2, 1, 0.62, "white")
        _box(axes, block * P, 2, P, 0.62, "none", edge=_INK, line=0.8)
        label = "+".join(holders)
        axes.text(block * P + P / 2, 2.31, label, ha="center", va="center", fontsize=_SMALL)
    axes.set_xlim(0, size)
    axes.set_ylim(2.75, -0.15)
    axes.set_yticks([0.31, 1.31, 2.31], ["the longest", "exact,\nif known", "blocks"], fontsize=10)
    axes.set_xticks(range(0, size + 1, 2 * P))
    axes.set_xlabel("slot of the cache")
    legend = [patch(f"token of {n}", request_colour(i)) for i, n in enumerate(names)]
    legend.append(patch("kept for a later token", "white", "////", "gray"))
    legend.append(patch("will never be used", PALETTE["waiting"], HATCHES["waiting"], "white"))
    legend.append(patch("in nobody's hands", PALETTE["free"]))
    title = f"Step {state.step}: where the longest answer is reserved, one request fills the cache"
    finish(figure, axes, title, legend)
    return figure


def shares_figure(shares: Sequence[Shares]) -> Figure:
    """A bar a policy: what the slots of a full cache are doing, and how many requests share it."""
    figure = new_figure(8.2, 3.5)
    axes = figure.subplots()
    parts = (
        ("stored", "holds a token", PALETTE["cached"], ""),
        ("later", "kept for a later token", "white", "////"),
        ("never", "will never be used", PALETTE["waiting"], HATCHES["waiting"]),
        ("gaps", "too small a gap, or headroom", PALETTE["free"], ""),
    )
    for row, share in enumerate(shares):
        left = 0.0
        for name, _, colour, hatch in parts:
            width = 100 * getattr(share, name)
            _box(axes, left, row, width, 0.66, colour, edge="gray", hatch=hatch)
            left += width
        axes.text(
            100 * share.stored - 1, row + 0.33, f"{100 * share.stored:.0f} %", va="center",
            ha="right", fontsize=10, color="white", weight="bold",
        )  # fmt: skip
        axes.text(101, row + 0.33, f"{share.running:.0f} requests", va="center", fontsize=10)
    axes.set_xlim(0, 118)
    axes.set_ylim(len(shares) - 0.15, -0.15)
    axes.set_yticks([row + 0.33 for row in range(len(shares))], [s.policy for s in shares])
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel("share of the cache's slots (%)")
    legend = [patch(label, colour, hatch, "gray") for _, label, colour, hatch in parts]
    finish(figure, axes, "Blocks fill the cache with tokens; reservations with hopes", legend)
    return figure


def waste_figure(counted: Mapping[int, float]) -> Figure:
    """Empty slots a request against block size: (P - 1) / 2, and as counted in the engine."""
    figure = new_figure(6.6, 3.6)
    axes = figure.subplots()
    sizes = list(counted)
    predicted = [(P - 1) / 2 for P in sizes]
    for label, values, (colour, marker, line) in (
        ("counted in the engine", list(counted.values()), SERIES[0]),
        ("predicted: (P - 1) / 2", predicted, SERIES[1]),
    ):
        axes.plot(
            sizes, values, label=label, color=colour, marker=marker, linestyle=line,
            markerfacecolor="none", markersize=8,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(P) for P in sizes])
    label_axes(
        axes,
        title="Half a block of each request stays empty",
        x="block size P (tokens)",
        y="empty slots a request",
    )
    return figure


# -- predicted and measured


@dataclass(frozen=True)
class AttentionTimes:
    """Seconds of one decode step's attention in one layer. arms: name → seconds, a context each.

    num_bytes: keys and values of each context, read once. fresh_bytes: arm → memory that a call
    got page by page from the operating system, 0 where the system does not count.
    """

    contexts: tuple[int, ...]
    num_bytes: tuple[int, ...]
    arms: Mapping[str, tuple[float, ...]]
    fresh_bytes: Mapping[str, tuple[float, ...]]


def time_attention(
    contexts: Sequence[int],
    block_sizes: Sequence[int] = (16,),
    *,
    requests: int = 1,
    kv_heads: int = 8,
    head_dim: int = 64,
    rounds: int = 12,
) -> AttentionTimes:
    """Dense attention over contiguous KV against the engine's paged attention, on this machine.

    requests: B queries of K heads of C numbers. Blocks are shuffled. Float32; the arms take turns,
    and the fastest of `rounds` counts: a neighbour can only slow one down.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attend

    from minifer.execution.attention import paged_attention
    from minifer.execution.forward_batch import ForwardBatch

    B, K, C, scale = requests, kv_heads, head_dim, head_dim**-0.5
    names = ["dense", *(f"blocks of {P}" for P in block_sizes)]
    found: dict[str, list[float]] = {name: [] for name in names}
    fresh: dict[str, list[float]] = {name: [] for name in names}
    for S in contexts:
        query = torch.randn(B, K, C)
        keys, values = torch.randn(2, B, K, S, C).unbind()

        def dense(q=query, k=keys, v=values) -> None:  # type: ignore[no-untyped-def]
            attend(q[:, :, None], k, v, scale=scale)

        calls: list[Callable[[], object]] = [dense]
        for P in block_sizes:
            blocks = B * -(-S // P)
            cache = torch.randn(2, blocks, P, K, C).unbind()
            tables = torch.randperm(blocks).view(B, -1).tolist()
            batch = ForwardBatch.build(
                [0] * B, [S - 1] * B, [0] * B, list(range(B + 1)), [S] * B, tables, [], P
            )
            _ = batch.decode  # the index is made once a step, for all layers

            def paged(q=query, kv=cache, b=batch) -> None:  # type: ignore[no-untyped-def]
                paged_attention(q, kv[0], kv[1], b, scale)

            calls.append(paged)
        for name, (seconds, pages) in zip(names, _in_turns(calls, rounds), strict=True):
            found[name].append(seconds)
            fresh[name].append(pages)
    num_bytes = tuple(2 * B * S * K * C * 4 for S in contexts)
    return AttentionTimes(
        tuple(contexts),
        num_bytes,
        {name: tuple(values) for name, values in found.items()},
        {name: tuple(values) for name, values in fresh.items()},
    )


def _in_turns(calls: Sequence[Callable[[], object]], rounds: int) -> list[tuple[float, float]]:
    """(seconds, fresh bytes) of each call: the fastest round, the mean over rounds."""
    times: list[list[float]] = [[] for _ in calls]
    fresh = [0.0 for _ in calls]
    for number in range(rounds + 1):  # the first round is not counted
        for index, call in enumerate(calls):
            before, begin = _fresh_bytes(), time.perf_counter()
            call()
            seconds = time.perf_counter() - begin
            if number:
                times[index].append(seconds)
                fresh[index] += (_fresh_bytes() - before) / rounds
    return [(min(mine), pages) for mine, pages in zip(times, fresh, strict=True)]


def _fresh_bytes() -> float:
    """Memory that this process has got page by page so far; 0 where that is not counted."""
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_minflt * resource.getpagesize())


def times_figure(times: AttentionTimes, bandwidths: Sequence[float]) -> Figure:
    """Predicted (lines) and measured (marks): dense reads KV once, a gather moves it three times.

    bandwidths: bytes/s at which this machine reads `times.num_bytes`, one a context.
    """
    figure = new_figure(7.4, 4.0)
    axes = figure.subplots()
    passes = {name: 1 if name == "dense" else 3 for name in times.arms}
    drawn: set[int] = set()
    for (name, seconds), (colour, marker, _) in zip(times.arms.items(), SERIES, strict=False):
        if passes[name] not in drawn:
            drawn.add(passes[name])
            moved = [1e3 * passes[name] * n for n in times.num_bytes]
            floor = [n / rate for n, rate in zip(moved, bandwidths, strict=True)]
            label = f"predicted: KV moved {'once' if passes[name] == 1 else 'three times'}"
            line = "-" if passes[name] == 1 else "--"
            axes.plot(times.contexts, floor, color=colour, linestyle=line, label=label)
        measured = [1e3 * s for s in seconds]
        axes.plot(
            times.contexts, measured, color=colour, marker=marker, linestyle="none",
            label=f"measured: {name}",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(times.contexts, [f"{c:,}" for c in times.contexts])
    label_axes(
        axes,
        title="A gather in torch costs more than the attention it prepares",
        x="context S (tokens)",
        y="attention of one layer (ms)",
    )
    return figure
