"""Y = X Wᵀ for 2 to 16 rows: a decode step of a small batch, still bound by the weights' bytes.

    Y[t, n] = Σ_k X[t, k] · W[n, k] (+ bias[n]) (+ residual[t, n])     X [T, in], W [out, in]

Each 2 bytes of weights take T multiply-adds. Without tensor cores an H100 has 20 FLOPs for each
byte that it reads (67 TFLOP/s of float32, 3.35 TB/s, NVIDIA's datasheet): T = 16 would need 16 of
them, conversions and loads not counted. A tensor core multiplies matrices of at least 16 rows, and
T is less. So the weights are the rows: W [BN, k] · Xᵀ [k, T], with T padded by zeros to BT.

A tile of 16 rows is one matrix instruction wide, too narrow for the 8 warps of a program: they
would all compute the same. So `in` is cut: a tile [BN, BK] becomes NS slices [BN, BK / NS], one
`tl.dot` multiplies all of them, [NS, BN, BK / NS] · [NS, BK / NS, BT], and every warp has a slice
of its own. The NS partial results [NS, BN, BT] stay apart, in float32, until one sum after the last
tile.

Price: T padded to BT is arithmetic for nothing (there is enough of it), and every program reads
all of X from L2: as much as weights at T = BN.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifer.kernels.aot import AotCase
from minifer.kernels.checks import check_product
from minifer.kernels.compat import launch_dependents, launch_options, to_dtype, wait_for_launcher
from minifer.kernels.products import (
    LINEAR,
    Gpu,
    TileChoice,
    Tiles,
    choose_tiles,
    dot_dtype,
    linear_cost,
    load_tile,
    product_cases,
)
from minifer.perf.costs import OpCost

MOST_ROWS = 16


def gemm_small_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """x [T, in], weight [out, in], bias [out], residual [T, out] → [T, out]."""
    y = x @ weight.T
    if bias is not None:
        y = y + bias
    return y if residual is None else y + residual


@triton.jit
def dot_slices(w, x, acc, DOT: tl.constexpr):
    """acc [NS, BN, BT] + w [NS, BN, BK / NS] · x [NS, BT, BK / NS]ᵀ, slice by slice."""
    x = tl.permute(x.to(DOT), (0, 2, 1))
    return tl.dot(w.to(DOT), x, acc, input_precision="ieee")


@triton.jit
def store_columns(y, n, t, N, T, BIAS, RESIDUAL, OUT):
    """OUT[t, n] ← y [BN, BT] float32 (+ BIAS[n]) (+ RESIDUAL[t, n]), rounded once."""
    inside = (n < N)[:, None] & (t < T)[None, :]
    offsets = t[None, :] * N + n[:, None]
    if BIAS is not None:
        y += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if RESIDUAL is not None:
        y += tl.load(RESIDUAL + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + offsets, to_dtype(y, OUT.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def gemm_small_kernel(
    X, W, BIAS, RESIDUAL, OUT, N, K, T,
    BN: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, NS: tl.constexpr,
    STAGES: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN columns of OUT [T, N] a program: tiles [BN, BK] of W [N, K] in NS slices times those of
    X [T, K], T padded to BT."""
    if PDL:
        launch_dependents()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    t = tl.arange(0, BT)
    k = tl.arange(0, NS)[:, None] * (BK // NS) + tl.arange(0, BK // NS)[None, :]
    acc = tl.zeros([NS, BN, BT], tl.float32)
    k, rows, tokens = k[:, None, :], n[None, :, None], t[None, :, None]
    w = load_tile(W, rows, k, N, K, ONCE=True)  # weights are there: do not wait
    if PDL:
        wait_for_launcher()
    acc = dot_slices(w, load_tile(X, tokens, k, T, K), acc, DOT)
    for start in tl.range(BK, K, BK, num_stages=STAGES):
        w = load_tile(W, rows, start + k, N, K, ONCE=True)
        acc = dot_slices(w, load_tile(X, tokens, start + k, T, K), acc, DOT)
    store_columns(tl.sum(acc, 0), n, t, N, T, BIAS, RESIDUAL, OUT)


def gemm_small_tiles(out: int, width: int, itemsize: int, gpu: Gpu) -> Tiles:
    """16 rows: what a matrix instruction has, and even so a small model gives few programs.

    Not measured on a GPU yet. float32 has no matrix instruction: less of it at a time.
    """
    columns = min(512 if itemsize == 2 else 128, max(128, triton.next_power_of_2(width)))
    return Tiles(16, columns, 2 if gpu.hip else 4, 8)


def num_slices(tiles: Tiles) -> int:
    """NS: a slice for every warp, and at least 16 columns (what `tl.dot` takes) a slice."""
    return max(1, min(tiles.num_warps, tiles.columns // 16))


def gemm_small(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    pdl: bool = False,
    tiles: Tiles | None = None,
) -> Tensor:
    """x [T, in], T ≤ 16, weight [out, in], bias [out], residual [T, out] → [T, out].

    All in one dtype, float32, bfloat16 or float16; float32 is multiplied as it is, not as
    TF32; sums are float32 and rounded once. pdl: programmatic dependent launch, see `gemv`. Raises
    `ValueError` for shapes, dtypes, devices or strides that do not fit.
    """
    check_product(x, weight, bias, residual, MOST_ROWS)
    T, (N, K) = x.shape[0], weight.shape
    out = x.new_empty(T, N)
    if out.numel() == 0:
        return out
    if tiles is None:
        tiles = choose_tiles(gemm_small_tiles, weight)
    gemm_small_kernel[(triton.cdiv(N, tiles.rows),)](
        x, weight, bias, residual, out, N, K, T,
        BN=tiles.rows, BK=tiles.columns, BT=padded_rows(T, bool(torch.version.hip)),
        NS=num_slices(tiles), STAGES=tiles.num_stages, DOT=dot_dtype(x.dtype), PDL=pdl,
        **launch_options(tiles.num_warps, tiles.num_stages, pdl),
    )  # fmt: skip
    return out


def padded_rows(rows: int, hip: bool) -> int:
    """BT: T padded to the columns of a matrix instruction, 8 or 16 (AMD's have 16)."""
    return 8 if rows <= 8 and not hip else 16


def gemm_small_cost(rows: int, width: int, out: int, element_bytes: float = 2.0) -> OpCost:
    """FLOPs and bytes of x [rows, width] · weight [out, width]; padding is not counted."""
    return linear_cost("gemm_small", rows, width, out, element_bytes)


def small_cases(kernel: Any, choice: TileChoice, names: tuple[str, ...]) -> list[AotCase]:
    """`product_cases` of a kernel for 2 to 16 rows, for both paddings."""
    return [
        replace(case, name=f"{case.name} {rows} rows", targets=targets)
        for rows in (8, 16)
        for case in product_cases(kernel, choice, names, BT=rows, NS=8)
        if (targets := tuple(t for t in case.targets if rows == padded_rows(rows, t == "gfx942")))
    ]


def aot_cases() -> list[AotCase]:
    return small_cases(gemm_small_kernel, gemm_small_tiles, LINEAR)
