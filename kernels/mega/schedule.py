"""Who does what, when: a decode step cut into instructions and dealt to the queues of the SMs.

`build` lists the instructions in an order in which one program could run them; `assign` deals them
out. Every wait is *all-join*: its target is the sum of everything that signals the counter, so it
never depends on who comes first.

Whatever the policy, the queues together keep one topological order of the graph: then no program
waits for what stands behind it in its own queue, nor does a circle of programs.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minifer.kernels.mega.isa import DecodeShape, Instruction, Op

POLICIES = ("round_robin", "zig_zag", "list", "random")
SYNCS = ("counters", "grid")
Cost = Callable[[Instruction], float]  # seconds an instruction takes on one program


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


def assign(
    graph: Graph,
    num_programs: int,
    policy: str = "round_robin",
    sync: str = "counters",
    cost: Cost | None = None,
    seed: int = 0,
) -> Schedule:
    """Deal the instructions of a step to `num_programs` queues, some of which may stay empty.

    policy: "round_robin" (instruction i to program i mod P), "zig_zag" (there and back again,
    each operation from the other end than the one before), "list" (whoever is free first takes the
    ready instruction with the longest way to go, in the time of `cost`; None: `byte_cost`), or
    "random" (any topological order, any program: for tests). sync: "counters", or "grid": the
    step as ordinary kernels run it, with a barrier of all programs between two operations.
    Raises `ValueError` for another policy or sync, or num_programs below 1.
    """
    if num_programs < 1:
        raise ValueError(f"num_programs must be at least 1, got {num_programs}")
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    if sync not in SYNCS:
        raise ValueError(f"sync must be one of {', '.join(SYNCS)}, got {sync!r}")
    items = graph.instructions
    if policy == "list":
        placed = _list_schedule(items, num_programs, cost or byte_cost(graph.shape))
    elif policy == "random":
        draw = random.Random(seed)
        order = _random_order(items, draw)
        placed = [(i, draw.randrange(num_programs)) for i in order]
    else:
        placed = [(i, i % num_programs) for i in range(len(items))]
        if policy == "zig_zag":
            placed = _zig_zag(graph, num_programs)
    if sync == "grid":
        return _with_barriers(graph, num_programs, placed)
    queues: list[list[Instruction]] = [[] for _ in range(num_programs)]
    for i, program in placed:
        queues[program].append(items[i])
    return Schedule(graph.shape, tuple(map(tuple, queues)), graph.counters, graph.head_slots)


def byte_cost(
    shape: DecodeShape,
    bytes_per_second: float = 3.35e12 / 132,
    overhead: float = 1.2e-6,
    context: int = 1024,
) -> Cost:
    """Modelled, not measured: bytes an instruction reads from memory ÷ bandwidth + `overhead`.

    bytes_per_second: of one program; the default is an H100's share (3.35 TB/s, NVIDIA's
    datasheet, by 132 SMs). overhead: seconds to fetch, wait and signal. context: tokens that every
    request attends to. Weights and cache have 2 bytes an element, partial results 4.
    """

    def seconds(item: Instruction) -> float:
        if item.op == Op.ATTENTION:
            num_bytes = 4.0 * shape.head_dim * context / shape.splits
        elif item.op == Op.MERGE:
            num_bytes = 4.0 * shape.group * shape.splits * (shape.head_dim + 1)
        else:
            num_bytes = shape.weight_bytes(item)
        return num_bytes / bytes_per_second + overhead

    return seconds


def stage(item: Instruction, shape: DecodeShape) -> int:
    """Which operation of the step this is a part of: 0 EMBED, 1 QKV of layer 0, … PICK last.

    The order in which a model without instructions runs. −1 for HALT and NOTHING.
    """
    if item.op in (Op.HALT, Op.NOTHING):
        return -1
    if item.op == Op.EMBED:
        return 0
    if item.op >= Op.HEAD:
        return 6 * shape.layers + item.op - Op.HEAD + 1
    return 6 * item.layer + item.op - Op.QKV + 1


def _zig_zag(graph: Graph, num_programs: int) -> list[tuple[int, int]]:
    """(instruction, program). An operation of at most P pieces gives nobody two of them, which one
    long zig-zag over all operations would."""
    there = [*range(num_programs), *reversed(range(num_programs))]
    dealt, placed = Counter[int](), []
    for i, item in enumerate(graph.instructions):
        number = stage(item, graph.shape)
        turn = there[dealt[number] % len(there)]
        placed.append((i, num_programs - 1 - turn if number % 2 else turn))
        dealt[number] += 1
    return placed


def _list_schedule(
    items: Sequence[Instruction], num_programs: int, cost: Cost
) -> list[tuple[int, int]]:
    """(instruction, program) in the order of their start.

    List scheduling by the longest remaining path (Graham 1969; Hu 1961): at any time the program
    that is free first takes, of what is ready, the instruction with the longest way to the end.
    """
    seconds = [cost(item) for item in items]
    remaining = _longest_way(items, seconds)
    missing = Counter(item.signal for item in items if item.signal >= 0)
    waiters: dict[int, list[int]] = defaultdict(list)
    for i, item in enumerate(items):
        waiters[item.wait].append(i)
    ready_at: dict[int, float] = defaultdict(float)  # counter → when the last producer ends
    waiting = [(0.0, i) for i in waiters[-1]]  # (when it can start, instruction)
    heapq.heapify(waiting)
    ready: list[tuple[float, int]] = []  # (−way to go, instruction)
    free = [(0.0, program) for program in range(num_programs)]
    placed: list[tuple[int, int]] = []
    clock = 0.0  # whoever was free earlier idled until now: nothing starts before it is ready
    while ready or waiting:
        now, program = heapq.heappop(free)
        now = clock = max(now, clock, 0.0 if ready else waiting[0][0])
        while waiting and waiting[0][0] <= now:
            i = heapq.heappop(waiting)[1]
            heapq.heappush(ready, (-remaining[i], i))
        i = heapq.heappop(ready)[1]
        placed.append((i, program))
        end, signal = now + seconds[i], items[i].signal
        heapq.heappush(free, (end, program))
        if signal >= 0:
            ready_at[signal] = max(ready_at[signal], end)
            missing[signal] -= 1
            if not missing[signal]:
                for j in waiters[signal]:
                    heapq.heappush(waiting, (ready_at[signal], j))
    return placed


def _longest_way(items: Sequence[Instruction], seconds: Sequence[float]) -> list[float]:
    """Seconds from an instruction's start to the end of the step, had everyone a program."""
    way = [0.0] * len(items)
    behind: dict[int, float] = defaultdict(float)  # counter → longest way of those who wait for it
    for i in reversed(range(len(items))):
        way[i] = seconds[i] + behind[items[i].signal]
        if items[i].wait >= 0:
            behind[items[i].wait] = max(behind[items[i].wait], way[i])
    return way


def _random_order(items: Sequence[Instruction], draw: random.Random) -> list[int]:
    """A topological order; every one can come out."""
    missing = Counter(item.signal for item in items if item.signal >= 0)
    ready, order = [i for i, item in enumerate(items) if item.wait < 0], []
    waiters: dict[int, list[int]] = defaultdict(list)
    for i, item in enumerate(items):
        waiters[item.wait].append(i)
    while ready:
        i = ready.pop(draw.randrange(len(ready)))
        order.append(i)
        signal = items[i].signal
        if signal >= 0:
            missing[signal] -= 1
            ready += waiters[signal] if not missing[signal] else []
    return order


def _with_barriers(graph: Graph, num_programs: int, placed: list[tuple[int, int]]) -> Schedule:
    """The same work at the same programs, with a barrier of all of them between operations.

    A program arrives with the last of its instructions, or with NOTHING where it has none: the
    fewest messages a grid barrier can do with.
    """
    work: dict[tuple[int, int], list[Instruction]] = defaultdict(list)  # of (stage, program)
    for i, program in placed:
        work[stage(graph.instructions[i], graph.shape), program].append(graph.instructions[i])
    stages = sorted({number for number, _ in work})
    counters: list[str] = []
    queues: list[list[Instruction]] = [[] for _ in range(num_programs)]
    for number in stages:
        last = number == stages[-1]
        before = len(counters) - 1  # −1: the first operation waits for nobody
        wait = (before, num_programs if counters else 0)
        for program, queue in enumerate(queues):
            parts = work[number, program] or ([] if last else [Instruction(Op.NOTHING)])
            for item in parts:
                arrives = item is parts[-1] and not last
                signal = (before + 1, 1) if arrives else (-1, 0)
                queue.append(Instruction(*item[:6], *wait, *signal))
        if not last:
            counters.append(f"barrier[{len(counters)}]")
    return Schedule(graph.shape, tuple(map(tuple, queues)), tuple(counters), graph.head_slots)
