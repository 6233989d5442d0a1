"""Tile sizes of the megakernel, on a GPU and in the interpreter, and its compile-time constants.

Not measured on a GPU yet: chosen by the bytes that must be on their way, and by what the compiler
makes of them (registers, shared memory).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from minifer.kernels.mega.isa import DecodeShape
from minifer.kernels.mega.schedule import Schedule

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@dataclass(frozen=True)
class Tiles:
    """Sizes of tiles, and how the kernel is compiled.

    rows, block_k (ROWS, BK): of a weight tile. slices (SLICES): parts its columns are cut into, one
    a warp, 0 for one request. block_t (BT): positions of an attention tile. group (GP): the query
    heads of a KV head, padded. pad: to how many columns a batch is filled up for tensor cores, at
    least."""

    rows: int
    block_k: int
    slices: int
    block_t: int
    group: int
    warps: int = 8
    stages: int = 4
    pad: int = 8

    @classmethod
    def for_gpu(
        cls, shape: DecodeShape, dtype: torch.dtype, stages: int = 4, hip: bool = False
    ) -> Tiles:
        """16 KiB of 16-bit weights a tile, three of them on their way: what an SM must have in
        flight to be as fast as its share of the memory (Little's law). stages: see `stages_for`."""
        block_k = 512 if dtype.itemsize == 2 else 256
        slices = 0 if shape.batch == 1 else 8
        group = max(16, triton.next_power_of_2(shape.group))
        return cls(shape.tile, block_k, slices, 64, group, 8, stages, 16 if hip else 8)

    @classmethod
    def for_interpreter(cls, shape: DecodeShape, schedule: Schedule) -> Tiles:
        """As much as an instruction has, within reason: an operation costs some 40 µs, and a
        nanosecond an element."""
        lengths = [item.end - item.begin for queue in schedule.queues for item in queue]
        tiles = max([1, *lengths])
        rows = min(triton.next_power_of_2(tiles * shape.tile), 256)
        block_k = min(triton.next_power_of_2(shape.hidden), 256)
        group = triton.next_power_of_2(shape.group)
        return cls(rows, block_k, 0 if shape.batch == 1 else 1, 128, group, 1, 1, 2)


def stages_for(device: torch.device) -> int:
    """Tiles on their way, and one more: what a program's shared memory has room for."""
    if torch.version.hip:
        return 2  # 64 KiB
    capability = torch.cuda.get_device_capability(device)
    return {8: 3 if capability[1] == 0 else 2, 9: 4, 10: 4}.get(capability[0], 2)


def constants(
    shape: DecodeShape,
    tiles: Tiles,
    dtype: torch.dtype,
    cache: torch.dtype,
    eps: float,
    block_size: int,
    head_slots: int,
    interpreted: bool,
) -> dict[str, Any]:
    """The kernel's constants up to its switches, in its order."""
    B = shape.batch
    return {
        "DTYPE": TRITON_DTYPES[dtype],
        "CACHE_DTYPE": TRITON_DTYPES[cache],
        "DOT": tl.float32 if interpreted else TRITON_DTYPES[dtype],
        "EPS": eps,
        "B": B,
        "BP": 1 if B == 1 else max(tiles.pad, triton.next_power_of_2(B)),
        "L": shape.layers,
        "D": shape.hidden,
        "F": shape.intermediate,
        "H": shape.heads,
        "K": shape.kv_heads,
        "C": shape.head_dim,
        "V": shape.vocab,
        "S": shape.splits,
        "P": block_size,
        "HEAD_SLOTS": head_slots,
        "TILE": shape.tile,
        "ROWS": tiles.rows,
        "BK": tiles.block_k,
        "SLICES": tiles.slices,
        "BT": tiles.block_t,
        "GP": tiles.group,
        "CP": triton.next_power_of_2(shape.head_dim),
        "SLOTS": triton.next_power_of_2(head_slots),
        "STAGES": tiles.stages,
    }
