"""A megakernel's queues, and what its programs did in the co-simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minifer.course.figures import PALETTE, finish, new_figure, patch
from minifer.kernels.mega.isa import Instruction, Op
from minifer.kernels.mega.schedule import Schedule
from minifer.perf.timeline.gantt import KINDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from minifer.kernels.cosim.simulate import CosimResult
    from minifer.kernels.cosim.vector_clocks import Race

COLOURS: dict[Op, str] = {
    Op.QKV: KINDS["QKV"][0],
    Op.ATTENTION: KINDS["attention"][0],
    Op.MERGE: KINDS["attention"][0],
    Op.OUTPUT: KINDS["output"][0],
    Op.GATE_UP: KINDS["gate·up"][0],
    Op.DOWN: KINDS["down"][0],
}
NAMES = {
    "QKV": "QKV",
    "ATTENTION": "attention",
    "MERGE": "merge",
    "OUTPUT": "output",
    "GATE_UP": "gate·up",
    "DOWN": "down",
}


def queues_figure(schedule: Schedule, *, title: str) -> Figure:
    """The queue of every program: what it does, and for which counter it waits first."""
    longest = max(map(len, schedule.queues))
    figure = new_figure(9.5, 1.1 + 0.72 * len(schedule.queues))
    axes = figure.subplots()
    for program, queue in enumerate(schedule.queues):
        for place, item in enumerate(queue):
            _instruction(axes, place, program, item, schedule)
    axes.set_xlim(-0.05, longest + 0.05)
    axes.set_ylim(len(schedule.queues) - 0.02, -0.05)
    rows = range(len(schedule.queues))
    axes.set_yticks([row + 0.45 for row in rows], [f"SM {row}" for row in rows])
    axes.set_xticks([])
    finish(figure, axes, title, [])
    axes.set_xlabel("place in the queue (first line: what it does; second: wait until)")
    return figure


def _instruction(axes: Any, x: float, y: float, item: Instruction, schedule: Schedule) -> None:
    from matplotlib.patches import Rectangle

    op = Op(item.op)
    colour = COLOURS.get(op, "white")
    frame = Rectangle((x + 0.03, y), 0.94, 0.9, facecolor=colour, edgecolor="black", linewidth=0.8)
    axes.add_patch(frame)
    wait = "–" if item.wait < 0 else f"{schedule.counters[item.wait].split('[')[0]} ≥ {item.target}"
    text = f"{NAMES.get(op.name, op.name.lower())}\n{wait}"
    ink = "white" if op is Op.QKV else "black"
    axes.text(x + 0.5, y + 0.45, text, ha="center", va="center", fontsize=9, color=ink)


def interleaving_figure(
    result: CosimResult, schedule: Schedule, race: Race, *, title: str
) -> Figure:
    """What the programs did in the co-simulator, around a race of two instructions. Pale: an
    instruction is open; strong: its program has the baton, so it runs."""
    begun = {(program, place): step for step, program, place in result.begun}
    programs = range(len(schedule.queues))
    ends = {
        (p, i): begun.get((p, i + 1), result.steps) for p, i in begun if i < len(schedule.queues[p])
    }
    pair = [(race.program, race.instruction), (race.other, race.other_instruction)]
    first, last = min(begun[key] for key in pair), max(ends[key] for key in pair)
    room = (last - first) // 4
    first, last = max(0, first - room), min(result.steps, last + room)
    figure = new_figure(9.0, 1.6 + 0.62 * len(programs))
    axes = figure.subplots()
    held = _held(result)
    drawn: set[str] = set()
    for (program, place), end in ends.items():
        start, item = begun[program, place], schedule.queues[program][place]
        if start >= last or end <= first:
            continue
        colour = COLOURS.get(Op(item.op), PALETTE["waiting"])
        drawn.add(colour)
        axes.barh(program, end - start, 0.7, start, color=colour, alpha=0.3)
        parts = [(max(a, start), min(b, end)) for p, a, b in held if p == program]
        bars = [(a, b - a) for a, b in parts if b > a]
        axes.broken_barh(bars, (program - 0.35, 0.7), color=colour)
        if (program, place) in pair:
            axes.barh(program, end - start, 0.7, start, fill=False, edgecolor="black", linewidth=2)
            middle = (max(start, first) + min(end, last)) / 2
            name = Op(item.op).name
            axes.text(middle, program - 0.36, name, ha="center", va="bottom", fontsize=9)
    axes.set_xlim(first, last)
    axes.set_ylim(len(programs) - 0.5, -0.75)
    axes.set_yticks(programs, [f"SM {program}" for program in programs])
    axes.set_xlabel("loads, stores and atomics since the step began")
    legend = [patch(label, colour) for colour, label in KINDS.values() if colour in drawn]
    finish(figure, axes, title, legend)
    return figure


def _held(result: CosimResult) -> list[tuple[int, int, int]]:
    """(program, from, to) in steps: who had the baton."""
    found: list[tuple[int, int, int]] = []
    since = 0
    for step, before, _ in result.hand_overs:
        found.append((before, since, step))
        since = step
    last = result.hand_overs[-1][2] if result.hand_overs else 0
    return [*found, (last, since, result.steps)]
