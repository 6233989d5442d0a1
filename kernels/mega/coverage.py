"""Half of the proof: every word of an instruction means something, every piece is done once.

The other half, about order, is `verify.py`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator

from minifer.kernels.mega.isa import DecodeShape, Instruction, Op
from minifer.kernels.mega.schedule import Schedule

_LAYERED = (Op.QKV, Op.ATTENTION, Op.MERGE, Op.OUTPUT, Op.GATE_UP, Op.DOWN)
_TILED = (Op.QKV, Op.OUTPUT, Op.GATE_UP, Op.DOWN, Op.HEAD)
_OPCODES = frozenset(map(int, Op))


def describe(item: Instruction, program: int, place: int) -> str:
    """For messages: "OUTPUT of layer 3, tiles 4…5 (program 17, place 12)"."""
    op = Op(item.op) if item.op in _OPCODES else None
    text = f"opcode {item.op}" if op is None else op.name
    if op in _LAYERED:
        text += f" of layer {item.layer}"
    if op in _TILED:
        text += f", tiles {item.begin}…{item.end - 1}"
    if op is Op.HEAD:
        text += f", slot {item.split}"
    if op in (Op.ATTENTION, Op.MERGE):
        text += f", request {item.row}, KV head {item.begin}"
    if op is Op.ATTENTION:
        text += f", split {item.split}"
    return f"{text} (program {program}, place {place})"


def wrong_words(item: Instruction, schedule: Schedule) -> Iterator[str]:
    """Sentences about what is out of range in one instruction."""
    shape, counters = schedule.shape, len(schedule.counters)
    if item.op not in _OPCODES:
        yield "there is no such opcode"
        return
    op = Op(item.op)
    if op is Op.HALT:
        yield "HALT inside a queue: nothing behind it would run"
    if op in _LAYERED and not 0 <= item.layer < shape.layers:
        yield f"layer must be 0…{shape.layers - 1}, got {item.layer}"
    if op in _TILED and not 0 <= item.begin < item.end <= shape.tiles(op):
        yield f"tiles must be some of 0…{shape.tiles(op) - 1}, got {item.begin}…{item.end - 1}"
    if op in (Op.ATTENTION, Op.MERGE):
        if not 0 <= item.begin < shape.kv_heads or item.end != item.begin + 1:
            yield f"KV head must be one of 0…{shape.kv_heads - 1}, got {item.begin}…{item.end - 1}"
        if not 0 <= item.row < shape.batch:
            yield f"request must be 0…{shape.batch - 1}, got {item.row}"
    if op is Op.ATTENTION and not 0 <= item.split < shape.splits:
        yield f"split must be 0…{shape.splits - 1}, got {item.split}"
    if op is Op.HEAD and not 0 <= item.split < schedule.head_slots:
        yield f"slot must be 0…{schedule.head_slots - 1}, got {item.split}"
    if op is Op.PICK and item.end != schedule.head_slots:
        yield f"must pick from all {schedule.head_slots} slots, picks from {item.end}"
    for field, word in zip(item._fields, item, strict=True):
        if not -(2**31) <= word < 2**31:
            yield f"{field} must fit 32 bits, got {word}"
    words = (("wait", item.wait, "target", item.target),)
    for name, counter, what, number in (*words, ("signal", item.signal, "amount", item.amount)):
        if not -1 <= counter < counters:
            yield f"{name} must be a counter, 0…{counters - 1}, or -1 for none, got {counter}"
        elif counter >= 0 and number < 1:
            yield f"{what} of counter {schedule.counters[counter]} must be at least 1, got {number}"


def coverage_errors(schedule: Schedule) -> Iterator[str]:
    """Each piece of each operation is somebody's, and nobody else's."""
    done: dict[str, list[str]] = defaultdict(list)
    for program, queue in enumerate(schedule.queues):
        for place, item in enumerate(queue):
            for piece in _pieces(item):
                done[piece].append(describe(item, program, place))
    for piece in _whole_step(schedule.shape, schedule.head_slots):
        by = done.pop(piece, [])
        if not by:
            yield f"never done: {piece}: whoever reads it reads memory that nobody has written"
        elif len(by) > 1:
            yield f"done twice: {piece}, by {by[0]} and by {by[1]}"
    for piece, by in done.items():
        yield f"not a part of this step: {piece}, done by {by[0]}"


def _pieces(item: Instruction) -> Iterator[str]:
    """Names of all that an instruction computes."""
    op = Op(item.op)
    if op in (Op.EMBED, Op.PICK):
        yield op.name
    elif op in (Op.ATTENTION, Op.MERGE):
        split = f", split {item.split}" if op is Op.ATTENTION else ""
        where = f"layer {item.layer}, request {item.row}, KV head {item.begin}"
        yield f"{op.name} of {where}{split}"
    elif op in _TILED:
        layer = "" if op is Op.HEAD else f" in layer {item.layer}"
        for tile in range(item.begin, item.end):
            yield f"tile {tile} of {op.name}{layer}"
        if op is Op.HEAD:
            yield f"slot {item.split} of the best tokens"


def _whole_step(shape: DecodeShape, head_slots: int) -> Iterator[str]:
    """The names of all pieces of a decode step."""
    items = [Instruction(Op.EMBED), Instruction(Op.PICK)]
    places = list(itertools.product(range(shape.batch), range(shape.kv_heads)))
    for layer in range(shape.layers):
        for op in _TILED[:-1]:
            items.append(Instruction(op, layer, 0, shape.tiles(op)))
        for row, head in places:
            for split in range(shape.splits):
                items.append(Instruction(Op.ATTENTION, layer, head, head + 1, row, split))
            if shape.splits > 1:
                items.append(Instruction(Op.MERGE, layer, head, head + 1, row))
    for item in items:
        yield from _pieces(item)
    for tile in range(shape.tiles(Op.HEAD)):
        yield f"tile {tile} of HEAD"
    for slot in range(head_slots):
        yield f"slot {slot} of the best tokens"
