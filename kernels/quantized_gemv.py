"""Y = X Wᵀ with weights of 8 or 4 bits: half or a quarter of the bytes a decode step waits for.

    W[n, k] = (code[n, k] − zero[n, g]) · scale[n, g],  g = k // group          W [out, in]
    Y[t, n] = Σ_g scale[n, g] · Σ_k∈g (code[n, k] − zero[n, g]) · X[t, k]       X [T, in], T ≤ 16

int8: codes −127 … 127 without zeros, one scale a row or a group. int4: codes 0 … 15, two a byte,
groups of 32 or 64, with zeros 0 … 15 a group, or without: then zero is 8. Byte j of a group holds
code j in its low half and code j + group / 2 in its high half, so that both halves of a tile meet
whole slices of X and no number has to move (llama.cpp's Q4_0 is laid out like that,
https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h).

A weight is never made: codes are multiplied, and the scale joins the sum of its group. One row is
multiplied as in `gemv`. For 2 to 16 rows the slices of `gemm_small` are the groups: whole numbers
up to 127 are exact in bfloat16, so the dots of a group are exact products, and its scale is applied
in float32. Activations stay as they are ("weight-only").

Price: a conversion and a subtraction a weight, so arithmetic is nearer to being the limit than in
`gemv`; scales of 2 bytes for 32 codes of 4 bits are an eighth of the codes' bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifer.kernels.aot import AotCase
from minifer.kernels.checks import check_range, check_tensor
from minifer.kernels.compat import (
    INTERPRETED,
    launch_dependents,
    launch_options,
    wait_for_launcher,
)
from minifer.kernels.gemm_small import MOST_ROWS, dot_slices, padded_rows, store_columns
from minifer.kernels.products import (
    DTYPES,
    GPUS,
    LINEAR,
    PDL_TARGETS,
    SHAPES,
    Gpu,
    Tiles,
    dot_dtype,
    gpu_of,
    store_rows,
)
from minifer.kernels.quantization import check_group, dequantize
from minifer.kernels.quantization import quantize_int4 as quantize_int4
from minifer.kernels.quantization import quantize_int8 as quantize_int8
from minifer.perf.costs import OpCost


def quantized_gemv_reference(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, group: int | None
) -> Tensor:
    """x [T, in] → [T, out], in x's dtype: dequantise, then multiply."""
    return x @ dequantize(packed, scales, zeros, group, x.dtype).T


@triton.jit
def group_bytes(W, n, g, j, N, row_bytes, GROUP: tl.constexpr, BITS: tl.constexpr):
    """Bytes j of groups g of rows n; the three broadcast. 0 outside."""
    column = g * (GROUP * BITS // 8) + j
    pointers = W + n.to(tl.int64) * row_bytes + column
    inside = (n < N) & (column < row_bytes)
    return tl.load(pointers, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def group_scales(SCALES, ZEROS, n, g, N, groups, BITS: tl.constexpr):
    """Scales and zeros of groups g of rows n, float32; the two broadcast."""
    inside = (n < N) & (g < groups)
    at = n * groups + g
    scale = tl.load(SCALES + at, mask=inside, other=0.0).to(tl.float32)
    if ZEROS is None:
        zero = tl.full(at.shape, 8.0 if BITS == 4 else 0.0, tl.float32)
    else:
        zero = tl.load(ZEROS + at, mask=inside, other=0).to(tl.float32)
    return scale, zero


@triton.jit
def codes_of(packed, half: tl.constexpr, zero, BITS: tl.constexpr):
    """code − zero, float32, of one half of the bytes (8 bits have one half)."""
    if BITS == 8:
        return packed.to(tl.float32)
    else:
        return ((packed >> (4 * half)) & 15).to(tl.float32) - zero


@triton.jit
def row_times_groups(
    packed, X, SCALES, ZEROS, n, g, j, N, K, groups,
    GROUP: tl.constexpr, BITS: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    """packed [BN, NG, bytes] and X [K] → their products [BN, NG, bytes], scaled unless BY_ROW."""
    scale, zero = group_scales(SCALES, ZEROS, n, 0 * g if BY_ROW else g, N, groups, BITS)
    total = tl.zeros(packed.shape, tl.float32)
    for half in tl.static_range(8 // BITS):
        k = g * GROUP + half * (GROUP * BITS // 8) + j
        x = tl.load(X + k, mask=k < K, other=0.0).to(tl.float32)
        total += codes_of(packed, half, zero, BITS) * x
    if BY_ROW:
        return total
    else:
        return total * scale


@triton.jit
def quantized_gemv_kernel(
    X, W, SCALES, ZEROS, OUT, N, K, row_bytes, groups,
    BN: tl.constexpr, NG: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    BY_ROW: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row; see `gemv_kernel`. NG groups a tile; row_bytes is an argument of its own because the
    compiler must know that it is a multiple of 16, which K / 2 need not be."""
    if PDL:
        launch_dependents()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    rows, g = n[:, None, None], tl.arange(0, NG)[None, :, None]
    j = tl.arange(0, GROUP * BITS // 8)[None, None, :]
    packed = group_bytes(W, rows, g, j, N, row_bytes, GROUP, BITS)  # weights are there: do not wait
    if PDL:
        wait_for_launcher()
    acc = row_times_groups(packed, X, SCALES, ZEROS, rows, g, j, N, K, groups, GROUP, BITS, BY_ROW)
    for start in tl.range(NG, tl.cdiv(K, GROUP), NG, num_stages=STAGES):
        packed = group_bytes(W, rows, start + g, j, N, row_bytes, GROUP, BITS)
        acc += row_times_groups(
            packed, X, SCALES, ZEROS, rows, start + g, j, N, K, groups, GROUP, BITS, BY_ROW
        )
    y = tl.sum(tl.sum(acc, 2), 1)
    if BY_ROW:
        y *= tl.load(SCALES + n, mask=n < N, other=0.0).to(tl.float32)
    store_rows(y, n, N, None, None, OUT)


@triton.jit
def rows_times_groups(
    packed, X, SCALES, ZEROS, n, t, g, j, N, K, T, groups,
    GROUP: tl.constexpr, BITS: tl.constexpr, BY_ROW: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """packed [NG, BN, bytes] and rows t of X [T, K] → a sum for each group [NG, BN, BT]."""
    scale, zero = group_scales(SCALES, ZEROS, n, 0 * g if BY_ROW else g, N, groups, BITS)
    total = tl.zeros([packed.shape[0], packed.shape[1], t.shape[1]], tl.float32)
    for half in tl.static_range(8 // BITS):
        k = g * GROUP + half * (GROUP * BITS // 8) + j
        x = tl.load(X + t * K + k, mask=(t < T) & (k < K), other=0.0)
        total = dot_slices(codes_of(packed, half, zero, BITS), x, total, DOT)
    if BY_ROW:
        return total
    else:
        return total * scale


@triton.jit(do_not_specialize=["T"])
def quantized_gemm_small_kernel(
    X, W, SCALES, ZEROS, OUT, N, K, T, row_bytes, groups,
    BN: tl.constexpr, NG: tl.constexpr, BT: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, BY_ROW: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """2 to 16 rows; see `gemm_small_kernel`. The slices are the groups."""
    if PDL:
        launch_dependents()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    t = tl.arange(0, BT)
    rows, tokens = n[None, :, None], t[None, :, None]
    g = tl.arange(0, NG)[:, None, None]
    j = tl.arange(0, GROUP * BITS // 8)[None, None, :]
    packed = group_bytes(W, rows, g, j, N, row_bytes, GROUP, BITS)  # weights are there: do not wait
    if PDL:
        wait_for_launcher()
    acc = rows_times_groups(
        packed, X, SCALES, ZEROS, rows, tokens, g, j, N, K, T, groups, GROUP, BITS, BY_ROW, DOT
    )
    for start in tl.range(NG, tl.cdiv(K, GROUP), NG, num_stages=STAGES):
        at = start + g
        packed = group_bytes(W, rows, at, j, N, row_bytes, GROUP, BITS)
        acc += rows_times_groups(
            packed, X, SCALES, ZEROS, rows, tokens, at, j, N, K, T, groups, GROUP, BITS, BY_ROW, DOT
        )
    y = tl.sum(acc, 0)
    if BY_ROW:
        y *= tl.load(SCALES + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    store_columns(y, n, t, N, T, None, None, OUT)


def quantized_tiles(
    out: int, width: int, rows: int, group: int, bits: int, gpu: Gpu, itemsize: int = 2
) -> Tiles:
    """Tiles of codes; columns is a multiple of `group`. Not measured on a GPU yet.

    One row: 8 KiB, because a code's byte needs two to eight registers of a sum. More rows: a slice
    for every warp.
    """
    stages = 2 if gpu.hip else 4
    if rows > 1:
        return Tiles(16, max(512, 8 * group) if itemsize == 2 else 4 * group, stages, 8)
    tile_rows = next((n for n in (16, 8) if triton.cdiv(out, n) >= gpu.programs), 4)
    tile_bytes = 8192 if itemsize == 2 or gpu.hip else 4096
    return Tiles(tile_rows, tile_bytes // tile_rows * 8 // bits, stages, 8)


def quantized_gemv(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    group: int | None = None,
    *,
    pdl: bool = False,
    tiles: Tiles | None = None,
) -> Tensor:
    """x [T, in] with T ≤ 16 and the fields of a `QuantizedWeight` → [T, out], of x's dtype.

    scales may have any of the three float dtypes; sums are float32, rounded once. pdl: programmatic
    dependent launch, see `gemv`. Raises `ValueError` for shapes, dtypes, devices or strides that do
    not fit.
    """
    check_tensor("x", x, [None, None])
    T, K = x.shape
    check_range("rows of x", T, 0, MOST_ROWS)
    check_range("the last dimension of x", K, 1)
    check_tensor("packed", packed, [None, None], (torch.int8, torch.uint8), like=x)
    bits = 8 if packed.dtype == torch.int8 else 4
    check_group(group, K, bits)
    N, groups, row_bytes = packed.shape[0], K // group if group else 1, K * bits // 8
    check_tensor("packed", packed, [N, row_bytes], (packed.dtype,), like=x)
    check_tensor("scales", scales, [N, groups], like=x)
    if zeros is not None:
        if bits == 8:
            raise ValueError("zeros must be None for 8-bit codes, which are symmetric")
        check_tensor("zeros", zeros, [N, groups], (torch.uint8,), like=x)
    out = x.new_empty(T, N)
    if out.numel() == 0:
        return out
    slices = group or 32  # of a row with one scale: any will do
    if tiles is None and INTERPRETED.value:
        columns = max(triton.next_power_of_2(K), slices)
        tiles = Tiles(min(triton.next_power_of_2(N), max((1 << 20) // columns, 1)), columns, 1, 1)
    elif tiles is None:
        tiles = quantized_tiles(N, K, T, slices, bits, gpu_of(x), x.element_size())
    grid = (triton.cdiv(N, tiles.rows),)
    options = launch_options(tiles.num_warps, tiles.num_stages, pdl)
    constants: dict[str, Any] = {
        "BN": tiles.rows,
        "NG": tiles.columns // slices,
        "GROUP": slices,
        "BITS": bits,
        "BY_ROW": group is None,
        "STAGES": tiles.num_stages,
        "PDL": pdl,
    }
    if T == 1:
        quantized_gemv_kernel[grid](
            x, packed, scales, zeros, out, N, K, row_bytes, groups, **constants, **options
        )
    else:
        quantized_gemm_small_kernel[grid](
            x, packed, scales, zeros, out, N, K, T, row_bytes, groups,
            BT=padded_rows(T, bool(torch.version.hip)), DOT=dot_dtype(x.dtype),
            **constants, **options,
        )  # fmt: skip
    return out


def quantized_gemv_cost(
    rows: int,
    width: int,
    out: int,
    bits: int,
    group: int | None,
    *,
    zeros: bool = False,
    scale_bytes: float = 2.0,
    activation_bytes: float = 2.0,
) -> OpCost:
    """FLOPs and bytes: weights are the packed codes, their scales and zeros."""
    groups = out * (width // group if group else 1)
    return OpCost(
        "quantized_gemv",
        flops=2 * rows * out * width,
        weight_bytes=out * width * bits / 8 + groups * (scale_bytes + zeros),
        activation_bytes=rows * (width + out) * activation_bytes,
    )


def aot_cases() -> list[AotCase]:
    """bfloat16: 8 bits by row and 4 bits in groups of 32 with every tile, other groups with those
    of one product; float32, and a dependent launch of each kernel."""
    wanted: dict[tuple[Any, ...], list[str]] = {}
    for kind, bits, group, zeros in (
        ("bf16", 8, None, False),
        ("bf16", 8, 128, False),
        ("bf16", 4, 32, True),
        ("bf16", 4, 64, False),
        ("fp32", 8, None, False),
    ):
        for target, gpu in GPUS.items():
            names = LINEAR if kind == "bf16" and group in (None, 32) else ("qkv",)
            for out, width in (shape for name in names for shape in SHAPES[name]):
                for rows in (1, 8, 16):
                    padded = rows if rows == 1 else padded_rows(rows, gpu.hip)
                    tiles = quantized_tiles(
                        out, width, rows, group or 32, bits, gpu, 2 if kind == "bf16" else 4
                    )
                    targets = wanted.setdefault((kind, bits, group, zeros, padded, tiles), [])
                    if target not in targets:
                        targets.append(target)
    cases = [
        _case(kind, bits, group, zeros, rows, tiles, tuple(targets))
        for (kind, bits, group, zeros, rows, tiles), targets in wanted.items()
    ]
    cases += [
        _case(
            "bf16",
            4,
            32,
            True,
            rows,
            Tiles(16, 512 if rows > 1 else 1024, 4, 8),
            PDL_TARGETS,
            pdl=True,
        )
        for rows in (1, 8)
    ]
    return cases


def _case(
    kind: str,
    bits: int,
    group: int | None,
    zeros: bool,
    rows: int,
    tiles: Tiles,
    targets: tuple[str, ...],
    pdl: bool = False,
) -> AotCase:
    kernel = quantized_gemv_kernel if rows == 1 else quantized_gemm_small_kernel
    signature = {"X": f"*{kind}", "W": "*i8" if bits == 8 else "*u8", "SCALES": "*bf16"}
    signature |= {"ZEROS": "*u8"} if zeros else {}
    signature |= {"OUT": f"*{kind}", "N": "i32", "K": "i32"}
    signature |= {"T": "i32"} if rows > 1 else {}
    constants: dict[str, Any] = {
        "BN": tiles.rows,
        "NG": tiles.columns // (group or 32),
        "GROUP": group or 32,
        "BITS": bits,
        "BY_ROW": group is None,
        "STAGES": tiles.num_stages,
        "PDL": pdl,
    }
    constants |= {} if zeros else {"ZEROS": None}
    constants |= {"BT": rows, "DOT": DTYPES[kind]} if rows > 1 else {}
    by = f"groups of {group}" if group else "rows"
    return AotCase(
        f"{kind} int{bits} by {by} {tiles.rows}x{tiles.columns} {rows} rows{' pdl' * pdl}",
        kernel,
        signature | {"row_bytes": "i32", "groups": "i32"},
        constants,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        aligned=("N", "K", "row_bytes"),
        targets=targets,
    )
