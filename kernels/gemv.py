"""y = W x: the product of a decode step at batch 1, bound by the bytes of its weights.

    y[n] = Σ_k W[n, k] · x[k] (+ bias[n]) (+ residual[n])        x [in], W [out, in] → y [out]

One program computes BN rows. It walks along `in` in tiles of [BN, BK] weights, multiplies each by
its slice of x and adds it to a float32 accumulator of the same [BN, BK]: a thread only ever adds to
its own elements, and the sum over BK happens once, after the last tile. A sum in every tile would
put an exchange between threads, and a wait, between one load and the next.

No tensor cores: one weight is used once, at 2 FLOPs for 2 bytes, and an H100 has 295 bfloat16 FLOPs
a byte. What matters is how many bytes are on their way: 16 KiB a tile and `num_stages` − 1 tiles in
flight, in 16-byte loads. Weights are read once and marked for early eviction from L2, the cache
that all streaming multiprocessors (SMs) share.

bias and residual are fused because they are a launch each otherwise. Price: x is read by every
program, from L2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minifer.kernels.aot import AotCase
from minifer.kernels.checks import check_product, check_tensor
from minifer.kernels.compat import launch_dependents, launch_options, wait_for_launcher
from minifer.kernels.products import (
    LINEAR,
    Gpu,
    Tiles,
    choose_tiles,
    linear_cost,
    load_tile,
    product_cases,
    store_rows,
)
from minifer.perf.costs import OpCost


def gemv_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """x [in] or [1, in], weight [out, in], bias [out], residual as the result → [out], [1, out]."""
    y = x @ weight.T
    if bias is not None:
        y = y + bias
    return y if residual is None else y + residual


@triton.jit
def gemv_kernel(
    X, W, BIAS, RESIDUAL, OUT, N, K,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN rows of W [N, K] a program, in tiles of BK columns; the first tile is asked for before the
    program waits for the kernel that makes X."""
    if PDL:
        launch_dependents()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    first = load_tile(W, n[:, None], k[None, :], N, K, ONCE=True)  # weights are there: do not wait
    if PDL:
        wait_for_launcher()
    acc = first.to(tl.float32) * tl.load(X + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    for start in tl.range(BK, K, BK, num_stages=STAGES):
        k = start + tl.arange(0, BK)
        w = load_tile(W, n[:, None], k[None, :], N, K, ONCE=True).to(tl.float32)
        acc += w * tl.load(X + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    store_rows(tl.sum(acc, 1), n, N, BIAS, RESIDUAL, OUT)


def gemv_tiles(out: int, width: int, itemsize: int, gpu: Gpu) -> Tiles:
    """16 KiB of weights a tile, as many rows as still give every SM a program.

    Not measured on a GPU yet.
    """
    rows = next((n for n in (16, 8) if triton.cdiv(out, n) >= gpu.programs), 4)
    columns = min(16384 // itemsize // rows, triton.next_power_of_2(width))
    return Tiles(rows, max(columns, 64), 2 if gpu.hip else 4, 8)


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    *,
    pdl: bool = False,
    tiles: Tiles | None = None,
) -> Tensor:
    """x [in] or [1, in], weight [out, in], bias [out], residual as the result → [out] or [1, out].

    All in one dtype, float32, bfloat16 or float16; sums are float32 and rounded once. out: where to
    write, and may be `residual`. pdl: programmatic dependent launch, compute capability 9.0 and
    newer; weight and bias must then have been there before the kernel that made x was launched.
    Raises `ValueError` for shapes, dtypes, devices or strides that do not fit.
    """
    check_tensor("x", x, [None] if isinstance(x, Tensor) and x.dim() == 1 else [1, None])
    check_tensor("weight", weight, [None, x.shape[-1]], like=x)
    rows, shape = x.view(1, -1), (*x.shape[:-1], weight.shape[0])
    if residual is not None:
        check_tensor("residual", residual, shape, like=x)
    check_product(rows, weight, bias, None if residual is None else residual.view(1, -1))
    N, K = weight.shape
    if out is None:
        out = x.new_empty(shape)
    check_tensor("out", out, shape, [x.dtype], like=x)
    if N == 0:
        return out
    if tiles is None:
        tiles = choose_tiles(gemv_tiles, weight)
    gemv_kernel[(triton.cdiv(N, tiles.rows),)](
        x, weight, bias, residual, out, N, K,
        BN=tiles.rows, BK=tiles.columns, STAGES=tiles.num_stages, PDL=pdl,
        **launch_options(tiles.num_warps, tiles.num_stages, pdl),
    )  # fmt: skip
    return out


def gemv_cost(width: int, out: int, element_bytes: float = 2) -> OpCost:
    """FLOPs and bytes of one product with weight [out, width]."""
    return linear_cost("gemv", 1, width, out, element_bytes)


def aot_cases() -> list[AotCase]:
    return product_cases(gemv_kernel, gemv_tiles, LINEAR)
