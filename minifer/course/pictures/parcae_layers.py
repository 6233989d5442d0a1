"""A loop model's layers and its KV slots as boxes: stored once, run many times."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minifer.course.figures import HATCHES, PALETTE, finish, new_figure, patch
from minifer.loops import LoopConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ONCE, LOOPED, AGAIN = PALETTE["waiting"], PALETTE["prefill"], PALETTE["decode"]


def runs(loop: LoopConfig, num_loops: int) -> list[tuple[int, int | None]]:
    """(layer, iteration) of every layer that a token passes, in order; None outside the core."""
    P, R = loop.prelude, loop.core
    before: list[tuple[int, int | None]] = [(i, None) for i in range(P)]
    core = [(P + j, t) for t in range(num_loops) for j in range(R)]
    return [*before, *core, *((P + R + i, None) for i in range(loop.coda))]


def slot_table(loop: LoopConfig, num_loops: int) -> list[list[tuple[int, bool] | None]]:
    """A row a layer, a column an iteration: (KV slot it attends to, does it write there?).

    Prelude and coda stand in the first and in the last column.
    """
    loop = replace(loop, max_num_loops=num_loops)
    table: list[list[tuple[int, bool] | None]] = []
    for layer in range(loop.num_layers):
        row: list[tuple[int, bool] | None] = [None] * num_loops
        offset = layer - loop.prelude
        if offset < 0:
            row[0] = (layer, True)
        elif offset < loop.core:
            for t in range(num_loops):
                row[t] = (loop.core_slot(t) + offset, loop.policy.writes(t))
        else:
            row[-1] = (loop.coda_slot + offset - loop.core, True)
        table.append(row)
    return table


def unrolled_figure(loop: LoopConfig, num_loops: int, *, title: str) -> Figure:
    """Every layer a token passes as a box, named by the weights that it uses."""
    passed = runs(loop, num_loops)
    figure = new_figure(min(11.0, 1.0 + 0.5 * len(passed)), 2.2)
    axes = figure.subplots()
    for x, (layer, t) in enumerate(passed):
        looped = t is not None
        # The first iteration is drawn full, the others hatched: the same weights once more.
        face = ONCE if not looped else (LOOPED if t == 0 else "white")
        hatch = HATCHES["cached"] if looped and t else ""
        _box(axes, x, 0, face, hatch, LOOPED if looped else "black")
        axes.text(x, -0.75, str(layer), ha="center", va="center", fontsize=9)
        if looped and layer == loop.prelude:
            axes.text(x - 0.45, 0.75, f"t = {t}", ha="left", va="center", fontsize=9)
    axes.set_xlim(-0.7, len(passed) - 0.3)
    axes.set_ylim(-1.1, 1.1)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel("the layers a token passes, in order; below each box whose weights it uses")
    legend = [
        patch("runs once", ONCE),
        patch("core, first time", LOOPED),
        patch("core, the same weights again", "white", HATCHES["cached"], LOOPED),
    ]
    finish(figure, axes, title, legend)
    return figure


def slots_figure(
    loop: LoopConfig, num_loops: int, policies: Sequence[str], *, title: str
) -> Figure:
    """A picture a policy: which KV slot each layer attends to at each iteration."""
    figure = new_figure(min(11.0, 1.2 + 0.62 * num_loops * len(policies)), 3.4)
    plots = figure.subplots(1, len(policies), squeeze=False)[0]
    for axes, policy in zip(plots, policies, strict=True):
        chosen = replace(loop, kv_policy=policy, max_num_loops=num_loops)
        seen: set[int] = set()
        for y, row in enumerate(slot_table(chosen, num_loops)):
            for x, cell in enumerate(row):
                if cell is None:
                    continue
                slot, writes = cell
                core = loop.prelude <= y < loop.prelude + loop.core
                face = ONCE if not core else LOOPED
                hatch, ink = "", "white" if core else "black"
                if core and not writes:
                    face, hatch, ink = "white", HATCHES["cached"], "black"
                elif core and slot in seen:
                    face = AGAIN
                seen.add(slot)
                _box(axes, x, y, face, hatch, LOOPED if face == "white" else "white")
                background = {"facecolor": face, "edgecolor": "none", "pad": 1.0}
                axes.text(x, y, str(slot), ha="center", va="center", fontsize=10, color=ink,
                          bbox=background)  # fmt: skip
        axes.set_xlim(-0.6, num_loops - 0.4)
        axes.set_ylim(loop.num_layers - 0.4, -0.6)
        axes.set_xticks(range(num_loops), [str(t) for t in range(num_loops)])
        axes.set_yticks(range(loop.num_layers), [str(i) for i in range(loop.num_layers)])
        axes.set_title(f"{policy}: {chosen.num_kv_slots} slots", fontsize=10)
        axes.set_xlabel("iteration", fontsize=10)
        axes.tick_params(labelsize=9, length=0)
        for side in ("top", "right", "left", "bottom"):
            axes.spines[side].set_visible(False)
    plots[0].set_ylabel("layer", fontsize=10)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    legend = [
        patch("runs once", ONCE),
        patch("writes a slot of its own", LOOPED),
        patch("overwrites", AGAIN),
        patch("reads, writes nothing", "white", HATCHES["cached"], LOOPED),
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    return figure


def _box(axes: Axes, x: float, y: float, face: str, hatch: str, edge: str) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(
        Rectangle((x - 0.42, y - 0.42), 0.84, 0.84, facecolor=face, hatch=hatch, edgecolor=edge)
    )
