"""What an instruction does, other than multiply (`project.py`): Triton device functions that
`kernel.py` strings together.

All of them take float32 activations [B, …] and leave float32. Every reduction has a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minifer.kernels.compat import nanoseconds, to_dtype, wait_ge
from minifer.kernels.mega.isa import COUNTER_STRIDE

STRIDE = tl.constexpr(COUNTER_STRIDE)


@triton.jit
def wait_for(COUNTERS, counter, target, patience, MARK, TRACE: tl.constexpr):
    """Wait until a counter (−1: none) has reached its target; returns what patience is left."""
    if counter >= 0:
        patience = wait_ge(COUNTERS + counter * STRIDE, target, patience)
    if TRACE:
        tl.store(MARK + 1, nanoseconds())
    return patience


@triton.jit
def address(TABLE, i, dtype: tl.constexpr):
    """Entry i of a table of addresses, as a pointer to dtype; all are multiples of 16 bytes."""
    return tl.multiple_of(tl.load(TABLE + i).to(tl.pointer_type(dtype)), 16)


@triton.jit
def embed(
    E, TOKEN, POSITION, X, B: tl.constexpr, BP: tl.constexpr, D: tl.constexpr, BK: tl.constexpr
):
    """x ← the rows of the embedding; 0 for a request at position −1."""
    b = tl.arange(0, BP)[:, None]
    active = tl.load(POSITION + b, mask=b < B, other=-1) >= 0
    row = tl.load(TOKEN + b, mask=active, other=0).to(tl.int64) * D
    for start in range(0, D, BK):
        k = start + tl.arange(0, BK)[None, :]
        e = tl.load(E + row + k, mask=active & (k < D), other=0.0)
        tl.store(X + b * D + k, e.to(tl.float32), mask=(b < B) & (k < D))


@triton.jit
def attention(
    Q, KEYS, VALUES, ATTENDED, PART_OUT, PART_LSE, TABLES, POSITION, row, h, split, max_blocks,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, S: tl.constexpr, P: tl.constexpr,
    GP: tl.constexpr, CP: tl.constexpr, BT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One split of the context of one request, for the query heads of KV head h.

    Online softmax over tiles of BT positions (https://arxiv.org/abs/1805.02867). A split without a
    position leaves 0 and the log-sum-exp −∞. What is masked is zeroed: it may be NaN.
    """
    G: tl.constexpr = H // K
    length = tl.load(POSITION + row) + 1
    each = tl.cdiv(tl.cdiv(length, S), BT) * BT
    first = split * each
    last = tl.minimum(first + each, length)
    g, c = tl.arange(0, GP), tl.arange(0, CP)
    head = h * G + g
    wanted = (g < G)[:, None] & (c < C)[None, :]
    at = (row * H + head)[:, None] * C + c[None, :]
    q = to_dtype(tl.load(Q + at, mask=wanted, other=0.0), DOT)

    m = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, CP], tl.float32)
    for start in tl.range(first, last, BT, num_stages=2):
        t = start + tl.arange(0, BT)
        block = tl.load(TABLES + row * max_blocks + t // P, mask=t < last, other=0)
        slot = block.to(tl.int64) * P + t % P
        kv = ((slot * K + h) * C)[:, None] + c[None, :]
        seen = (t < last)[:, None] & (c < C)[None, :]
        k = tl.load(KEYS + kv, mask=seen, other=0.0).to(DOT)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * (1 / C**0.5)
        score = tl.where((t < last)[None, :], score, float("-inf"))
        higher = tl.maximum(m, tl.max(score, 1))
        p = tl.exp(score - higher[:, None])
        shrink = tl.exp(m - higher)
        v = tl.load(VALUES + kv, mask=seen, other=0.0).to(DOT)
        acc = acc * shrink[:, None] + tl.dot(to_dtype(p, DOT), v, input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        m = higher

    some = total > 0
    total = tl.where(some, total, 1.0)
    acc = tl.where(some[:, None], acc / total[:, None], 0.0)
    if S == 1:
        tl.store(ATTENDED + at, acc, mask=wanted)
    else:
        part = (row * H + head) * S + split
        tl.store(PART_OUT + part[:, None] * C + c[None, :], acc, mask=wanted)
        lse = tl.where(some, m + tl.log(total), float("-inf"))
        tl.store(PART_LSE + part, lse, mask=g < G)


@triton.jit
def merge(
    PART_OUT, PART_LSE, ATTENDED, row, h,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, S: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """The S parts of the query heads of KV head h, weighted by their shares of the softmax."""
    G: tl.constexpr = H // K
    s, c = tl.arange(0, S), tl.arange(0, CP)
    for g in range(G):
        head = row * H + h * G + g
        lse = tl.load(PART_LSE + head * S + s)
        most = tl.max(lse, 0)
        share = tl.exp(lse - tl.where(most > float("-inf"), most, 0.0))
        total = tl.sum(share, 0)
        share = share / tl.where(total > 0, total, 1.0)
        at = (head * S + s)[:, None] * C + c[None, :]
        part = tl.load(PART_OUT + at, mask=(c < C)[None, :], other=0.0)
        tl.store(ATTENDED + head * C + c, tl.sum(part * share[:, None], 0), mask=c < C)


@triton.jit
def pick(
    BEST, BEST_ID, TOKEN, POSITION, INDEX, GENERATED, count, capacity, limit,
    B: tl.constexpr, BP: tl.constexpr, HEAD_SLOTS: tl.constexpr, SLOTS: tl.constexpr,
    ADVANCE: tl.constexpr,
):  # fmt: skip
    """The best of `count` bests of every request: its next token, the lowest id among equals.

    ADVANCE: note it in GENERATED [B, capacity] and go on to the next position; a request whose
    next position would be `limit` has no room for it and becomes padding. A request at position −1
    stays as it is.
    """
    b, s = tl.arange(0, BP), tl.arange(0, SLOTS)
    at = b[:, None] * HEAD_SLOTS + s[None, :]
    inside = (b < B)[:, None] & (s < count)[None, :]
    best = tl.load(BEST + at, mask=inside, other=float("-inf"))
    ids = tl.load(BEST_ID + at, mask=inside, other=2147483647)
    token = tl.min(tl.where(best == tl.max(best, 1)[:, None], ids, 2147483647), 1)
    position = tl.load(POSITION + b, mask=b < B, other=-1)
    active = position >= 0
    tl.store(TOKEN + b, token, mask=active)
    if ADVANCE:
        index = tl.load(INDEX + b, mask=active, other=0)
        noted = active & (index < capacity)
        tl.store(GENERATED + b * capacity + index, token, mask=noted)
        tl.store(INDEX + b, index + 1, mask=active)
        following = tl.where(position + 1 < limit, position + 1, -1)
        tl.store(POSITION + b, following, mask=active)
