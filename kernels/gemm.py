"""Y = X Wᵀ for many rows: prefill, bound by arithmetic.

    Y[t, n] = Σ_k X[t, k] · W[n, k] (+ bias[n]) (+ residual[t, n])     X [T, in], W [out, in]

A program computes a tile [BM, BN] of Y from tiles [BM, BK] of X and [BN, BK] of W: each number that
is loaded is used BN or BM times. Programs that run at the same time should share what they load, so
the tiles of Y are numbered in groups of GROUP tiles down, then one to the right: a square patch of
Y needs fewer rows of X and W than a long row of it, and they stay in L2
(https://triton-lang.org/main/getting-started/tutorials/03-matrix-multiplication.html).

16-bit operands are multiplied on tensor cores, float32 in full precision without them. The sum is
float32; bias and residual are added to it before the one rounding.

Price: a tile at the edge computes rows and columns that are not there, and loads of weights do not
overlap the kernel before (`pdl` overlaps the launch alone).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from minifer.kernels.aot import AotCase
from minifer.kernels.checks import check_product
from minifer.kernels.compat import (
    INTERPRETED,
    launch_dependents,
    launch_options,
    to_dtype,
    wait_for_launcher,
)
from minifer.kernels.products import (
    GPUS,
    Gpu,
    dot_dtype,
    gpu_of,
    linear_cost,
    load_tile,
    product_case,
)
from minifer.perf.costs import OpCost


def gemm_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """x [T, in], weight [out, in], bias [out], residual [T, out] → [T, out]."""
    y = x @ weight.T
    if bias is not None:
        y = y + bias
    return y if residual is None else y + residual


@triton.jit
def grouped_tile(program, down, across, GROUP: tl.constexpr):
    """Number of a program → its tile (down, across): GROUP tiles down, then one to the right."""
    per_group = GROUP * across
    first = program // per_group * GROUP
    height = tl.minimum(down - first, GROUP)  # the last group may be lower
    within = program % per_group
    return first + within % height, within // height


@triton.jit(do_not_specialize=["T"])
def gemm_kernel(
    X, W, BIAS, RESIDUAL, OUT, N, K, T,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile [BM, BN] of OUT [T, N] a program, in steps of BK columns of X [T, K] and W [N, K]."""
    if PDL:
        launch_dependents()
        wait_for_launcher()
    row, column = grouped_tile(tl.program_id(0), tl.cdiv(T, BM), tl.cdiv(N, BN), GROUP)
    t = row * BM + tl.arange(0, BM)
    n = column * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        k = start + tl.arange(0, BK)[None, :]
        x = load_tile(X, t[:, None], k, T, K).to(DOT)
        w = load_tile(W, n[:, None], k, N, K).to(DOT)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    inside = (t < T)[:, None] & (n < N)[None, :]
    offsets = t.to(tl.int64)[:, None] * N + n[None, :]
    if BIAS is not None:
        acc += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if RESIDUAL is not None:
        acc += tl.load(RESIDUAL + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + offsets, to_dtype(acc, OUT.dtype.element_ty), mask=inside)


class GemmTiles(NamedTuple):
    """What the kernel is compiled for."""

    tokens: int  # BM, rows of X
    rows: int  # BN, rows of W
    columns: int  # BK
    num_stages: int
    num_warps: int


def gemm_tiles(tokens: int, itemsize: int, gpu: Gpu) -> GemmTiles:
    """The tile for x [tokens, in] on a GPU. Not measured on a GPU yet.

    Few tokens take low tiles, because rows that are not there cost as much as others, and narrow
    ones, because the weights' bytes are still the limit and every SM should fetch some.
    """
    if itemsize == 4:  # no tensor core: a thread's registers are the limit
        return GemmTiles(64, 64, 32 if gpu.hip else 16, 2 if gpu.hip else 3, 8)
    if tokens <= 32:
        return GemmTiles(32, 32, 128, 2 if gpu.hip else 4, 4)
    if tokens <= 64:
        return GemmTiles(64, 64, 128, 2 if gpu.hip else 3, 4)
    return GemmTiles(128, 128, 64, 2 if gpu.hip else 3, 8)


def interpreter_gemm_tiles(tokens: int, out: int, width: int) -> GemmTiles:
    """Few, big tiles: in the interpreter an operation costs the same whatever its size."""
    columns = min(triton.next_power_of_2(width), 2048)
    rows = min(triton.next_power_of_2(out), 512)
    return GemmTiles(min(triton.next_power_of_2(tokens), 512), rows, columns, 1, 1)


def gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    pdl: bool = False,
    tiles: GemmTiles | None = None,
) -> Tensor:
    """x [T, in], weight [out, in], bias [out], residual [T, out] → [T, out].

    All in one dtype, float32, bfloat16 or float16; float32 is multiplied as it is, not as
    TF32; sums are float32 and rounded once. pdl: programmatic dependent launch, see `gemv`; the
    launch overlaps, loads of weights do not. Raises `ValueError` for shapes, dtypes, devices or
    strides that do not fit.
    """
    check_product(x, weight, bias, residual)
    T, (N, K) = x.shape[0], weight.shape
    out = x.new_empty(T, N)
    if out.numel() == 0:
        return out
    if tiles is None and INTERPRETED.value:
        tiles = interpreter_gemm_tiles(T, N, K)
    elif tiles is None:
        tiles = gemm_tiles(T, x.element_size(), gpu_of(x))
    gemm_kernel[(triton.cdiv(T, tiles.tokens) * triton.cdiv(N, tiles.rows),)](
        x, weight, bias, residual, out, N, K, T,
        BM=tiles.tokens, BN=tiles.rows, BK=tiles.columns, GROUP=8,
        STAGES=tiles.num_stages, DOT=dot_dtype(x.dtype), PDL=pdl,
        **launch_options(tiles.num_warps, tiles.num_stages, pdl),
    )  # fmt: skip
    return out


def gemm_cost(rows: int, width: int, out: int, element_bytes: float = 2.0) -> OpCost:
    """FLOPs and bytes of x [rows, width] · weight [out, width], each matrix read once."""
    return linear_cost("gemm", rows, width, out, element_bytes)


def aot_cases() -> list[AotCase]:
    """Every tile, for prompts of 32, 64 and 512 tokens; the first also with all that is added."""
    found: dict[tuple[str, GemmTiles], list[str]] = {}
    wanted = (("bf16", 2, 512), ("bf16", 2, 64), ("bf16", 2, 32), ("fp32", 4, 512))
    for kind, itemsize, tokens in wanted:
        for target, gpu in GPUS.items():
            found.setdefault((kind, gemm_tiles(tokens, itemsize, gpu)), []).append(target)
    return [
        product_case(
            gemm_kernel, kind, f"{tiles.tokens}x{tiles.rows}x{tiles.columns}", tiles,
            tuple(targets), variant,
            {"BM": tiles.tokens, "BN": tiles.rows, "BK": tiles.columns, "GROUP": 8},
        )
        for number, ((kind, tiles), targets) in enumerate(found.items())
        for variant in (("plain",) if number else ("plain", "added", "pdl"))
    ]  # fmt: skip
