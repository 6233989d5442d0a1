"""Who does what, when: a decode step cut into instructions and dealt to the queues of the SMs.

`build` lists the instructions in an order in which one program could run them; `assign` deals them
out. Every wait is *all-join*: its target is the sum of everything that signals the counter, so it
never depends on who comes first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minifer.kernels.mega.isa import DecodeShape, Instruction, Op


@dataclass(frozen=True)
class Schedule:
    """One queue of instructions a program; what `verify` proves and the kernel runs.

    counters: a name each, for messages, such as "qkv[3]". head_slots: HEAD instructions, each of
    which leaves one best token.
    """

    shape: DecodeShape
    queues: tuple[tuple[Instruction, ...], ...]
    counters: tuple[str, ...]
    head_slots: int

    @property
    def num_instructions(self) -> int:
        return sum(map(len, self.queues))

    def packed(self) -> list[list[list[int]]]:
        """[programs, longest queue + 1, WORDS]; every queue ends with HALT."""
        longest = max(map(len, self.queues)) + 1
        halt = Instruction(Op.HALT).words()
        return [
            [item.words() for item in queue] + [halt] * (longest - len(queue))
            for queue in self.queues
        ]


@dataclass(frozen=True)
class Graph:
    """The instructions of a step in a topological order, before anyone is given them."""

    shape: DecodeShape
    instructions: tuple[Instruction, ...]
    counters: tuple[str, ...]
    head_slots: int


def build(shape: DecodeShape, num_programs: int) -> Graph:
    """Cut a decode step for `num_programs` programs: each operation into at most that many pieces.

    Raises `ValueError` for num_programs below 1.
    """
    if num_programs < 1:
        raise ValueError(f"num_programs must be at least 1, got {num_programs}")
    items: list[Instruction] = []
    counters: list[str] = []

    def counter(name: str) -> int:
        counters.append(name)
        return len(counters) - 1

    def tiles(op: Op, layer: int, after: tuple[int, int], name: str) -> tuple[int, int]:
        """All tiles of one operation; returns the counter to wait for, and its target."""
        pieces, signal = chunks(shape.tiles(op), num_programs), counter(name)
        for slot, (begin, end) in enumerate(pieces):
            split = slot if op is Op.HEAD else 0
            items.append(Instruction(op, layer, begin, end, 0, split, *after, signal, 1))
        return signal, len(pieces)

    embedded = counter("embed")
    items.append(Instruction(Op.EMBED, signal=embedded, amount=1))
    after = (embedded, 1)
    for layer in range(shape.layers):
        after = tiles(Op.QKV, layer, after, f"qkv[{layer}]")
        after = _attention(shape, layer, after, items, counter)
        after = tiles(Op.OUTPUT, layer, after, f"output[{layer}]")
        after = tiles(Op.GATE_UP, layer, after, f"gate_up[{layer}]")
        after = tiles(Op.DOWN, layer, after, f"down[{layer}]")
    heads = tiles(Op.HEAD, 0, after, "head")
    items.append(Instruction(Op.PICK, end=heads[1], wait=heads[0], target=heads[1]))
    return Graph(shape, tuple(items), tuple(counters), heads[1])


def _attention(
    shape: DecodeShape,
    layer: int,
    after: tuple[int, int],
    items: list[Instruction],
    counter: Callable[[str], int],
) -> tuple[int, int]:
    """ATTENTION of every request, KV head and split, and MERGE where there are splits."""
    attended = counter(f"attended[{layer}]")
    for row in range(shape.batch):
        for head in range(shape.kv_heads):
            place = (layer, head, head + 1, row)
            signal = attended
            if shape.splits > 1:
                signal = counter(f"splits[{layer},{row},{head}]")
            for split in range(shape.splits):
                items.append(Instruction(Op.ATTENTION, *place, split, *after, signal, 1))
            if shape.splits > 1:
                wait = (signal, shape.splits)
                items.append(Instruction(Op.MERGE, *place, 0, *wait, attended, 1))
    return attended, shape.batch * shape.kv_heads


def chunks(count: int, pieces: int) -> list[tuple[int, int]]:
    """[0, count) in at most `pieces` ranges that differ by at most one in length."""
    pieces = min(count, pieces)
    edges = [i * count // pieces for i in range(pieces + 1)]
    return list(itertools.pairwise(edges))


def assign(graph: Graph, num_programs: int) -> Schedule:
    """Deal round-robin: instruction i goes to program i mod num_programs."""
    queues: list[list[Instruction]] = [[] for _ in range(num_programs)]
    for i, item in enumerate(graph.instructions):
        queues[i % num_programs].append(item)
    return _schedule(graph, queues)


def _schedule(graph: Graph, queues: Sequence[Sequence[Instruction]]) -> Schedule:
    return Schedule(graph.shape, tuple(map(tuple, queues)), graph.counters, graph.head_slots)
