"""Requests on shuffled blocks in memory that is NaN wherever nothing was written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from kernel_helpers import Poison, random_tensor
from torch import Tensor


class Requests(NamedTuple):
    """The tensor arguments of `flash_attention`, in its order."""

    query: Tensor  # [T, H, C], a view of a wider product
    key_cache: Tensor  # [N, P, K, C]
    value_cache: Tensor
    block_tables: Tensor  # [B, max blocks], padded with a block of NaN
    query_start: Tensor  # [B + 1]
    seq_lens: Tensor  # [B]

    def fine(self) -> Requests:
        """The same in float64."""
        return Requests(*(t.double() if t.is_floating_point() else t for t in self))


def requests(
    memory: Poison,
    batch: Sequence[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    C: int = 8,
    P: int = 4,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
) -> Requests:
    """batch: (queries, context) of each request; the queries are the last of the context."""
    needed = [-(-context // P) for _, context in batch]
    N = sum(needed) + 2
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1)).tolist()
    nobody, free = order[0], order[1:]
    keys, values = (torch.full((N, P, kv_heads, C), torch.nan, dtype=dtype) for _ in "kv")
    tables = torch.full((len(batch), max(needed)), nobody)
    for b, (_, context) in enumerate(batch):
        table, free = free[: needed[b]], free[needed[b] :]
        tables[b, : needed[b]] = torch.tensor(table, dtype=torch.int64)
        slots = torch.tensor([table[p // P] * P + p % P for p in range(context)])
        for seed, cache in ((2, keys), (3, values)):
            new = random_tensor(context, kv_heads, C, seed=10 * b + seed, scale=scale)
            cache.view(-1, kv_heads, C)[slots] = new.to(dtype)
    counts = torch.tensor([0, *(queries for queries, _ in batch)])
    product = random_tensor(int(counts.sum()), (heads + 3) * C, seed=4, dtype=dtype, scale=scale)
    query = memory.place(product, gap=5).unflatten(-1, (-1, C))[:, :heads]
    caches = [memory.place(cache) for cache in (keys, values)]
    lengths = torch.tensor([context for _, context in batch])
    integers = [memory.place(x) for x in (tables, counts.cumsum(0), lengths)]
    return Requests(query, *caches, *integers)


def forget(made: Requests, window: int) -> Requests:
    """The same with NaN in block 0, which is nobody's, and in all that has left the window."""
    _, P, *_ = made.key_cache.shape
    caches = [torch.cat((cache[:1] * torch.nan, cache)) for cache in made[1:3]]
    tables = made.block_tables + 1
    for b, length in enumerate(made.seq_lens.tolist()):
        queries = int(made.query_start[b + 1] - made.query_start[b])
        gone = torch.arange(max(length - queries - window + 1, 0))
        for cache in caches:
            cache[tables[b, gone // P], gone % P] = torch.nan
    return made._replace(key_cache=caches[0], value_cache=caches[1], block_tables=tables)


def assert_attended(out: Tensor, truth: Tensor, query: Tensor, dot: torch.dtype) -> None:
    """A weighted mean of values of size 1, whose weights are wrong by the rounding of scores."""
    assert torch.isfinite(out).all()
    rounding = max(torch.finfo(query.dtype).eps, torch.finfo(dot).eps)
    allowed = rounding * truth.abs().clamp_min(1.0) + 2e-6 * query.double().abs().amax() ** 2
    worst = ((out.double() - truth).abs() / allowed).max().item()
    assert worst <= 1, f"{worst:.3g} times as far from float64 as it may be"
