"""RoPE of queries and keys joined to the append of keys and values to the paged cache.

    (a, b) → (a · cos − b · sin, b · cos + a · sin)     a, b: halves of a head, in float32
    cache[slot // P, slot mod P] ← rotated key, value   slot < 0: not written

q, k and v are columns of one product [T, (H + 2 K) · C], so this kernel reads them where they lie,
by their strides. Rotation, two casts and two scattered copies are one launch instead of about ten,
and a rotated key never goes to memory but into the cache. What is read is read once.

Price: nothing is saved for queries, whose rotation attention could do itself: it would then be
repeated by each split of the context (https://arxiv.org/abs/2104.09864 for RoPE).
"""

from __future__ import annotations

from typing import NamedTuple

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
from minifer.perf.costs import ElementBytes, OpCost

INTEGERS = (torch.int64, torch.int32)


def rope_append_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """`rope_append`, arguments and result, one step after the other, in the dtype it is given; it
    writes the caches."""

    def rotated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        return torch.cat((a * c - b * s, b * c + a * s), dim=-1)

    written = slot_mapping >= 0
    slots = slot_mapping[written].long()
    for cache, new in ((key_cache, rotated(key)), (value_cache, value)):
        cache.view(-1, *cache.shape[2:])[slots] = new[written].to(cache.dtype)
    return rotated(query)


@triton.jit
def half_heads(X, start, column, inside, HALF: tl.constexpr):
    """The two halves of the heads that begin at `start` [rows]: float32 [rows, PAIRS] each, 0
    outside."""
    pointers = X + start[:, None] + column[None, :]
    a = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(pointers + HALF, mask=inside, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def store_halves(X, start, column, inside, a, b, HALF: tl.constexpr):
    """The inverse of `half_heads`: a, b [rows, PAIRS] → the heads at `start` [rows]."""
    pointers = X + start[:, None] + column[None, :]
    tl.store(pointers, to_dtype(a, X.dtype.element_ty), mask=inside)
    tl.store(pointers + HALF, to_dtype(b, X.dtype.element_ty), mask=inside)


@triton.jit
def rotate(a, b, COS, SIN, token, column, inside, HALF: tl.constexpr):
    """Pair i of a row turns by the angle of its token and i: a, b [rows, PAIRS], token [rows]."""
    angle = token[:, None] * HALF + column[None, :]
    cos = tl.load(COS + angle, mask=inside, other=1.0)
    sin = tl.load(SIN + angle, mask=inside, other=0.0)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def rope_append_kernel(
    QUERY, KEY, VALUE, COS, SIN, KEY_CACHE, VALUE_CACHE, SLOTS, OUT,
    tokens, query_t, query_h, key_t, key_h, value_t, value_h,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows are (token, head). The first programs have ROWS rows of queries each, the others of
    keys and values. *_t, *_h: strides of tokens and heads. PAIRS: the power of two from HALF on."""
    if PDL:
        launch_dependents()
        wait_for_launcher()
    column = tl.arange(0, PAIRS)
    program = tl.program_id(0)
    query_programs = tl.cdiv(tokens * H, ROWS)
    if program < query_programs:
        row = program * ROWS + tl.arange(0, ROWS)
        inside = (row < tokens * H)[:, None] & (column < HALF)[None, :]
        token, head = (row // H).to(tl.int64), (row % H).to(tl.int64)
        a, b = half_heads(QUERY, token * query_t + head * query_h, column, inside, HALF)
        a, b = rotate(a, b, COS, SIN, token, column, inside, HALF)
        store_halves(OUT, row.to(tl.int64) * (2 * HALF), column, inside, a, b, HALF)
    else:
        row = (program - query_programs) * ROWS + tl.arange(0, ROWS)
        token, head = (row // K).to(tl.int64), (row % K).to(tl.int64)
        slot = tl.load(SLOTS + token, mask=row < tokens * K, other=-1).to(tl.int64)
        inside = (slot >= 0)[:, None] & (column < HALF)[None, :]
        target = (slot * K + head) * (2 * HALF)
        a, b = half_heads(KEY, token * key_t + head * key_h, column, inside, HALF)
        a, b = rotate(a, b, COS, SIN, token, column, inside, HALF)
        store_halves(KEY_CACHE, target, column, inside, a, b, HALF)
        a, b = half_heads(VALUE, token * value_t + head * value_h, column, inside, HALF)
        store_halves(VALUE_CACHE, target, column, inside, a, b, HALF)


class Tiles(NamedTuple):
    """What the kernel is compiled for."""

    rows: int  # (token, head) pairs of one program
    num_warps: int


def rope_tiles(head_dim: int) -> Tiles:
    """About 1,024 numbers a program: a decode step has few. Not measured on a GPU yet."""
    return Tiles(max(1024 // triton.next_power_of_2(head_dim), 1), 2)


def interpreter_tiles(head_dim: int, rows: int) -> Tiles:
    """All at once, up to a million numbers."""
    most = max(2**20 // triton.next_power_of_2(head_dim), 1)
    return Tiles(min(most, triton.next_power_of_2(rows)), 1)


def rope_append(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    pdl: bool = False,
    tiles: Tiles | None = None,
) -> Tensor:
    """Write rotated keys and values to the caches; returns the rotated queries [T, H, C].

    query [T, H, C], key, value [T, K, C]: views with a dense last dimension, not changed. cos, sin
    float32 [T, C/2], dense. key_cache, value_cache [N, P, K, C], dense. slot_mapping [T]: block · P
    + offset, below 0 is not written; a slot beyond the cache is the caller's fault, it is not
    looked at. Raises `ValueError` for shapes, dtypes, devices or strides that do not fit.
    """
    check_tensor("query", query, [None, None, None], contiguous=False)
    T, H, C = query.shape
    check_tensor("key", key, [T, None, C], like=query, contiguous=False)
    K = key.shape[1]
    check_tensor("value", value, [T, K, C], like=query, contiguous=False)
    check_range("heads of query", H, 1)
    check_range("heads of key", K, 1)
    if C % 2 or C < 2:
        raise ValueError(f"the last dimension of query must be even and at least 2, got {C}")
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table, [T, C // 2], [torch.float32], like=query)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_tensor(name, cache, [None, None, K, C], like=query)
    check_tensor("slot_mapping", slot_mapping, [T], INTEGERS, like=query)
    out = torch.empty((T, H, C), dtype=query.dtype, device=query.device)
    if T == 0:
        return out
    if tiles is None:
        tiles = interpreter_tiles(C, T * H) if INTERPRETED.value else rope_tiles(C)
    grid = (triton.cdiv(T * H, tiles.rows) + triton.cdiv(T * K, tiles.rows),)
    rope_append_kernel[grid](
        query, key, value, cos, sin, key_cache, value_cache, slot_mapping, out,
        T, *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
        H=H, K=K, HALF=C // 2, ROWS=tiles.rows, PAIRS=triton.next_power_of_2(C // 2), PDL=pdl,
        **launch_options(tiles.num_warps, 1, pdl),
    )  # fmt: skip
    return out


def rope_append_cost(
    tokens: int, heads: int, kv_heads: int, head_dim: int, *, element: ElementBytes | None = None
) -> OpCost:
    """A pair turns in 4 products and 2 sums. The cosines, float32, count as activations."""
    e = element if element is not None else ElementBytes()
    turned = tokens * (heads + kv_heads) * head_dim
    moved = tokens * (2 * heads + 2 * kv_heads) * head_dim * e.activation + 4 * tokens * head_dim
    return OpCost("rope_append", 3 * turned, 0, 2 * tokens * kv_heads * head_dim * e.kv, moved)


def aot_cases() -> list[AotCase]:
    """Heads of Llama-1B and SmolLM2, and of 128 as wider models have."""
    cases = []
    for H, K, C, dtype, pdl in (
        (32, 8, 64, "bf16", False),
        (9, 3, 64, "bf16", False),
        (32, 8, 64, "fp32", False),
        (32, 8, 128, "bf16", False),
        (32, 8, 64, "bf16", True),
    ):
        pointers = ("QUERY", "KEY", "VALUE", "KEY_CACHE", "VALUE_CACHE", "OUT")
        strides = ("query_t", "query_h", "key_t", "key_h", "value_t", "value_h")
        signature = dict.fromkeys(pointers, f"*{dtype}") | {"COS": "*fp32", "SIN": "*fp32"}
        signature |= {"SLOTS": "*i64"} | dict.fromkeys(("tokens", *strides), "i32")
        rows, warps = rope_tiles(C)
        cases.append(
            AotCase(
                f"{dtype} H={H} K={K} C={C}{' pdl' if pdl else ''}",
                rope_append_kernel,
                signature,
                {"H": H, "K": K, "HALF": C // 2, "ROWS": rows, "PAIRS": C // 2, "PDL": pdl},
                num_warps=warps,
                num_stages=1,
                aligned=strides,
                targets=NVIDIA[1:] if pdl else TARGETS,
                options={"launch_pdl": True} if pdl else {},
            )
        )
    return cases
