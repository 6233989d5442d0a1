"""A matrix times the vectors of a step: five of the ten opcodes in one Triton device function.

A decode step is as fast as the weights of these five come from memory. They are one function,
`project`:

    n ∈ [first, end), b ∈ [0, B):   out[n, b] = Σ_k W[row(n), k] · (x[b, k] · scale[b] · g[k])

It walks the weights in tiles of [ROWS, BK] in one flat loop over row blocks and columns, so that
the stream of loads never drains between two row blocks, and sums in registers: one reduction a row
block, in a fixed order, no atomics. g and scale are the norm before the product, where there is
one. `row` pairs what an epilogue needs together: the two halves of a RoPE pair, gate and up.

One request: multiply and add in float32. Several: tensor cores, with the weights on the 16-row side
of the tile and the columns cut into SLICES, one a warp, because a single [16, BK] tile would give
one warp the work of all. The price of the norm inside the product: every program reads all of x.

While a program waits for its input it can already fetch what does not depend on it, its weights:
into L2 (`prefetch_rows`), and the first tile into registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minifer.kernels.compat import prefetch_l2, to_dtype
from minifer.kernels.mega.isa import Op
from minifer.kernels.mega.ops import address, wait_for

QKV = tl.constexpr(int(Op.QKV))
OUTPUT = tl.constexpr(int(Op.OUTPUT))
GATE_UP = tl.constexpr(int(Op.GATE_UP))
DOWN = tl.constexpr(int(Op.DOWN))
HEAD = tl.constexpr(int(Op.HEAD))
LINE = tl.constexpr(128)  # bytes that a prefetch brings


# ------------------------------------------------------------------------------- its weights


@triton.jit
def weights_of(OP: tl.constexpr, WEIGHTS, layer, dtype: tl.constexpr, L: tl.constexpr):
    """The matrix of an operation and the norm before it (the matrix again where there is none)."""
    if OP == QKV:
        return address(WEIGHTS, 6 * layer + 1, dtype), address(WEIGHTS, 6 * layer, dtype)
    elif OP == OUTPUT:
        W = address(WEIGHTS, 6 * layer + 2, dtype)
        return W, W
    elif OP == GATE_UP:
        return address(WEIGHTS, 6 * layer + 4, dtype), address(WEIGHTS, 6 * layer + 3, dtype)
    elif OP == DOWN:
        W = address(WEIGHTS, 6 * layer + 5, dtype)
        return W, W
    else:
        return address(WEIGHTS, 6 * L + 2, dtype), address(WEIGHTS, 6 * L + 1, dtype)


@triton.jit
def weight_row(n, OP: tl.constexpr, F: tl.constexpr, C: tl.constexpr):
    """The row of W that comes n-th: QKV pairs rows i and i + C/2 of a head, GATE_UP gate and up."""
    if OP == QKV:
        half: tl.constexpr = C // 2
        pair = n // 2
        return pair // half * C + pair % half + n % 2 * half
    elif OP == GATE_UP:
        return n // 2 + n % 2 * F
    else:
        return n


@triton.jit
def columns(step, BK: tl.constexpr, SLICES: tl.constexpr):
    """Columns of tile number `step` of a row block: [BK], or [SLICES, BK / SLICES]."""
    if SLICES == 0:
        return step * BK + tl.arange(0, BK)
    else:
        each: tl.constexpr = BK // SLICES
        return step * BK + tl.arange(0, SLICES)[:, None] * each + tl.arange(0, each)[None, :]


@triton.jit
def weight_tile(
    W, n, end, k, OP: tl.constexpr, WIDTH: tl.constexpr, F: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, SLICES: tl.constexpr, MASK_ROWS: tl.constexpr,
):  # fmt: skip
    """The weights of rows n at columns k: [ROWS, BK], or [SLICES, ROWS, BK / SLICES]."""
    row = weight_row(n, OP, F, C).to(tl.int64) * WIDTH
    if SLICES == 0:
        at = row[:, None] + k[None, :]
        inside = (n < end)[:, None] & (k < WIDTH)[None, :]
    else:
        at = row[None, :, None] + k[:, None, :]
        inside = (n < end)[None, :, None] & (k < WIDTH)[:, None, :]
    if MASK_ROWS or WIDTH % BK != 0:
        return tl.load(W + at, mask=inside, other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(W + at, eviction_policy="evict_first")


@triton.jit
def multiply(
    w, SOURCE, G, scale, k, NORM: tl.constexpr, B: tl.constexpr, BP: tl.constexpr,
    WIDTH: tl.constexpr, BK: tl.constexpr, SLICES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A weight tile times the inputs of its columns, what is still to be summed over columns:
    [ROWS, BK], or over slices: [SLICES, ROWS, BP]."""
    if SLICES == 0:
        x = tl.load(SOURCE + k, mask=k < WIDTH, other=0.0)
        if NORM:
            x = x * tl.sum(scale, 0) * tl.load(G + k, mask=k < WIDTH, other=0.0).to(tl.float32)
        return w.to(tl.float32) * x[None, :]
    else:
        b = tl.arange(0, BP)[None, None, :]
        inside = (b < B) & (k < WIDTH)[:, :, None]
        x = tl.load(SOURCE + b * WIDTH + k[:, :, None], mask=inside, other=0.0)
        if NORM:
            g = tl.load(G + k, mask=k < WIDTH, other=0.0).to(tl.float32)
            x = x * scale[None, None, :] * g[:, :, None]
        return tl.dot(w.to(DOT), to_dtype(x, DOT), input_precision="ieee")


@triton.jit
def prefetch_rows(
    W, first, end, OP: tl.constexpr, WIDTH: tl.constexpr, F: tl.constexpr, C: tl.constexpr,
    BYTES: tl.constexpr,
):  # fmt: skip
    """Ask for the first BYTES bytes of the rows, a cache line at a time."""
    per_line: tl.constexpr = LINE // (W.dtype.element_ty.primitive_bitwidth // 8)
    lines: tl.constexpr = (WIDTH + per_line - 1) // per_line  # of a row
    at_once: tl.constexpr = 256
    for start in range(0, tl.minimum((end - first) * lines, BYTES // LINE), at_once):
        line = start + tl.arange(0, at_once)
        row = weight_row(tl.minimum(first + line // lines, end - 1), OP, F, C)
        prefetch_l2(W + row.to(tl.int64) * WIDTH + line % lines * per_line)


# ------------------------------------------------------------------- matrix times vectors


@triton.jit
def rms_scale(
    X, B: tl.constexpr, BP: tl.constexpr, D: tl.constexpr, BK: tl.constexpr, EPS: tl.constexpr
):
    """1 / rms of every row of x [B, D]: float32 [BP]."""
    b = tl.arange(0, BP)[:, None]
    squares = tl.zeros([BP, BK], tl.float32)
    for start in range(0, D, BK):
        k = start + tl.arange(0, BK)[None, :]
        x = tl.load(X + b * D + k, mask=(b < B) & (k < D), other=0.0)
        squares += x * x
    return tl.rsqrt(tl.sum(squares, 1) / D + EPS)


@triton.jit
def project(
    OP: tl.constexpr, WEIGHTS, CACHES, X, Q, ATTENDED, HIDDEN, LOGITS, BEST, BEST_ID,
    ROPE, TABLES, POSITION, SEED, INDEX, TEMPERATURE, COUNTERS, MARK,
    layer, begin, end_tile, slot, counter, target, patience, max_blocks,
    DTYPE: tl.constexpr, CACHE_DTYPE: tl.constexpr, DOT: tl.constexpr, EPS: tl.constexpr,
    B: tl.constexpr, BP: tl.constexpr, L: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, V: tl.constexpr, P: tl.constexpr,
    HEAD_SLOTS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr,
    SLICES: tl.constexpr, STAGES: tl.constexpr, PREFETCH_BYTES: tl.constexpr,
    PREFETCH_REGISTERS: tl.constexpr, WRITE_LOGITS: tl.constexpr, SAMPLE: tl.constexpr,
    TRACE: tl.constexpr,
):  # fmt: skip
    """Weight tiles [begin, end_tile) of one operation, and its epilogue; returns patience."""
    NORM: tl.constexpr = (OP == QKV) | (OP == GATE_UP) | (OP == HEAD)
    WIDTH: tl.constexpr = F if OP == DOWN else (H * C if OP == OUTPUT else D)
    WEIGHT_ROWS: tl.constexpr = 2 * TILE if OP == GATE_UP else TILE  # of W in a tile
    STEPS: tl.constexpr = (WIDTH + BK - 1) // BK
    MASK_ROWS: tl.constexpr = WEIGHT_ROWS % ROWS != 0
    EARLY: tl.constexpr = 1 if PREFETCH_REGISTERS and STEPS > 1 else 0
    first, end = begin * WEIGHT_ROWS, end_tile * WEIGHT_ROWS
    W, G = weights_of(OP, WEIGHTS, layer, DTYPE, L)
    if OP == OUTPUT:
        SOURCE = ATTENDED
    elif OP == DOWN:
        SOURCE = HIDDEN
    else:
        SOURCE = X

    # What needs no input yet: ask for weights.
    if PREFETCH_BYTES > 0:
        prefetch_rows(W, first, end, OP, WIDTH, F, C, PREFETCH_BYTES)
    if EARLY:
        k = columns(0, BK, SLICES)
        n = first + tl.arange(0, ROWS)
        w = weight_tile(W, n, end, k, OP, WIDTH, F, C, BK, SLICES, MASK_ROWS)
    patience = wait_for(COUNTERS, counter, target, patience, MARK, TRACE)

    scale = tl.zeros([BP], tl.float32)
    if NORM:
        scale = rms_scale(X, B, BP, D, BK, EPS)
    if SLICES == 0:
        acc = tl.zeros([ROWS, BK], tl.float32)
    else:
        acc = tl.zeros([SLICES, ROWS, BP], tl.float32)
    if EARLY:
        acc += multiply(w, SOURCE, G, scale, k, NORM, B, BP, WIDTH, BK, SLICES, DOT)
    best = tl.full([BP], float("-inf"), tl.float32)
    best_id = tl.zeros([BP], tl.int32)
    for i in tl.range(EARLY, tl.cdiv(end - first, ROWS) * STEPS, num_stages=STAGES):
        start = first + i // STEPS * ROWS
        n = start + tl.arange(0, ROWS)
        k = columns(i % STEPS, BK, SLICES)
        w = weight_tile(W, n, end, k, OP, WIDTH, F, C, BK, SLICES, MASK_ROWS)
        acc += multiply(w, SOURCE, G, scale, k, NORM, B, BP, WIDTH, BK, SLICES, DOT)
        if i % STEPS == STEPS - 1:
            if SLICES == 0:
                out = tl.sum(acc, 1)[:, None]  # [ROWS, BP]
            else:
                out = tl.sum(acc, 0)
            acc = tl.zeros_like(acc)
            if OP == QKV:
                keys = address(CACHES, 2 * layer, CACHE_DTYPE)
                values = address(CACHES, 2 * layer + 1, CACHE_DTYPE)
                rotate_and_append(
                    out, start, end, Q, keys, values, ROPE, TABLES, POSITION, max_blocks,
                    B, BP, H, K, C, P, ROWS,
                )  # fmt: skip
            elif OP == GATE_UP:
                gated(out, start, end, HIDDEN, B, BP, F, ROWS)
            elif OP == HEAD:
                best, best_id = keep_best(
                    out, n, end, best, best_id, LOGITS, SEED, INDEX, TEMPERATURE,
                    B, BP, V, WRITE_LOGITS, SAMPLE,
                )  # fmt: skip
            else:
                add_to_residual(out, n, end, X, B, BP, D)
    if OP == HEAD:
        b = tl.arange(0, BP)
        tl.store(BEST + b * HEAD_SLOTS + slot, best, mask=b < B)
        tl.store(BEST_ID + b * HEAD_SLOTS + slot, best_id, mask=b < B)
    return patience


# ------------------------------------------------------------------------- its epilogues


@triton.jit
def pairs(out, BP: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS, BP] → its even and its odd rows, [ROWS / 2, BP] each."""
    return tl.split(tl.permute(tl.reshape(out, [ROWS // 2, 2, BP]), (0, 2, 1)))


@triton.jit
def rotate_and_append(
    out, start, end, Q, KEYS, VALUES, ROPE, TABLES, POSITION, max_blocks,
    B: tl.constexpr, BP: tl.constexpr, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    P: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate q and k rows by the angles of their requests' positions; q to Q [B, H · C], k and v
    to the slots of the positions. A request at position −1 appends nothing."""
    half: tl.constexpr = C // 2
    pair = start // 2 + tl.arange(0, ROWS // 2)[:, None]
    head, i = pair // half, pair % half
    b = tl.arange(0, BP)[None, :]
    known = (pair < end // 2) & (b < B)
    position = tl.load(POSITION + b, mask=b < B, other=-1)
    active = position >= 0
    position = tl.maximum(position, 0)

    first, second = pairs(out, BP, ROWS)
    turned = known & (head < H + K)
    cos = tl.load(ROPE + position * C + i, mask=turned, other=1.0)
    sin = tl.load(ROPE + position * C + half + i, mask=turned, other=0.0)
    a, z = first * cos - second * sin, second * cos + first * sin

    q = Q + b * (H * C) + head * C + i
    tl.store(q, a, mask=known & (head < H))
    tl.store(q + half, z, mask=known & (head < H))

    block = tl.load(TABLES + b * max_blocks + position // P, mask=(b < B) & active, other=0)
    slot = block.to(tl.int64) * P + position % P
    is_key = known & active & (head >= H) & (head < H + K)
    is_value = known & active & (head >= H + K)
    key = KEYS + (slot * K + (head - H)) * C + i
    value = VALUES + (slot * K + (head - H - K)) * C + i
    dtype: tl.constexpr = KEYS.dtype.element_ty
    a, z = to_dtype(a, dtype), to_dtype(z, dtype)
    tl.store(key, a, mask=is_key)
    tl.store(key + half, z, mask=is_key)
    tl.store(value, a, mask=is_value)
    tl.store(value + half, z, mask=is_value)


@triton.jit
def gated(
    out, start, end, HIDDEN, B: tl.constexpr, BP: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr
):
    """silu(gate) · up → HIDDEN [B, F]."""
    gate, up = pairs(out, BP, ROWS)
    row = start // 2 + tl.arange(0, ROWS // 2)[:, None]
    b = tl.arange(0, BP)[None, :]
    inside = (row < end // 2) & (b < B)
    tl.store(HIDDEN + b * F + row, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def add_to_residual(out, n, end, X, B: tl.constexpr, BP: tl.constexpr, D: tl.constexpr):
    """x[n] += out: nobody else touches these rows, and nobody reads them in this loop."""
    b = tl.arange(0, BP)[None, :]
    inside = (n < end)[:, None] & (b < B)
    x = X + b * D + n[:, None]
    tl.store(x, tl.load(x, mask=inside, other=0.0) + out, mask=inside)


@triton.jit
def keep_best(
    out, n, end, best, best_id, LOGITS, SEED, INDEX, TEMPERATURE,
    B: tl.constexpr, BP: tl.constexpr, V: tl.constexpr,
    WRITE_LOGITS: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """The best token so far of every request: the lowest id among equals, since ids only grow."""
    b = tl.arange(0, BP)
    inside = (n < end)[:, None] & (b < B)[None, :]
    if WRITE_LOGITS:
        tl.store(LOGITS + b[None, :] * V + n[:, None], out, mask=inside)
    score = out
    if SAMPLE:
        temperature = tl.load(TEMPERATURE + b, mask=b < B, other=0.0)[None, :]
        drawn = temperature > 0
        race = log_noise(n[:, None], SEED, INDEX, B, BP)
        score = tl.where(drawn, out / tl.where(drawn, temperature, 1.0) - race, out)
    score = tl.where(inside, score, float("-inf"))
    top = tl.max(score, 0)
    top_id = tl.min(n, 0) + tl.argmax(score, 0).to(tl.int32)
    better = top > best
    return tl.where(better, top, best), tl.where(better, top_id, best_id)


@triton.jit
def log_noise(token, SEED, INDEX, B: tl.constexpr, BP: tl.constexpr):
    """log q, q ~ Exp(1), of tokens [n, 1] in each request's draw: [n, BP].

    Token t takes word t mod 4 of the Philox counter (t // 4, output index, 0, 0); its key is the
    seed. The same numbers as `minifer/execution/noise.py`, up to the rounding of a logarithm.
    """
    b = tl.arange(0, BP)[None, :]
    seed = tl.load(SEED + b, mask=b < B, other=0)
    index = tl.load(INDEX + b, mask=b < B, other=0)
    zero = tl.zeros_like(token + index).to(tl.uint32)
    c0, c1 = (token // 4).to(tl.uint32) + zero, index.to(tl.uint32) + zero
    w0, w1, w2, w3 = tl.philox(seed + zero.to(tl.int64), c0, c1, zero, zero)
    low = tl.where(token % 2 == 0, w0, w1)
    high = tl.where(token % 2 == 0, w2, w3)
    word = tl.where(token % 4 < 2, low, high)
    u = tl.minimum((word.to(tl.float32) + 0.5) * (1 / 4294967296), 1 - 1 / 16777216)
    # log1p(−u) = log(1 − u) · u / (1 − (1 − u)): the rounding of 1 − u cancels (W. Kahan).
    rest = 1.0 - u
    lost = 1.0 - rest
    log1p = tl.where(lost == 0.0, -u, tl.log(rest) * (u / tl.where(lost == 0.0, 1.0, lost)))
    return tl.log(-log1p)
