"""What programs touch, drawn from the record of a launch (`minifer.course.block_trace`).

A program has a colour, that of its number; a masked lane is hatched. Nothing here runs a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minifer.course.block_trace import SECTOR, Access, Trace
from minifer.course.figures import HATCHES, PALETTE, SERIES, finish, new_figure, patch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SMALL = 9  # points


def programs(trace: Trace) -> list[tuple[int, int, int]]:
    """The programs that touched something, in order."""
    return sorted({access.program for access in trace.accesses}, key=trace.number)


def program_colour(number: int) -> str:
    return SERIES[number % len(SERIES)][0]


def lanes_figure(trace: Trace, tensor: str, *, title: str) -> Figure:
    """A row a program, a column an element: which lane asks for which element of a vector.

    The first load of the tensor by each program. A masked lane points somewhere and asks nothing.
    """
    memory = trace.memories[tensor]
    first = int(memory.tensor.storage_offset())
    rows = [next(trace.select(tensor, "load", place)) for place in programs(trace)]
    size, end = memory.tensor.numel(), max(int(row.offsets.max()) for row in rows) - first + 1
    figure = new_figure(1.8 + 0.62 * max(end, size), 1.7 + 0.55 * len(rows))
    axes = figure.subplots()
    for y, row in enumerate(rows):
        lanes = zip(row.offsets.flatten().tolist(), row.active.flatten().tolist(), strict=True)
        for lane, (offset, active) in enumerate(lanes):
            face = program_colour(y) if active else "white"
            _box(axes, offset - first, y, face, "" if active else HATCHES["waiting"])
            _text(axes, offset - first, y, f"lane {lane}", "white" if active else "black")
    axes.axvline(size - 0.5, color="black", linewidth=2)
    axes.set_xlim(-0.6, end - 0.4)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xticks(range(end))
    axes.set_yticks(range(len(rows)))
    axes.set_xlabel(f"element of {tensor}; it ends at the line")
    axes.set_ylabel("program")
    legend = [patch(f"program {y}", program_colour(y)) for y in range(len(rows))]
    finish(figure, axes, title, [*legend, patch("masked: not read", "white", HATCHES["waiting"])])
    return figure


def sectors_figure(accesses: Mapping[str, Access], *, title: str) -> Figure:
    """The memory of one matrix, a cell a sector of 32 bytes, a panel an access: what it asks for.

    accesses: label → one access to a matrix whose rows are whole sectors.
    """
    figure = new_figure(8.0, 4.2)
    panels = figure.subplots(1, len(accesses), squeeze=False)[0]
    for axes, (label, access) in zip(panels, accesses.items(), strict=True):
        tensor = access.memory.tensor
        wide = tensor.shape[1] * tensor.element_size() // SECTOR
        asked = {int(i) * tensor.element_size() // SECTOR for i in access.touched.tolist()}
        for sector in range(tensor.shape[0] * wide):
            face = PALETTE["prefill"] if sector in asked else PALETTE["free"]
            _box(axes, sector % wide, sector // wide, face, width=0.94)
        axes.set_xlim(-0.5, wide - 0.5)
        axes.set_ylim(tensor.shape[0] - 0.5, -0.5)
        axes.set_xticks(range(wide), [str(i * SECTOR) for i in range(wide)])
        axes.set_xlabel(
            f"byte of the row\n{access.bytes} of {len(asked) * SECTOR:,} bytes are used"
        )
        axes.set_ylabel("row of the matrix")
        axes.set_title(f"{label}: {len(asked)} sectors", fontsize=_SMALL + 1)
        _plain(axes)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    figure.legend(
        handles=[patch("sector asked for", PALETTE["prefill"]), patch("not", PALETTE["free"])],
        loc="outside lower center", ncols=2, fontsize=_SMALL, frameon=False,
    )  # fmt: skip
    return figure


def tile_accesses(trace: Trace, tensor: str, program: int) -> list[Access]:
    """The loads of a matrix by one program, a tile each."""
    return list(trace.select(tensor, "load", (program,)))


def step_figure(trace: Trace, matrix: str, program: int, step: int) -> Figure:
    """A matrix, pale in the colours of the programs that read it; one tile of one program stands
    out, and its masked lanes are hatched."""
    tensor = trace.memories[matrix].tensor
    N, K = tensor.shape
    tile = tile_accesses(trace, matrix, program)[step]
    start = int(tile.offsets[0, 0]) - int(tensor.storage_offset())
    top, left = divmod(start, K)
    rows, columns = tile.offsets.shape
    right, bottom = max(K, left + columns), max(N, top + rows)
    figure = new_figure(1.6 + 0.27 * max(right, 24), 1.9 + 0.27 * max(bottom, 8))
    axes = figure.subplots()
    owners = trace.owners(matrix, "load").tolist()
    for y in range(N):
        for x in range(K):
            _box(axes, x, y, program_colour(owners[y][x]), width=0.94, alpha=0.25)
    for i in range(rows):
        for j in range(columns):
            active = bool(tile.active[i, j])
            face = program_colour(program) if active else "white"
            _box(axes, left + j, top + i, face, "" if active else HATCHES["waiting"], width=0.94)
    axes.set_xlim(-0.6, max(right, 24) - 0.4)
    axes.set_ylim(max(bottom, 8) - 0.4, -0.6)
    axes.set_xticks(range(0, right, 4))
    axes.set_yticks(range(0, bottom, 2))
    axes.set_xlabel(f"column of {matrix}, 0 to {K - 1}")
    axes.set_ylabel("row")
    count = trace.grid[0]
    legend = [patch(f"rows of program {p}", program_colour(p)) for p in range(count)]
    title = f"Program {program}, tile {step}: {_lanes(tile)}"
    finish(figure, axes, title, [*legend, patch("masked", "white", HATCHES["waiting"])])
    return figure


def step_alt(trace: Trace, matrix: str, program: int, step: int) -> str:
    """The figure in words."""
    tensor = trace.memories[matrix].tensor
    tile = tile_accesses(trace, matrix, program)[step]
    places = [int(o) - int(tensor.storage_offset()) for o in tile.touched]
    rows, columns = ({divmod(place, tensor.shape[1])[i] for place in places} for i in (0, 1))
    return (
        f"The matrix of {tensor.shape[0]} rows and {tensor.shape[1]} columns in the colours of "
        f"{trace.grid[0]} programs. Tile {step} of program {program} stands out: rows {min(rows)} "
        f"to {max(rows)}, columns {min(columns)} to {max(columns)}; {_lanes(tile)}."
    )


def _lanes(tile: Access) -> str:
    read = int(tile.active.sum())
    return f"{read} weights are read, {tile.active.numel() - read} lanes are masked"


def attention_map(
    trace: Trace, cache: str, table: Sequence[int], queries: int, rows: int
) -> list[list[str]]:
    """What flash attention computes of each (query, key): "used", "hidden", or "" where no tile is.

    cache: the key cache's name, [N, P, K, C] of one KV head. table: the request's blocks. rows:
    queries of a program. Query t sees keys 0 … t. Keys that a tile covers but does not load stay
    "": only what is read counts.
    """
    keys = trace.memories[cache].tensor
    P, width = keys.shape[1], keys.shape[2] * keys.shape[3]
    position = {block * P + i: n * P + i for n, block in enumerate(table) for i in range(P)}
    grid = [[""] * queries for _ in range(queries)]
    for access in trace.select(cache, "load"):
        slots = {int(offset) // width for offset in access.touched.tolist()}
        for t in range(access.program[0] * rows, min((access.program[0] + 1) * rows, queries)):
            for slot in slots:
                key = position[slot]
                grid[t][key] = "used" if key <= t else "hidden"
    return grid


def attention_figure(grid: Sequence[Sequence[str]], rows: int, *, title: str) -> Figure:
    """The matrix of scores that is never stored: which part of it is computed at all."""
    figure = new_figure(6.2, 5.2)
    axes = figure.subplots()
    faces = {"used": PALETTE["prefill"], "hidden": PALETTE["decode"], "": PALETTE["free"]}
    hatches = {"hidden": HATCHES["decode"]}
    for t, row in enumerate(grid):
        for s, state in enumerate(row):
            _box(axes, s, t, faces[state], hatches.get(state, ""), width=1.0, line=0)
    for start in range(0, len(grid), rows):
        axes.axhline(start - 0.5, color="black", linewidth=1)
        _text(axes, len(grid) + 3.2, start + rows / 2 - 0.5, f"program {start // rows}", "black")
    axes.set_xlim(-0.5, len(grid) + 7)
    axes.set_ylim(len(grid) - 0.5, -0.5)
    axes.set_xticks(range(0, len(grid), 8))
    axes.set_yticks(range(0, len(grid), 8))
    axes.set_xlabel("key (position)")
    axes.set_ylabel("query (position)")
    legend = [
        patch("computed and used", faces["used"]),
        patch("computed, then hidden", faces["hidden"], hatches["hidden"]),
        patch("never computed", faces[""]),
    ]
    finish(figure, axes, title, legend)
    return figure


def blocks_read(trace: Trace, cache: str) -> dict[tuple[int, int], dict[int, int]]:
    """(request, part of its context) → block id → slots read of it, over all KV heads.

    Programs are (request, KV head, part), as in `minifer.kernels.paged_decode`.
    """
    tensor = trace.memories[cache].tensor
    per_block, per_slot = tensor[0].numel(), tensor[0, 0].numel()
    found: dict[tuple[int, int], dict[int, set[int]]] = {}
    for access in trace.select(cache, "load"):
        request, _, part = access.program
        blocks = found.setdefault((request, part), {})
        for offset in access.touched.tolist():
            blocks.setdefault(offset // per_block, set()).add(offset % per_block // per_slot)
    return {
        place: {block: len(slots) for block, slots in sorted(blocks.items())}
        for place, blocks in sorted(found.items())
    }


def blocks_figure(
    read: Mapping[tuple[int, int], Mapping[int, int]],
    names: Sequence[str],
    colours: Mapping[str, str],
    num_blocks: int,
    *,
    title: str,
) -> Figure:
    """A row a part of a context, a column a block of the pool: how many of its slots are read."""
    figure = new_figure(2.4 + 0.55 * num_blocks, 1.6 + 0.5 * len(read))
    axes = figure.subplots()
    labels = []
    for y, ((request, part), blocks) in enumerate(read.items()):
        labels.append(f"{names[request]}, part {part}")
        for block in range(num_blocks):
            slots = blocks.get(block, 0)
            _box(axes, block, y, colours[names[request]] if slots else PALETTE["free"])
            _text(axes, block, y, str(slots) if slots else "", "black")
    axes.set_xlim(-0.6, num_blocks - 0.4)
    axes.set_ylim(len(read) - 0.4, -0.6)
    axes.set_xticks(range(num_blocks))
    axes.set_yticks(range(len(read)), labels)
    axes.set_xlabel("block id in the pool")
    legend = [patch(f"slots that {name}'s programs read", colours[name]) for name in names]
    finish(figure, axes, title, [*legend, patch("not read", PALETTE["free"])])
    return figure


def _box(
    axes: Axes, x: float, y: float, face: str, hatch: str = "", *,
    width: float = 0.9, alpha: float = 1.0, line: float = 0.5,
) -> None:  # fmt: skip
    from matplotlib.patches import Rectangle

    corner, edge = (x - width / 2, y - width / 2), "#666666" if hatch else "white"
    axes.add_patch(
        Rectangle(corner, width, width, facecolor=face, edgecolor=edge, hatch=hatch,
                  alpha=alpha, linewidth=line)
    )  # fmt: skip


def _text(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    axes.text(x, y, text, ha="center", va="center", fontsize=_SMALL, color=colour)


def _plain(axes: Any) -> None:
    axes.tick_params(labelsize=_SMALL, length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
