"""The same decode step as kernels that are launched one after the other, for the timeline's model.

A kernel starts when all of the one before it has ended (the grid has drained) and the launch gap is
over. It is cut like the megakernel's operation, at most one piece an SM, so that what differs is
what lies between the pieces:

    un-fused  norm → Q K V → RoPE → append → attention → merge → output → residual → norm → gate
              → up → silu·mul → down → residual                                × L → norm → head …
    fused     norm+QKV → RoPE+append → attention → merge → output+residual → norm+gate·up+silu·mul
              → down+residual                                                  × L → norm+head …

"un-fused" is a kernel an operation. Eager PyTorch launches more: an RMS norm written in its
operations is eight kernels in bfloat16.

Real grids have more and smaller blocks, several on an SM at a time; they hide a part of their
overhead that this model charges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from minifer.kernels.mega.isa import DecodeShape, Instruction, Op
from minifer.kernels.mega.schedule import chunks
from minifer.perf.timeline.model import Task, task_of

ELEMENTS = 1024  # of a block of an elementwise kernel


class Kernel(NamedTuple):
    """A launch: the (weights, other) bytes of each of its blocks, from memory or from the cache."""

    name: str
    layer: int
    blocks: list[tuple[float, float]]
    cached: bool = False


def launches(
    shape: DecodeShape,
    num_sms: int,
    context: int,
    *,
    fused: bool,
    weight_bytes: float = 2.0,
    kv_bytes: float = 2.0,
) -> list[list[Task]]:
    """One queue an SM; kernel i waits for all blocks of kernel i − 1.

    context: S, tokens attended to, in each request. weight_bytes, kv_bytes: of one element; what
    un-fused kernels hand to each other has kv_bytes too.
    """
    steps = _step(shape, num_sms, context, fused, weight_bytes, kv_bytes)
    return one_after_another(steps, num_sms)


def one_after_another(kernels: Iterable[Kernel], num_sms: int) -> list[list[Task]]:
    """Block i of every kernel on SM i mod `num_sms`; a kernel waits for all of the one before."""
    queues: list[list[Task]] = [[] for _ in range(num_sms)]
    wait, target = -1, 0
    for signal, kernel in enumerate(kernels):
        for i, (weights, other) in enumerate(kernel.blocks):
            place = (wait, target, signal, 1, kernel.cached)
            task = Task(kernel.name, kernel.layer, weights, other, *place)
            queues[i % num_sms].append(task)
        wait, target = signal, len(kernel.blocks)
    return queues


def _step(
    shape: DecodeShape,
    num_sms: int,
    context: int,
    fused: bool,
    weight_bytes: float,
    kv_bytes: float,
) -> Iterator[Kernel]:
    B, D, F, C = shape.batch, shape.hidden, shape.intermediate, shape.head_dim
    H, K = shape.heads, shape.kv_heads

    def product(name: str, op: Op, layer: int, part: float = 1.0) -> Kernel:
        pieces = chunks(shape.tiles(op), num_sms)
        items = [Instruction(op, layer, begin, end) for begin, end in pieces]
        blocks = [(part * shape.weight_bytes(item, weight_bytes), 0.0) for item in items]
        return Kernel(name, layer, blocks)

    def each(name: str, op: Op, layer: int, count: int) -> Kernel:
        task = task_of(Instruction(op, layer), shape, context, weight_bytes, kv_bytes)
        return Kernel(name, layer, [(0.0, task.other)] * count)

    def elementwise(name: str, layer: int, elements: int, moved: int, blocks: int = 0) -> Kernel:
        """moved: elements read and written, for one of `elements`."""
        count = blocks or min(num_sms, -(-B * elements // ELEMENTS))
        return Kernel(name, layer, [(0.0, B * elements * moved * kv_bytes / count)] * count)

    yield Kernel("EMBED", 0, [(B * D * weight_bytes, 0.0)])
    for layer in range(shape.layers):
        if not fused:
            yield elementwise("norm", layer, D, 2, blocks=B)
        yield product("QKV", Op.QKV, layer)
        yield elementwise("RoPE", layer, (H + K) * C, 2)
        if not fused:
            yield elementwise("append", layer, 2 * K * C, 2)
        yield each("ATTENTION", Op.ATTENTION, layer, B * K * shape.splits)
        if shape.splits > 1:
            yield each("MERGE", Op.MERGE, layer, B * K)
        yield product("OUTPUT", Op.OUTPUT, layer)
        if fused:
            yield product("GATE_UP", Op.GATE_UP, layer)
        else:
            yield elementwise("residual", layer, D, 3)
            yield elementwise("norm", layer, D, 2, blocks=B)
            yield product("gate", Op.GATE_UP, layer, 0.5)
            yield product("up", Op.GATE_UP, layer, 0.5)
            yield elementwise("silu·mul", layer, F, 3)
        yield product("DOWN", Op.DOWN, layer)
        if not fused:
            yield elementwise("residual", layer, D, 3)
    if not fused:
        yield elementwise("norm", shape.layers - 1, D, 2, blocks=B)
    yield product("HEAD", Op.HEAD, 0)
    yield Kernel("PICK", 0, [(0.0, 0.0)])
