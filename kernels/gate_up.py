"""The first half of the MLP: norm, gate and up in one kernel (https://arxiv.org/abs/2002.05202).

    h[t] = norm · round(X[t] / sqrt(mean(X[t]²) + eps))              X [T, D], norm [D]
    g[t, f] = Σ_k h[t, k] · W[f, k] (+ bias[f])                      W [2 F, D]: gate's F rows first
    u[t, f] = Σ_k h[t, k] · W[F + f, k] (+ bias[F + f])
    Y[t, f] = silu(g) · u = g / (1 + exp(−g)) · u                    Y [T, F]

A program computes BN rows of the gate and the same rows of up: what silu(g) · u needs meets in its
registers, and [T, 2 F] numbers are neither written nor read. g and u stay in float32; torch rounds
both to their dtype before they are multiplied. For 1 to 16 rows; for more, `gemm` is the better
product and `silu_mul` the kernel after it.

Price: two accumulators, so half as many rows a program, and the norm in each of them as in
`norm_gemv`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifer.kernels.aot import AotCase
from minifer.kernels.checks import check_norm, check_product, check_range, check_tensor
from minifer.kernels.compat import (
    INTERPRETED,
    launch_dependents,
    launch_options,
    to_dtype,
    wait_for_launcher,
)
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
from minifer.kernels.norm_gemv import inverse_rms, norm_gemv_cost, normed_row, normed_slices
from minifer.kernels.products import (
    Gpu,
    Tiles,
    dot_dtype,
    gpu_of,
    interpreter_tiles,
    load_tile,
    product_cases,
    store_rows,
)
from minifer.perf.costs import OpCost


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 F] → silu(first half) · second half [T, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def gate_up_reference(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """x [T, D], norm [D], weight [2 F, D], bias [2 F] → [T, F]."""
    h = norm * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))
    return silu_mul_reference(h @ weight.T if bias is None else h @ weight.T + bias)


@triton.jit
def silu(x):
    """x / (1 + exp(−x)), float32, for any x: the exponential is of −|x|, which cannot overflow."""
    e = tl.exp(-tl.abs(x))
    return x * tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def half_bias(BIAS, f, F, half: tl.constexpr):
    """BIAS[half · F + f] [BN] float32; zeros without a bias."""
    if BIAS is None:
        return tl.zeros([f.shape[0]], tl.float32)
    else:
        return tl.load(BIAS + half * F + f, mask=f < F, other=0.0).to(tl.float32)


@triton.jit
def gate_up_kernel(
    X, NORM, W, BIAS, OUT, N, K, eps,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row; N is F. See `norm_gemv_kernel`."""
    if PDL:
        launch_dependents()
    f = tl.program_id(0) * BN + tl.arange(0, BN)
    UP = W + N.to(tl.int64) * K
    k = tl.arange(0, BK)
    first_gate = load_tile(
        W, f[:, None], k[None, :], N, K, ONCE=True
    )  # weights are there: do not wait
    first_up = load_tile(UP, f[:, None], k[None, :], N, K, ONCE=True)
    if PDL:
        wait_for_launcher()
    scale = tl.sum(inverse_rms(X, tl.arange(0, 1), 1, K, eps, BK), 0)
    x = normed_row(X, NORM, k, K, scale)[None, :]
    gate = first_gate.to(tl.float32) * x
    up = first_up.to(tl.float32) * x
    for start in tl.range(BK, K, BK, num_stages=STAGES):
        k = start + tl.arange(0, BK)
        w_gate = load_tile(W, f[:, None], k[None, :], N, K, ONCE=True).to(tl.float32)
        w_up = load_tile(UP, f[:, None], k[None, :], N, K, ONCE=True).to(tl.float32)
        x = normed_row(X, NORM, k, K, scale)[None, :]
        gate += w_gate * x
        up += w_up * x
    gate_bias, up_bias = half_bias(BIAS, f, N, 0), half_bias(BIAS, f, N, 1)
    y = silu(tl.sum(gate, 1) + gate_bias) * (tl.sum(up, 1) + up_bias)
    store_rows(y, f, N, None, None, OUT)


@triton.jit(do_not_specialize=["T"])
def gate_up_small_kernel(
    X, NORM, W, BIAS, OUT, N, K, T, eps,
    BN: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, NS: tl.constexpr,
    STAGES: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """2 to 16 rows; N is F. See `gemm_small_kernel`."""
    if PDL:
        launch_dependents()
    f = tl.program_id(0) * BN + tl.arange(0, BN)
    UP = W + N.to(tl.int64) * K
    t = tl.arange(0, BT)
    k = tl.arange(0, NS)[:, None] * (BK // NS) + tl.arange(0, BK // NS)[None, :]
    k, rows = k[:, None, :], f[None, :, None]
    w_gate = load_tile(W, rows, k, N, K, ONCE=True)  # weights are there: do not wait
    w_up = load_tile(UP, rows, k, N, K, ONCE=True)
    if PDL:
        wait_for_launcher()
    scale = inverse_rms(X, t, T, K, eps, BK)
    gate = tl.zeros([NS, BN, BT], tl.float32)
    up = tl.zeros([NS, BN, BT], tl.float32)
    x = normed_slices(X, NORM, t, k, T, K, scale)
    gate = dot_slices(w_gate, x, gate, DOT)
    up = dot_slices(w_up, x, up, DOT)
    for start in tl.range(BK, K, BK, num_stages=STAGES):
        w_gate = load_tile(W, rows, start + k, N, K, ONCE=True)
        w_up = load_tile(UP, rows, start + k, N, K, ONCE=True)
        x = normed_slices(X, NORM, t, start + k, T, K, scale)
        gate = dot_slices(w_gate, x, gate, DOT)
        up = dot_slices(w_up, x, up, DOT)
    gate_bias, up_bias = half_bias(BIAS, f, N, 0), half_bias(BIAS, f, N, 1)
    y = silu(tl.sum(gate, 0) + gate_bias[:, None]) * (tl.sum(up, 0) + up_bias[:, None])
    store_columns(y, f, t, N, T, None, None, OUT)


def gate_up_tiles(out: int, width: int, itemsize: int, gpu: Gpu) -> Tiles:
    """One row: the tile of `gemv` for all 2 F rows, half of it gate and half up. out: F."""
    tiles = gemv_tiles(2 * out, width, itemsize, gpu)
    return tiles._replace(rows=tiles.rows // 2)


def gate_up_small_tiles(out: int, width: int, itemsize: int, gpu: Gpu) -> Tiles:
    """2 to 16 rows: two tiles of `gemm_small`, each of half the size. out: F."""
    tiles = gemm_small_tiles(out, width, itemsize, gpu)
    if itemsize == 4 and not gpu.hip:
        return tiles._replace(rows=tiles.rows // 2)
    return tiles._replace(columns=max(tiles.columns // 2, 128))


def gate_up(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    pdl: bool = False,
    tiles: Tiles | None = None,
) -> Tensor:
    """x [T, D] with T ≤ 16, norm [D], weight [2 F, D], bias [2 F] → [T, F].

    All in one dtype, float32, bfloat16 or float16. pdl: programmatic dependent launch, see `gemv`.
    Raises `ValueError` for shapes, dtypes, devices or strides that do not fit.
    """
    check_product(x, weight, bias, None, MOST_ROWS)
    check_norm(norm, x)
    _check_even("rows of weight", weight.shape[0])
    T, F, K = x.shape[0], weight.shape[0] // 2, weight.shape[1]
    out = x.new_empty(T, F)
    if T == 0:
        return out
    if tiles is None and INTERPRETED.value:
        tiles = interpreter_tiles(F, K)
    elif tiles is None:
        choice = gate_up_tiles if T == 1 else gate_up_small_tiles
        tiles = choice(F, K, weight.element_size(), gpu_of(weight))
    grid = (triton.cdiv(F, tiles.rows),)
    options = launch_options(tiles.num_warps, tiles.num_stages, pdl)
    if T == 1:
        gate_up_kernel[grid](
            x, norm, weight, bias, out, F, K, eps,
            BN=tiles.rows, BK=tiles.columns, STAGES=tiles.num_stages, PDL=pdl, **options,
        )  # fmt: skip
    else:
        gate_up_small_kernel[grid](
            x, norm, weight, bias, out, F, K, T, eps,
            BN=tiles.rows, BK=tiles.columns, BT=padded_rows(T, bool(torch.version.hip)),
            NS=num_slices(tiles), STAGES=tiles.num_stages, DOT=dot_dtype(x.dtype), PDL=pdl,
            **options,
        )  # fmt: skip
    return out


@triton.jit
def silu_mul_kernel(X, OUT, N, count, SIZE: tl.constexpr, PDL: tl.constexpr):
    """SIZE of the `count` = T · N elements of OUT [T, N]; X is [T, 2 N]."""
    if PDL:
        launch_dependents()
        wait_for_launcher()
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = i < count
    at = X + i // N * (2 * N) + i % N
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + N, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + i, to_dtype(silu(gate) * up, OUT.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor, *, pdl: bool = False) -> Tensor:
    """gate_up [T, 2 F] → silu(first half) · second half [T, F], float32 inside, rounded once.

    Raises `ValueError` for a wrong shape, dtype or stride.
    """
    check_tensor("gate_up", gate_up, [None, None])
    _check_even("the last dimension of gate_up", gate_up.shape[1])
    T, F = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(T, F)
    if T == 0:
        return out
    size = min(triton.next_power_of_2(T * F), 1 << 20) if INTERPRETED.value else 1024
    silu_mul_kernel[(triton.cdiv(T * F, size),)](
        gate_up, out, F, T * F, SIZE=size, PDL=pdl, **launch_options(4, 1, pdl)
    )
    return out


def _check_even(name: str, value: int) -> None:
    """Gate and up are halves. Raises `ValueError` unless there are two of the same size."""
    check_range(name, value, 2)
    if value % 2:
        raise ValueError(f"{name} must be a multiple of 2, got {value}")


def gate_up_cost(rows: int, width: int, hidden: int, element_bytes: float = 2.0) -> OpCost:
    """FLOPs and bytes of x [rows, width], weight [2 hidden, width]; silu_mul as in `perf.costs`."""
    both = norm_gemv_cost(rows, width, 2 * hidden, element_bytes)
    return replace(
        both,
        name="gate_up",
        flops=both.flops + 5 * rows * hidden,
        activation_bytes=rows * (width + hidden) * element_bytes,
    )


def silu_mul_cost(rows: int, hidden: int, element_bytes: float = 2.0) -> OpCost:
    """FLOPs and bytes of gate_up [rows, 2 hidden] → [rows, hidden]."""
    moved = 3 * rows * hidden * element_bytes
    return OpCost("silu_mul", flops=5 * rows * hidden, activation_bytes=moved)


def aot_cases() -> list[AotCase]:
    silu_cases = [
        AotCase(
            f"silu_mul {kind}",
            silu_mul_kernel,
            {"X": f"*{kind}", "OUT": f"*{kind}", "N": "i32", "count": "i32"},
            {"SIZE": 1024, "PDL": False},
            num_warps=4,
            num_stages=1,
            aligned=("N", "count"),
            wide=False,
        )
        for kind in ("bf16", "fp32")
    ]
    return [
        *product_cases(gate_up_kernel, gate_up_tiles, ("intermediate",)),
        *small_cases(gate_up_small_kernel, gate_up_small_tiles, ("intermediate",)),
        *silu_cases,
    ]
