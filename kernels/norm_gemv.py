"""Y = RMSNorm(X) Wᵀ for 1 to 16 rows: the norm is part of the product that reads it.

    h[t] = norm · round(X[t] / sqrt(mean(X[t]²) + eps))             X [T, D], norm [D]
    Y[t, n] = Σ_k h[t, k] · W[n, k] (+ bias[n])                     W [out, D], Y [T, out]

A norm of its own would be a launch, a write and a read of X, and meanwhile no weight would be
read. Here every program computes the mean itself while its first weights are on their
way, and norms each slice of X as it multiplies it. One row is multiplied as in `gemv`, up to 16 as
in `gemm_small`.

Rounding is torch's: X / rms to X's dtype, the product with norm to it again, then the sum in
float32. So a token's activations are those of the back end `torch`, and of prefill, where the norm
is a kernel of its own.

Price: each of out / BN programs reads X twice, from L2, and computes the same T means: for 192
programs (Llama-1B's qkv) the work of 192 norms, on threads that wait for memory anyway.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifer.kernels.aot import AotCase
from minifer.kernels.checks import check_norm, check_product
from minifer.kernels.compat import launch_dependents, launch_options, to_dtype, wait_for_launcher
from minifer.kernels.gemm_small import (
    MOST_ROWS,
    dot_slices,
    gemm_small_tiles,
    num_slices,
    padded_rows,
    small_cases,
    store_columns,
)
from minifer.kernels.gemv import gemv_tiles
from minifer.kernels.products import (
    Tiles,
    choose_tiles,
    dot_dtype,
    linear_cost,
    load_tile,
    product_cases,
    store_rows,
)
from minifer.perf.costs import OpCost


def norm_gemv_reference(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """x [T, D], norm [D], weight [out, D], bias [out] → [T, out]."""
    h = norm * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))
    return h @ weight.T if bias is None else h @ weight.T + bias


@triton.jit
def inverse_rms(X, t, T, K, eps, BK: tl.constexpr):
    """1 / sqrt(mean(x²) + eps) of rows t [BT] of X [T, K] → [BT] float32."""
    squares = tl.zeros([t.shape[0], BK], tl.float32)
    for start in tl.range(0, K, BK):
        k = start + tl.arange(0, BK)
        x = load_tile(X, t[:, None], k[None, :], T, K).to(tl.float32)
        squares += x * x
    return tl.rsqrt(tl.sum(squares, 1) / K + eps)


@triton.jit
def normed(x, norm, scale):
    """norm · round(x · scale), rounded to x's dtype → float32; the three broadcast."""
    h = to_dtype(x.to(tl.float32) * scale, x.dtype).to(tl.float32)
    return to_dtype(h * norm.to(tl.float32), x.dtype).to(tl.float32)


@triton.jit
def normed_row(X, NORM, k, K, scale):
    """Columns k [BK] of the normed row X [K] → [BK] float32."""
    x = tl.load(X + k, mask=k < K, other=0.0)
    return normed(x, tl.load(NORM + k, mask=k < K, other=0.0), scale)


@triton.jit
def normed_slices(X, NORM, t, k, T, K, scale):
    """Rows t [BT] and columns k [NS, 1, BK / NS] of the normed X [T, K] → [NS, BT, BK / NS]."""
    x = load_tile(X, t[None, :, None], k, T, K)
    return normed(x, tl.load(NORM + k, mask=k < K, other=0.0), scale[None, :, None])


@triton.jit
def norm_gemv_kernel(
    X, NORM, W, BIAS, OUT, N, K, eps,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row; see `gemv_kernel`."""
    if PDL:
        launch_dependents()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    first = load_tile(W, n[:, None], k[None, :], N, K, ONCE=True)  # weights are there: do not wait
    if PDL:
        wait_for_launcher()
    scale = tl.sum(inverse_rms(X, tl.arange(0, 1), 1, K, eps, BK), 0)
    acc = first.to(tl.float32) * normed_row(X, NORM, k, K, scale)[None, :]
    for start in tl.range(BK, K, BK, num_stages=STAGES):
        k = start + tl.arange(0, BK)
        w = load_tile(W, n[:, None], k[None, :], N, K, ONCE=True).to(tl.float32)
        acc += w * normed_row(X, NORM, k, K, scale)[None, :]
    store_rows(tl.sum(acc, 1), n, N, BIAS, None, OUT)


@triton.jit(do_not_specialize=["T"])
def norm_gemm_small_kernel(
    X, NORM, W, BIAS, OUT, N, K, T, eps,
    BN: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, NS: tl.constexpr,
    STAGES: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """2 to 16 rows; see `gemm_small_kernel`."""
    if PDL:
        launch_dependents()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    t = tl.arange(0, BT)
    k = tl.arange(0, NS)[:, None] * (BK // NS) + tl.arange(0, BK // NS)[None, :]
    k, rows = k[:, None, :], n[None, :, None]
    w = load_tile(W, rows, k, N, K, ONCE=True)  # weights are there: do not wait
    if PDL:
        wait_for_launcher()
    scale = inverse_rms(X, t, T, K, eps, BK)
    acc = tl.zeros([NS, BN, BT], tl.float32)
    acc = dot_slices(w, normed_slices(X, NORM, t, k, T, K, scale), acc, DOT)
    for start in tl.range(BK, K, BK, num_stages=STAGES):
        w = load_tile(W, rows, start + k, N, K, ONCE=True)
        acc = dot_slices(w, normed_slices(X, NORM, t, start + k, T, K, scale), acc, DOT)
    store_columns(tl.sum(acc, 0), n, t, N, T, BIAS, None, OUT)


def norm_gemv(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    pdl: bool = False,
    tiles: Tiles | None = None,
) -> Tensor:
    """x [T, D] with T ≤ 16, norm [D], weight [out, D], bias [out] → [T, out].

    All in one dtype, float32, bfloat16 or float16. pdl: programmatic dependent launch, see `gemv`.
    Raises `ValueError` for shapes, dtypes, devices or strides that do not fit.
    """
    check_product(x, weight, bias, None, MOST_ROWS)
    check_norm(norm, x)
    T, (N, K) = x.shape[0], weight.shape
    out = x.new_empty(T, N)
    if out.numel() == 0:
        return out
    if tiles is None:
        tiles = choose_tiles(gemv_tiles if T == 1 else gemm_small_tiles, weight)
    grid = (triton.cdiv(N, tiles.rows),)
    options = launch_options(tiles.num_warps, tiles.num_stages, pdl)
    if T == 1:
        norm_gemv_kernel[grid](
            x, norm, weight, bias, out, N, K, eps,
            BN=tiles.rows, BK=tiles.columns, STAGES=tiles.num_stages, PDL=pdl, **options,
        )  # fmt: skip
    else:
        norm_gemm_small_kernel[grid](
            x, norm, weight, bias, out, N, K, T, eps,
            BN=tiles.rows, BK=tiles.columns, BT=padded_rows(T, bool(torch.version.hip)),
            NS=num_slices(tiles), STAGES=tiles.num_stages, DOT=dot_dtype(x.dtype), PDL=pdl,
            **options,
        )  # fmt: skip
    return out


def norm_gemv_cost(rows: int, width: int, out: int, element_bytes: float = 2.0) -> OpCost:
    """FLOPs and bytes of x [rows, width] · weight [out, width] with its norm, counted once: 4 FLOPs
    an element, as in `perf.costs`, and width weights."""
    product = linear_cost("norm_gemv", rows, width, out, element_bytes)
    return replace(
        product,
        flops=product.flops + 4 * rows * width,
        weight_bytes=product.weight_bytes + width * element_bytes,
    )


def aot_cases() -> list[AotCase]:
    names = ("qkv", "head")
    return [
        *product_cases(norm_gemv_kernel, gemv_tiles, names),
        *small_cases(norm_gemm_small_kernel, gemm_small_tiles, names),
    ]
