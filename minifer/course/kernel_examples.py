"""The engine's kernels on small inputs: what the record saw, and how far they are from float64.

Each function runs one kernel twice on the same numbers, in the record and by a plain launch (in
Triton's interpreter, or on a GPU), and compares both results with the slow twin in float64. Seeds
are fixed. Memory that no token owns is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minifer.course.block_program import ENGINE, simulate
from minifer.course.block_trace import Trace
from minifer.course.pictures.decode import scattered_context
from minifer.kernels import flash_attention as flash
from minifer.kernels import paged_decode as paged
from minifer.kernels import rope_append as rope
from minifer.perf.costs import ElementBytes, OpCost

FLOAT32 = ElementBytes(4, 4, 4)


@dataclass(frozen=True)
class Example:
    """record: of the first launch. cost: what the cost model says of the call.

    errors: the largest distance from the slow twin in float64, of both runs, for each row of the
    result; infinite where a row is not finite.
    """

    record: Trace
    cost: OpCost
    errors: Tensor

    @property
    def error(self) -> float:
        return float(self.errors.max())


def rope_append(slots: Sequence[int]) -> Example:
    """Rotation of 2 query heads and 1 KV head of 6, a token a slot, and the append to 4 blocks of
    2 slots. A row of `errors` is a tensor: queries, the key cache, the value cache."""
    T, H, K, C = len(slots), 2, 1, 6
    q, k, v, angle = _normal(1, (T, H, C), (T, K, C), (T, K, C), (T, C // 2))
    given = q, k, v, angle.cos(), angle.sin()

    def run(call: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
        caches = [torch.zeros(4, 2, K, C, dtype=dtype) for _ in range(2)]
        arguments = [x.to(dtype) for x in given]
        return [call(*arguments, *caches, torch.tensor(slots)), *caches]

    truth = run(rope.rope_append_reference, torch.float64)
    traces: list[Trace] = []

    def recorded(*arguments: Any) -> Any:
        ran = simulate(rope.rope_append, *arguments, tiles=rope.Tiles(2, 1))
        traces.append(ran.trace)
        return ran.result

    runs = [run(call, torch.float32) for call in (recorded, rope.rope_append)]
    errors = torch.stack(
        [_distances(torch.stack([got[i] for got in runs]), truth[i]).max() for i in range(3)]
    )
    return Example(traces[0], rope.rope_append_cost(T, H, K, C, element=FLOAT32), errors)


def flash_attention(table: Sequence[int], tile: int = 16, factor: float = 1.0) -> Example:
    """A causal prompt that fills its blocks of 8 tokens, one head of 16; tiles of `tile` queries
    and keys. factor: of the queries, for large scores. A row of `errors` is a token."""
    S, C = 8 * len(table), 16
    q, k, v = _normal(2, (S, 1, C), (max(table) + 1, 8, 1, C), (max(table) + 1, 8, 1, C))
    more = torch.tensor([list(table)]), torch.tensor([0, S]), torch.tensor([S]), C**-0.5
    ran = simulate(
        flash.flash_attention, q * factor, k, v, *more,
        max_query=S, tiles=flash.Tiles(tile, tile, 1, 1),
    )  # fmt: skip
    plain = flash.flash_attention(*_device(q * factor, k, v, *more), max_query=S)
    q64, k64, v64 = q.double() * factor, k.double(), v.double()
    truth = flash.flash_attention_reference(q64, k64, v64, *more)
    errors = _distances(torch.stack([ran.result, plain.cpu()]), truth)
    return Example(
        ran.trace, flash.flash_attention_cost([(S, S)], 1, 1, C, element=FLOAT32), errors
    )


def paged_decode(
    tables: Sequence[Sequence[int]],
    lengths: Sequence[int],
    num_blocks: int,
    block_size: int,
    *,
    num_splits: int = 1,
    extra: int = 0,
    fill: float = torch.nan,
) -> Example:
    """A decode step over block tables, 4 query heads on 2 KV heads of 16. A row of `errors` is a
    request.

    extra: slots that the kernel reads behind each context, a mistake. fill: what lies in slots that
    no token owns.
    """
    H, K, C = 4, 2, 16
    pool = scattered_context(tables, lengths, (num_blocks, block_size, K, C))
    width = max(map(len, tables))
    padded = torch.tensor([list(table) + [0] * (width - len(table)) for table in tables])
    (q,) = _normal(3, (len(lengths), H, C))
    right = torch.tensor(lengths)
    filled = [cache.nan_to_num(fill) for cache in pool]
    given = q, *filled, padded, right + extra, C**-0.5
    ran = simulate(
        paged.paged_decode, *given, num_splits=num_splits, tiles=paged.Tiles(16, 16, 1, 1)
    )
    plain = paged.paged_decode(*_device(*given), num_splits=num_splits)
    q64, k64, v64 = (x.double() for x in (q, *pool))
    truth = paged.paged_decode_reference(q64, k64, v64, padded, right, C**-0.5)
    cost = paged.paged_decode_cost(lengths, H, K, C, num_splits=num_splits, element=FLOAT32)
    errors = _distances(torch.stack([ran.result, plain.cpu()]), truth)
    return Example(ran.launches[0], cost, errors)


def _normal(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def _device(*values: Any) -> list[Any]:
    """Where a plain launch wants its tensors."""
    device = "cuda" if ENGINE == "compiled" else "cpu"
    return [value.to(device) if isinstance(value, Tensor) else value for value in values]


def _distances(runs: Tensor, truth: Tensor) -> Tensor:
    """runs [R, rows, …], truth [rows, …] → the largest distance of each row, float64."""
    distance = (runs.double() - truth).abs().nan_to_num(torch.inf)
    return distance.flatten(2).amax((0, 2))
