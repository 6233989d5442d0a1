"""What a megakernel instruction is: sixteen 32-bit words, ten opcodes, and the memory each touches.

Every program (one a streaming multiprocessor, SM) walks a queue of instructions. One instruction
is a slice of one operation of the decode step: some weight tiles, or one split of one head's
attention. Before it works it waits until a counter has reached a target, afterwards it adds to a
counter; there is no other synchronisation.

    EMBED → [ QKV → ATTENTION → MERGE → OUTPUT → GATE_UP → DOWN ] × L → HEAD → PICK

`regions` is the single source of truth about memory: the verifier proves with it, the reference
machine and the co-simulator check it against what is really touched. All buffers are matrices
[rows, columns]; B rows are the requests of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

WORDS = 16  # of an instruction, int32; the last six are spare and zero
COUNTER_STRIDE = 32  # int32 between two counters: 128 bytes, so that no two share a cache line


class Op(IntEnum):
    """HALT ends a queue. NOTHING only waits and signals: an arrival at a grid barrier."""

    HALT = 0
    EMBED = 1  # x ← E[token]
    QKV = 2  # norm, q k v rows, RoPE, append k and v to the paged cache
    ATTENTION = 3  # one split of one KV head's attention for one request
    MERGE = 4  # the splits of one KV head's query heads → attention output
    OUTPUT = 5  # x ← x + W_o · attention
    GATE_UP = 6  # norm, gate and up rows, silu(gate) · up
    DOWN = 7  # x ← x + W_down · hidden
    HEAD = 8  # norm, logits, and the best of them
    PICK = 9  # the best of the bests → next token
    NOTHING = 10


class Instruction(NamedTuple):
    """The words in their order.

    begin, end: weight tiles (EMBED, PICK: unused; MERGE, ATTENTION: begin is the KV head).
    row: the request of ATTENTION and MERGE. split: of ATTENTION; HEAD: its slot among the bests.
    wait: counter to wait for, −1 for none, until it is ≥ target. signal: counter to add `amount`
    to, −1 for none.
    """

    op: int
    layer: int = 0
    begin: int = 0
    end: int = 0
    row: int = 0
    split: int = 0
    wait: int = -1
    target: int = 0
    signal: int = -1
    amount: int = 0

    def words(self) -> list[int]:
        """Sixteen numbers, as the kernel reads them."""
        return [int(word) for word in self] + [0] * (WORDS - len(self))

    @classmethod
    def decode(cls, words: list[int]) -> Instruction:
        """The inverse of `words`. Raises `ValueError` for an unknown opcode or a wrong length."""
        if len(words) != WORDS:
            raise ValueError(f"an instruction has {WORDS} words, got {len(words)}")
        return cls(Op(words[0]), *words[1 : len(cls._fields)])


@dataclass(frozen=True)
class DecodeShape:
    """Everything about a decode step that its schedule and its compiled kernel depend on.

    Letters of the glossary: L layers, D hidden, F intermediate, H heads, K kv_heads, C head_dim,
    V vocab. batch: B requests a step. splits: parts of a context that are attended to at once, S in
    this package (and not the context). tile: rows of a weight tile. Raises `ValueError` for sizes
    that no schedule can cover.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    batch: int = 1
    splits: int = 1
    tile: int = 16

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.batch > 16:
            raise ValueError(f"batch must be at most 16 for a megakernel, got {self.batch}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads={self.kv_heads}")
        for name in ("hidden", "intermediate", "head_dim", "vocab"):
            if getattr(self, name) % self.tile:
                raise ValueError(
                    f"{name} must be a multiple of tile={self.tile}, got {getattr(self, name)}"
                )
        for name in ("tile", "splits"):
            if getattr(self, name) & (getattr(self, name) - 1):
                raise ValueError(f"{name} must be a power of two, got {getattr(self, name)}")
        if self.tile < 2:
            raise ValueError("tile must be at least 2, both halves of a RoPE pair, got 1")

    @property
    def group(self) -> int:
        """G, query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def qkv_rows(self) -> int:
        """(H + 2 K) · C, rows of W_qkv."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def tiles(self, op: Op) -> int:
        """Weight tiles of an operation in one layer; 0 for what has no weights."""
        rows = {
            Op.QKV: self.qkv_rows,
            Op.OUTPUT: self.hidden,
            Op.GATE_UP: self.intermediate,
            Op.DOWN: self.hidden,
            Op.HEAD: self.vocab,
        }
        return rows.get(op, 0) // self.tile

    def qkv_columns(self, tile: int) -> tuple[range, range]:
        """The rows of W_qkv in a tile: half of them from the first half of a head, half from the
        second, because RoPE turns row i of a head together with row i + C/2."""
        head, part = divmod(tile, self.head_dim // self.tile)
        half = self.tile // 2
        first = head * self.head_dim + part * half
        second = first + self.head_dim // 2
        return range(first, first + half), range(second, second + half)

    def weight_bytes(self, item: Instruction, element: float = 2.0) -> float:
        """Bytes of weights an instruction reads."""
        op, tiles = Op(item.op), item.end - item.begin
        width = {
            Op.QKV: self.hidden,
            Op.OUTPUT: self.heads * self.head_dim,
            Op.GATE_UP: 2 * self.hidden,
            Op.DOWN: self.intermediate,
            Op.HEAD: self.hidden,
        }
        if op is Op.EMBED:
            return self.batch * self.hidden * element
        return tiles * self.tile * width.get(op, 0) * element


class Region(NamedTuple):
    """Rows [first_row, last_row) × columns [start, stop) of a buffer."""

    buffer: str
    first_row: int
    last_row: int
    start: int
    stop: int

    def overlaps(self, other: Region) -> bool:
        return (
            self.buffer == other.buffer
            and self.first_row < other.last_row
            and other.first_row < self.last_row
            and self.start < other.stop
            and other.start < self.stop
        )

    def intersection(self, other: Region) -> Region:
        """What both cover, if they overlap."""
        first, last = max(self.first_row, other.first_row), min(self.last_row, other.last_row)
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Region(self.buffer, first, last, start, stop)


def buffers(shape: DecodeShape, head_slots: int) -> dict[str, tuple[int, int]]:
    """Name → [rows, columns] of everything that instructions hand to each other.

    `K3`, `V3` are what this step appends to layer 3's cache: B new tokens of K · C numbers,
    wherever the block tables put them. What is older is only read. INDEX is the number of the
    output token, which the noise of a draw depends on.
    """
    B, H, C = shape.batch, shape.heads, shape.head_dim
    caches = {f"{kind}{i}": (B, shape.kv_heads * C) for i in range(shape.layers) for kind in "KV"}
    return {
        "EPOCH": (1, 1),
        "TOKEN": (B, 1),
        "POSITION": (B, 1),
        "INDEX": (B, 1),
        "X": (B, shape.hidden),
        "Q": (B, H * C),
        **caches,
        "PART_OUT": (B, H * shape.splits * C),
        "PART_LSE": (B, H * shape.splits),
        "ATTENDED": (B, H * C),
        "HIDDEN": (B, shape.intermediate),
        "LOGITS": (B, shape.vocab),
        "BEST": (B, head_slots),
        "BEST_ID": (B, head_slots),
    }


def regions(item: Instruction, shape: DecodeShape) -> tuple[list[Region], list[Region]]:
    """What an instruction reads and what it writes, of `buffers`."""
    op, B = Op(item.op), shape.batch
    C, S, G = shape.head_dim, shape.splits, shape.group
    begin, end = item.begin * shape.tile, item.end * shape.tile

    def every(name: str, start: int, stop: int) -> Region:
        return Region(name, 0, B, start, stop)

    epoch = Region("EPOCH", 0, 1, 0, 1)
    reads, writes = [epoch], []
    x, tile_of_x = every("X", 0, shape.hidden), every("X", begin, end)
    if op is Op.EMBED:
        reads += [every("TOKEN", 0, 1), every("POSITION", 0, 1)]
        writes += [x]
    elif op is Op.QKV:
        reads += [x, every("POSITION", 0, 1)]
        writes += [
            every(name, columns.start, columns.stop) for name, columns in _qkv_targets(item, shape)
        ]
    elif op is Op.ATTENTION:
        row, h = (item.row, item.row + 1), item.begin
        reads += [Region("Q", *row, h * G * C, (h + 1) * G * C), Region("POSITION", *row, 0, 1)]
        reads += [Region(f"{k}{item.layer}", *row, h * C, (h + 1) * C) for k in "KV"]
        heads = range(h * G, (h + 1) * G)
        if S == 1:  # nothing to merge
            writes += [Region("ATTENDED", *row, h * G * C, (h + 1) * G * C)]
        else:
            slots = [head * S + item.split for head in heads]
            writes += [Region("PART_OUT", *row, i * C, (i + 1) * C) for i in slots]
            writes += [Region("PART_LSE", *row, i, i + 1) for i in slots]
    elif op is Op.MERGE:
        row, first, last = (item.row, item.row + 1), item.begin * G, (item.begin + 1) * G
        reads += [Region("PART_OUT", *row, first * S * C, last * S * C)]
        reads += [Region("PART_LSE", *row, first * S, last * S)]
        writes += [Region("ATTENDED", *row, first * C, last * C)]
    elif op is Op.OUTPUT:
        reads += [every("ATTENDED", 0, shape.heads * C), tile_of_x]
        writes += [tile_of_x]
    elif op is Op.GATE_UP:
        reads += [x]
        writes += [every("HIDDEN", begin, end)]
    elif op is Op.DOWN:
        reads += [every("HIDDEN", 0, shape.intermediate), tile_of_x]
        writes += [tile_of_x]
    elif op is Op.HEAD:
        reads += [x, every("INDEX", 0, 1)]
        slot = (item.split, item.split + 1)
        writes += [every("LOGITS", begin, end), every("BEST", *slot), every("BEST_ID", *slot)]
    elif op is Op.PICK:
        reads += [every("BEST", 0, item.end), every("BEST_ID", 0, item.end)]
        state = [every("POSITION", 0, 1), every("INDEX", 0, 1)]
        reads += state
        writes += [every("TOKEN", 0, 1), *state, epoch]
    return reads, writes


def _qkv_targets(item: Instruction, shape: DecodeShape) -> Iterator[tuple[str, range]]:
    """Where the rows of a QKV instruction's tiles go: buffer and columns."""
    queries = shape.heads * shape.head_dim
    keys = queries + shape.kv_heads * shape.head_dim
    for tile in range(item.begin, item.end):
        for rows in shape.qkv_columns(tile):
            if rows.start < queries:
                yield "Q", rows
            elif rows.start < keys:
                yield f"K{item.layer}", range(rows.start - queries, rows.stop - queries)
            else:
                yield f"V{item.layer}", range(rows.start - keys, rows.stop - keys)
