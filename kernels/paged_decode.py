"""Attention of a decode step: one query a request, its context cut into splits that run at once.

    part: o_s = Σ_{keys of split s} exp(x − m_s) · v / l_s,   lse_s = m_s + log l_s
    merge: out = Σ_s w_s · o_s,   w_s = exp(lse_s − max lse) / Σ_r exp(lse_r − max lse)

x are the scores, m_s their maximum and l_s the sum of exp(x − m_s) in split s. With one query a
request, B · K programs are often fewer than the GPU has SMs, and each would read a long context on
its own. Split-KV (Flash-Decoding, Dao, Haziza, Massa and Sizov, 2023,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html) cuts the context into num_splits parts, a
program each; softmax over the whole needs only the parts' log-sum-exp.

A program serves the G = H/K query heads of one KV head, so that K and V are read once. Lengths are
read on the device: a captured CUDA graph replays with other lengths, and the splits share out
whatever the length is then. A split without tokens has lse = −inf and weighs nothing.

Price of num_splits > 1: a second launch, and num_splits · B · H · (C + 1) float32 written and read
again. With one split the kernel writes the output itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifer.kernels.aot import NVIDIA, TARGETS, AotCase
from minifer.kernels.checks import check_range, check_tensor
from minifer.kernels.compat import (
    INTERPRETED,
    launch_dependents,
    launch_options,
    to_dtype,
    wait_for_launcher,
)
from minifer.kernels.flash_attention import (
    DOT_OF,
    HIP,
    LOG2_E,
    attend,
    attention_cost,
    attention_dot_dtype,
    check_attention,
    check_window,
    flash_attention_reference,
    head_width,
)
from minifer.perf.costs import ElementBytes, OpCost

MAX_SPLITS = 64  # the merge holds all parts of a head at once
SPLIT_TOKENS = 64  # fewest tokens worth a split of their own
FULL = 0.8  # of the SMs busy: no need to split (FlashAttention, num_splits_heuristic)
EFFICIENT = 0.85  # of the best share of busy SMs is good enough: fewer splits merge faster


def paged_decode_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    *,
    num_splits: int = 1,
) -> Tensor:
    """The definition in the dtype it is given; arguments and result are those of `paged_decode`,
    and splitting changes nothing."""
    start = torch.arange(len(seq_lens) + 1)
    out = torch.zeros_like(query)
    some = seq_lens > 0
    out[some] = flash_attention_reference(
        query[some],
        key_cache,
        value_cache,
        block_tables[some],
        start[: int(some.sum()) + 1],
        seq_lens[some],
        scale,
        window,
    )
    return out


def num_splits(batch: int, kv_heads: int, max_context: int, num_sms: int) -> int:
    """How many parts contexts of up to `max_context` tokens are cut into.

    One if batch · kv_heads programs keep 80 % of the SMs busy. Otherwise programs run in waves of
    num_sms, the last of them partly empty: the smallest count whose waves are at least 85 % as
    full as those of the best count. A split has at least `SPLIT_TOKENS` tokens.
    Source: FlashAttention, hopper/heuristics.h.
    """
    programs = max(batch * kv_heads, 1)
    most = min(MAX_SPLITS, num_sms, -(-max_context // SPLIT_TOKENS))
    if programs >= FULL * num_sms or most <= 1:
        return 1
    waves = [programs * splits / num_sms for splits in range(1, most + 1)]
    efficiency = [wave / math.ceil(wave) for wave in waves]
    return 1 + next(i for i, e in enumerate(efficiency) if e >= EFFICIENT * max(efficiency))


@triton.jit
def paged_decode_kernel(
    QUERY, KEY_CACHE, VALUE_CACHE, TABLES, SEQ_LENS, OUT, PART_OUT, PART_LSE,
    scale, window, table_stride, query_b, query_h,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, P: tl.constexpr, SPLITS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (request, KV head, split). With one split OUT is written, else PART_OUT
    [B, H, SPLITS, C] and PART_LSE [B, H, SPLITS], whose logarithms have base 2. BM: G padded to
    what `tl.dot` takes."""
    if PDL:
        launch_dependents()
        wait_for_launcher()
    G: tl.constexpr = H // K
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(SEQ_LENS + request).to(tl.int32)
    row, column = tl.arange(0, BM), tl.arange(0, WIDTH)
    inside = (row < G)[:, None] & (column < C)[None, :]
    head = kv_head * G + row
    pointers = QUERY + request.to(tl.int64) * query_b + (head.to(tl.int64) * query_h)[:, None]
    q = tl.load(pointers + column[None, :], mask=inside, other=0.0).to(DOT)

    seen = tl.maximum(length - window, 0)  # the first position that the query sees
    share = tl.cdiv(tl.cdiv(length - seen, SPLITS), BN) * BN
    first = seen + split * share
    last = tl.minimum(first + share, length)
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, WIDTH], tl.float32)
    position = tl.full([BM], length - 1, tl.int32)
    table = TABLES + request.to(tl.int64) * table_stride
    for tile in tl.range(first, last, BN):
        top, total, acc = attend(
            q, position, top, total, acc, KEY_CACHE, VALUE_CACHE, table, kv_head,
            tile + tl.arange(0, BN), first, last, window, scale, K, C, P, WIDTH, DOT,
        )  # fmt: skip
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    output = request.to(tl.int64) * H + head
    if SPLITS == 1:
        pointers = OUT + output[:, None] * C + column[None, :]
        tl.store(pointers, to_dtype(out, OUT.dtype.element_ty), mask=inside)
    else:
        part = output * SPLITS + split
        tl.store(PART_OUT + part[:, None] * C + column[None, :], out, mask=inside)
        lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), -float("inf"))
        tl.store(PART_LSE + part, lse, mask=row < G)


@triton.jit
def merge_kernel(
    PART_OUT, PART_LSE, OUT,
    C: tl.constexpr, SPLITS: tl.constexpr, MOST: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (request · H + head): its parts, MOST (SPLITS padded) at once."""
    if PDL:
        launch_dependents()
        wait_for_launcher()
    output = tl.program_id(0).to(tl.int64)
    split, column = tl.arange(0, MOST), tl.arange(0, WIDTH)
    there = split < SPLITS
    lse = tl.load(PART_LSE + output * SPLITS + split, mask=there, other=-float("inf"))
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(top == -float("inf"), 0.0, top))
    total = tl.sum(weight, 0)
    pointers = PART_OUT + (output * SPLITS + split)[:, None] * C + column[None, :]
    part = tl.load(pointers, mask=there[:, None] & (column < C)[None, :], other=0.0)
    out = tl.sum(part * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(OUT + output * C + column, to_dtype(out, OUT.dtype.element_ty), mask=column < C)


class Tiles(NamedTuple):
    """What the kernel is compiled for."""

    rows: int  # BM, at least G
    keys: int  # BN
    num_stages: int
    num_warps: int


def decode_tiles(C: int, group: int, itemsize: int, hip: bool = False) -> Tiles:
    """8 KiB of keys and 8 KiB of values a tile, two of them on their way: five stages, because a
    tile's blocks must be known before its keys can be asked for. Not measured on a GPU yet."""
    keys = (4096 if hip else 8192) // itemsize // head_width(C)
    return Tiles(
        max(triton.next_power_of_2(group), 16), min(max(keys, 16), 128), 2 if hip else 5, 4
    )


def interpreter_tiles(group: int) -> Tiles:
    """Few, big tiles: in the interpreter an operation costs the same whatever its size."""
    return Tiles(triton.next_power_of_2(group), 256, 1, 1)


def decode_partials(
    batch: int, heads: int, splits: int, head_dim: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Memory for `partials`: outputs [B, H, splits, C] and log-sum-exps [B, H, splits], float32."""
    out = torch.empty(batch, heads, splits, head_dim, dtype=torch.float32, device=device)
    return out, torch.empty(batch, heads, splits, dtype=torch.float32, device=device)


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    *,
    num_splits: int = 1,
    partials: tuple[Tensor, Tensor] | None = None,
    pdl: bool = False,
    tiles: Tiles | None = None,
) -> Tensor:
    """The last position's attention of each request: query [B, H, C] → [B, H, C].

    Request b's context is seq_lens[b] positions of caches [N, P, K, C], in blocks
    block_tables[b] [B, max blocks]; a length of 0 gives zeros. num_splits: see the function of that
    name. partials: from `decode_partials`, to be used again; after the call they hold the parts.
    window: positions a query sees, its own among them; None: all. Raises `ValueError` for what does
    not fit.
    """
    check_attention(query, key_cache, value_cache, block_tables, seq_lens)
    (B, H, C), (_, P, K, _) = query.shape, key_cache.shape
    check_tensor("seq_lens", seq_lens, [B], (seq_lens.dtype,))
    check_range("num_splits", num_splits, 1, MAX_SPLITS)
    window, group = check_window(window), H // K
    if tiles is None and INTERPRETED.value:
        tiles = interpreter_tiles(group)
    elif tiles is None:
        tiles = decode_tiles(C, group, key_cache.element_size(), bool(torch.version.hip))
    check_range("rows of a tile", tiles.rows, group)
    out = torch.empty((B, H, C), dtype=query.dtype, device=query.device)
    part_out = part_lse = None
    if num_splits > 1:
        if partials is None:
            partials = decode_partials(B, H, num_splits, C, query.device)
        part_out, part_lse = partials
        shape, float32 = (B, H, num_splits, C), (torch.float32,)
        check_tensor("partials[0]", part_out, shape, float32, like=query)
        check_tensor("partials[1]", part_lse, shape[:3], float32, like=query)
    if B == 0:
        return out
    paged_decode_kernel[(B, K, num_splits)](
        query, key_cache, value_cache, block_tables, seq_lens, out, part_out, part_lse,
        scale * LOG2_E, window, block_tables.stride(0), *query.stride()[:2],
        H=H, K=K, C=C, P=P, SPLITS=num_splits, BM=tiles.rows, BN=tiles.keys, WIDTH=head_width(C),
        DOT=attention_dot_dtype(query, key_cache), PDL=pdl,
        **launch_options(tiles.num_warps, tiles.num_stages, pdl),
    )  # fmt: skip
    if num_splits > 1:
        merge_kernel[(B * H,)](
            part_out, part_lse, out,
            C=C, SPLITS=num_splits, MOST=triton.next_power_of_2(num_splits),
            WIDTH=triton.next_power_of_2(C), PDL=pdl, **launch_options(4, 1, pdl),
        )  # fmt: skip
    return out


def paged_decode_cost(
    contexts: Sequence[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    num_splits: int = 1,
    window: int | None = None,
    element: ElementBytes | None = None,
) -> OpCost:
    """One layer; contexts: of each request, with the new token. Parts are written and read."""
    batch = [(1, context) for context in contexts]
    whole = attention_cost("paged_decode", batch, heads, kv_heads, head_dim, window, element)
    if num_splits == 1:
        return whole
    parts = len(batch) * heads * num_splits
    return OpCost(
        whole.name,
        whole.flops + parts * (2 * head_dim + 3),
        kv_bytes=whole.kv_bytes,
        activation_bytes=whole.activation_bytes + 2 * 4 * parts * (head_dim + 1),
    )


def aot_cases() -> list[AotCase]:
    """Heads of Llama-1B and SmolLM2, of 128 as wider models have, and of 80, which is padded."""
    cases = []
    for H, K, C, P, dtype, splits, pdl in (
        (32, 8, 64, 16, "bf16", 1, False),
        (32, 8, 64, 16, "bf16", 16, False),
        (9, 3, 64, 16, "bf16", 16, False),
        (32, 8, 64, 1, "bf16", 16, False),
        (32, 8, 128, 16, "bf16", 16, False),
        (32, 32, 80, 24, "fp16", 16, False),
        (32, 8, 64, 16, "fp32", 16, False),
        (32, 8, 64, 16, "bf16", 16, True),
    ):
        name = f"{dtype} H={H} K={K} C={C} P={P} splits={splits}{' pdl' if pdl else ''}"
        signature = dict.fromkeys(("QUERY", "KEY_CACHE", "VALUE_CACHE", "OUT"), f"*{dtype}")
        signature |= {"TABLES": "*i64", "SEQ_LENS": "*i64", "scale": "fp32", "window": "i32"}
        signature |= dict.fromkeys(("table_stride", "query_b", "query_h"), "i32")
        parts = {"PART_OUT": "*fp32", "PART_LSE": "*fp32"}
        constants: dict[str, Any] = {"C": C, "SPLITS": splits, "PDL": pdl}
        heads = {"H": H, "K": K, "P": P, "WIDTH": head_width(C), "DOT": DOT_OF[dtype]}
        options = {"launch_pdl": True} if pdl else {}
        for targets in (NVIDIA[1:],) if pdl else (NVIDIA, HIP):
            tiles = decode_tiles(C, H // K, 4 if dtype == "fp32" else 2, targets == HIP)
            heads |= {"BM": tiles.rows, "BN": tiles.keys}
            cases.append(
                AotCase(
                    name,
                    paged_decode_kernel,
                    signature | (parts if splits > 1 else {}),
                    constants | heads | ({} if splits > 1 else dict.fromkeys(parts)),
                    num_warps=tiles.num_warps,
                    num_stages=tiles.num_stages,
                    aligned=("query_b", "query_h"),
                    targets=targets,
                    options=options,
                )
            )
        if splits > 1 and (K, P) != (8, 1):
            sizes = {"MOST": splits, "WIDTH": triton.next_power_of_2(C)}
            cases.append(
                AotCase(
                    f"{name} merge",
                    merge_kernel,
                    parts | {"OUT": f"*{dtype}"},
                    constants | sizes,
                    num_stages=1,
                    targets=NVIDIA[1:] if pdl else TARGETS,
                    options=options,
                )
            )
    return cases
