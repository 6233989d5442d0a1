"""Attention of a prefill: many queries a request, over the paged cache, scores never in memory.

    out[t] = Σ_s p[t, s] · v[s],   p[t, ·] = softmax(q[t] · k[s] · scale) over the keys t may see

A request's T queries are the last T of its S positions; the first S − T were cached before. Query
at position p sees keys p − window + 1 … p (0 … p without a window). G = H/K query heads share a KV
head.

One program takes BM rows of queries, all G heads of BM/G positions, so that a tile of keys is
read once for the group. It walks over tiles of BN keys and keeps for each row the largest score
so far, the sum of exp(score − largest), and the weighted sum of values; when the largest grows,
both sums are scaled down (https://arxiv.org/abs/2205.14135, section 3.1;
https://arxiv.org/abs/2307.08691). Tiles beyond the last visible key, or before the first, are not
visited. A tile's keys may lie in any blocks: each key looks up its own, so a block can have any
size.

Price: a block lookup for each key, from L1. Products are of 16-bit operands on a GPU, weights p
too, with float32 sums; float32 caches take float32 products, without tensor cores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifer.kernels.aot import NVIDIA, AotCase
from minifer.kernels.checks import check_range, check_same, check_tensor
from minifer.kernels.compat import (
    INTERPRETED,
    launch_dependents,
    launch_options,
    to_dtype,
    wait_for_launcher,
)
from minifer.perf.costs import ElementBytes, OpCost, attended_pairs

HIP = ("gfx942",)
INTEGERS = (torch.int64, torch.int32)
NO_WINDOW = 2**30  # more positions than a context has, and the sum of two fits into 32 bits
DOT_OF = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
LOG2_E = math.log2(math.e)  # exponentials are powers of 2: that is what the hardware has


def flash_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    *,
    max_query: int | None = None,
) -> Tensor:
    """The definition, request by request, in the dtype it is given; arguments and result are those
    of `flash_attention`, and max_query is not needed."""
    _, P, K, _ = key_cache.shape
    out = torch.zeros_like(query)
    for b, S in enumerate(seq_lens.tolist()):
        start, end = query_start[b : b + 2].tolist()
        at = torch.arange(S, device=query.device)
        slots = block_tables[b][at // P].long() * P + at % P
        k, v = (cache.flatten(0, 1)[slots] for cache in (key_cache, value_cache))
        position = torch.arange(S - (end - start), S, device=query.device)[:, None]
        seen = at <= position
        if window is not None:
            seen &= at > position - window
        q = query[start:end].unflatten(1, (K, -1))  # [T, K, G, C]
        scores = torch.einsum("tkgc,skc->kgts", q, k) * scale
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        out[start:end] = torch.einsum("kgts,skc->tkgc", weights, v).flatten(1, 2)
    return out


@triton.jit
def attend(
    q, position, top, total, acc, KEY_CACHE, VALUE_CACHE,
    table, kv_head, key, first, last, window, scale,
    K: tl.constexpr, C: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One tile of keys [BN]: q [BM, WIDTH] of rows at `position` [BM] goes on.

    top, total [BM], acc [BM, WIDTH]: the largest score, the sum of weights, and of weighted values.

    table: pointer to the request's blocks. Keys outside [first, last) are not read: what lies
    there may be NaN, and 0 · NaN is NaN. scale: of scores, times log2 e. WIDTH: C padded.
    """
    column = tl.arange(0, WIDTH)
    there = (key >= first) & (key < last)
    block = tl.load(table + key // P, mask=there, other=0).to(tl.int64)
    start = ((block * P + key % P) * K + kv_head) * C
    inside = there[None, :] & (column < C)[:, None]
    k = tl.load(KEY_CACHE + start[None, :] + column[:, None], mask=inside, other=0.0)
    s = tl.dot(q, k.to(DOT), input_precision="ieee") * scale
    seen = there[None, :] & (key[None, :] <= position[:, None])
    seen &= key[None, :] > position[:, None] - window
    s = tl.where(seen, s, -float("inf"))
    new_top = tl.maximum(top, tl.max(s, 1))
    offset = tl.where(new_top == -float("inf"), 0.0, new_top)  # a row may have seen nothing yet
    p = tl.exp2(s - offset[:, None])
    shrink = tl.exp2(top - offset)
    inside = there[:, None] & (column < C)[None, :]
    v = tl.load(VALUE_CACHE + start[:, None] + column[None, :], mask=inside, other=0.0)
    acc = tl.dot(p.to(DOT), v.to(DOT), acc * shrink[:, None], input_precision="ieee")
    return new_top, total * shrink + tl.sum(p, 1), acc


@triton.jit
def flash_attention_kernel(
    QUERY, KEY_CACHE, VALUE_CACHE, TABLES, QUERY_START, SEQ_LENS, OUT,
    scale, window, table_stride, query_t, query_h,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of queries, KV head, request); a tile beyond the request's queries is empty.
    Row r of a tile is query r // G, head r % G of the group."""
    if PDL:
        launch_dependents()
        wait_for_launcher()
    G: tl.constexpr = H // K
    kv_head, request = tl.program_id(1), tl.program_id(2)
    start = tl.load(QUERY_START + request)
    queries = (tl.load(QUERY_START + request + 1) - start).to(tl.int32)
    length = tl.load(SEQ_LENS + request).to(tl.int32)
    tile_start = tl.program_id(0) * (BM // G)
    if tile_start >= queries:
        return
    row, column = tl.arange(0, BM), tl.arange(0, WIDTH)
    query = tile_start + row // G
    inside = ((row < BM // G * G) & (query < queries))[:, None] & (column < C)[None, :]
    token, head = start.to(tl.int64) + query, kv_head * G + row % G
    pointers = QUERY + (token * query_t + head.to(tl.int64) * query_h)[:, None] + column[None, :]
    q = tl.load(pointers, mask=inside, other=0.0).to(DOT)
    position = length - queries + query

    last = length - queries + tl.minimum(tile_start + BM // G, queries)
    first = tl.maximum(length - queries + tile_start - window + 1, 0)
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, WIDTH], tl.float32)
    table = TABLES + request.to(tl.int64) * table_stride
    for tile in tl.range(first // BN * BN, last, BN):
        top, total, acc = attend(
            q, position, top, total, acc, KEY_CACHE, VALUE_CACHE, table, kv_head,
            tile + tl.arange(0, BN), first, last, window, scale, K, C, P, WIDTH, DOT,
        )  # fmt: skip
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    pointers = OUT + (token * H + head)[:, None] * C + column[None, :]
    tl.store(pointers, to_dtype(out, OUT.dtype.element_ty), mask=inside)


class Tiles(NamedTuple):
    """What the kernel is compiled for."""

    rows: int  # BM: (query, head of the group) pairs of one program
    keys: int  # BN
    num_stages: int
    num_warps: int


def flash_tiles(C: int, group: int, itemsize: int, hip: bool = False) -> Tiles:
    """Two programs fit into an SM's registers, none is spilled. Not measured on a GPU yet.

    Three stages are two looks ahead: at the next tile's blocks, and at the next tile. Products of
    float32 run on ordinary arithmetic, whose operands all lie in registers: 16 rows.
    """
    width, least = head_width(C), triton.next_power_of_2(group)
    if itemsize == 4:
        return Tiles(max(16, least), max(min(2048 // width, 32), 16), 2, 4)
    keys = (2048 if hip else 4096) // width
    return Tiles(max(64, least), max(min(keys, 64), 16), 2 if hip else 3, 4)


def interpreter_tiles(max_query: int, group: int) -> Tiles:
    """Few, big tiles: in the interpreter an operation costs the same whatever its size."""
    rows = min(triton.next_power_of_2(max_query) * triton.next_power_of_2(group), 512)
    return Tiles(max(rows, triton.next_power_of_2(group)), 256, 1, 1)


def head_width(C: int) -> int:
    """C padded: a power of two, and at least 16 as tensor cores want it."""
    return max(triton.next_power_of_2(C), 16)


def attention_dot_dtype(query: Tensor, cache: Tensor) -> tl.dtype:
    """What products are computed in: the operands' 16 bits on a GPU, else float32."""
    if INTERPRETED.value or query.dtype != cache.dtype:
        return tl.float32
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(cache.dtype, tl.float32)


def check_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor
) -> None:
    """What `flash_attention` and `paged_decode` ask of the arguments they share."""
    check_tensor("query", query, [None, None, None], contiguous=False)
    _, H, C = query.shape
    check_range("head dimension of query", C, 1)
    check_tensor("key_cache", key_cache, [None, None, None, C], like=query)
    check_tensor("value_cache", value_cache, key_cache.shape, like=query)
    check_same("dtype", {"key_cache": key_cache.dtype, "value_cache": value_cache.dtype})
    K = key_cache.shape[2]
    if K < 1 or H % K or H < 1:
        raise ValueError(f"heads of query must be a multiple of the cache's {K}, got {H}")
    check_tensor("seq_lens", seq_lens, [None], INTEGERS, like=query)
    rows = [seq_lens.shape[0], None]
    check_tensor("block_tables", block_tables, rows, INTEGERS, like=query, contiguous=False)


def check_window(window: int | None) -> int:
    """The window as kernels take it. Raises `ValueError` for one that sees nothing."""
    if window is None:
        return NO_WINDOW
    check_range("window", window, 1)
    return min(window, NO_WINDOW)


def flash_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    *,
    max_query: int,
    pdl: bool = False,
    tiles: Tiles | None = None,
) -> Tensor:
    """Causal attention of query [T, H, C] over caches [N, P, K, C] → [T, H, C].

    Request b's queries are rows query_start[b] … query_start[b + 1] (query_start [B + 1]); its
    context, with them, is seq_lens[b] positions in blocks block_tables[b] [B, max blocks]. Tables
    and lengths are int32 or int64 and are read on the device. max_query: the most queries of a
    request; rows of a request that has more are not written. window: positions a query sees, its
    own among them; None: all. Raises `ValueError` for what does not fit.
    """
    check_attention(query, key_cache, value_cache, block_tables, seq_lens)
    (T, H, C), (_, P, K, _) = query.shape, key_cache.shape
    B, window = seq_lens.shape[0], check_window(window)
    check_tensor("query_start", query_start, [B + 1], INTEGERS, like=query)
    check_range("max_query", max_query, 0)
    group = H // K
    if tiles is None and INTERPRETED.value:
        tiles = interpreter_tiles(max_query, group)
    elif tiles is None:
        tiles = flash_tiles(C, group, key_cache.element_size(), bool(torch.version.hip))
    check_range("rows of a tile", tiles.rows, group)
    out = torch.empty((T, H, C), dtype=query.dtype, device=query.device)
    grid = (triton.cdiv(max_query, tiles.rows // group), K, B)
    if 0 in grid or T == 0:
        return out
    flash_attention_kernel[grid](
        query, key_cache, value_cache, block_tables, query_start, seq_lens, out,
        scale * LOG2_E, window, block_tables.stride(0), *query.stride()[:2],
        H=H, K=K, C=C, P=P, BM=tiles.rows, BN=tiles.keys, WIDTH=head_width(C),
        DOT=attention_dot_dtype(query, key_cache), PDL=pdl,
        **launch_options(tiles.num_warps, tiles.num_stages, pdl),
    )  # fmt: skip
    return out


def attention_cost(
    name: str,
    batch: Sequence[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None = None,
    element: ElementBytes | None = None,
) -> OpCost:
    """Scores, softmax and weighted values of one layer; batch: (query, context) of each request.

    Keys and values are read once, which holds as long as a request's queries are one tile or the
    others find them in L2.
    """
    e = element if element is not None else ElementBytes()
    pairs = sum(attended_pairs(query, context, window) for query, context in batch)
    read = sum(min(c, q + (window or c) - 1) for q, c in batch)
    tokens = sum(query for query, _ in batch)
    return OpCost(
        name,
        flops=heads * pairs * (4 * head_dim + 5),  # a softmax counts five a score
        kv_bytes=2 * read * kv_heads * head_dim * e.kv,
        activation_bytes=2 * tokens * heads * head_dim * e.activation,
    )


def flash_attention_cost(
    batch: Sequence[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    window: int | None = None,
    element: ElementBytes | None = None,
) -> OpCost:
    """FLOPs and bytes of one layer; batch: (query, context) of each request."""
    return attention_cost("flash_attention", batch, heads, kv_heads, head_dim, window, element)


def aot_cases() -> list[AotCase]:
    """Heads of Llama-1B and SmolLM2, of 128 as wider models have, and of 80, which is padded."""
    cases = []
    for H, K, C, P, dtype, pdl in (
        (32, 8, 64, 16, "bf16", False),
        (9, 3, 64, 16, "bf16", False),
        (32, 8, 64, 1, "bf16", False),
        (32, 8, 128, 16, "bf16", False),
        (32, 32, 80, 24, "fp16", False),
        (32, 8, 64, 16, "fp32", False),
        (32, 8, 128, 16, "fp32", False),
        (32, 8, 64, 16, "bf16", True),
    ):
        signature = dict.fromkeys(("QUERY", "KEY_CACHE", "VALUE_CACHE", "OUT"), f"*{dtype}")
        signature |= dict.fromkeys(("TABLES", "QUERY_START", "SEQ_LENS"), "*i64")
        strides = ("table_stride", "query_t", "query_h")
        signature |= {"scale": "fp32", "window": "i32"} | dict.fromkeys(strides, "i32")
        constants = {"H": H, "K": K, "C": C, "P": P, "WIDTH": head_width(C), "PDL": pdl}
        for targets in (NVIDIA[1:],) if pdl else (NVIDIA, HIP):
            itemsize = 4 if dtype == "fp32" else 2
            tiles = flash_tiles(C, H // K, itemsize, targets == HIP)
            cases.append(
                AotCase(
                    f"{dtype} H={H} K={K} C={C} P={P}{' pdl' if pdl else ''}",
                    flash_attention_kernel,
                    signature,
                    constants | {"BM": tiles.rows, "BN": tiles.keys, "DOT": DOT_OF[dtype]},
                    num_warps=tiles.num_warps,
                    num_stages=tiles.num_stages,
                    aligned=("query_t", "query_h"),
                    targets=targets,
                    options={"launch_pdl": True} if pdl else {},
                )
            )
    return cases
