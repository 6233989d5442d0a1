"""RMSNorm, alone and joined to the addition before it (https://arxiv.org/abs/1910.07467).

    out[r] = weight · x[r] / sqrt(mean(x[r]²) + eps)             x [rows, D], weight [D]
    sum = x + residual, out = norm(sum)                          add_rms_norm

A row is read once and stays in registers: the mean needs all of it before its first element can
be written. `add_rms_norm` reads two rows and writes two, where an addition and a norm would read
three and write two. Both compute in float32 and round where torch does: x / rms to x's dtype,
then the product with the weight.

Price: a row must fit into one program, so D is at most 65,536.
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

MAX_WIDTH = 65_536


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The definition, in the dtype of x: x [..., D], weight [D] → [..., D]."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x, residual [..., D], weight [D] → the norm of x + residual, and x + residual [..., D]."""
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


@triton.jit
def rms_norm_kernel(
    X, RESIDUAL, WEIGHT, OUT, SUM, rows, inner, stride_outer, stride_inner, eps,
    D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows a program. Row r of X starts at (r // inner) · stride_outer + (r % inner) ·
    stride_inner; all other tensors are dense. WIDTH: the power of two from D on."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    weight = tl.load(WEIGHT + column, mask=column < D, other=0.0).to(tl.float32)
    if PDL:  # weights are nobody's output: they need no waiting
        launch_dependents()
        wait_for_launcher()
    inside = (row < rows)[:, None] & (column < D)[None, :]
    dense = row.to(tl.int64)[:, None] * D + column[None, :]
    start = (row // inner).to(tl.int64) * stride_outer + (row % inner).to(tl.int64) * stride_inner
    x = tl.load(X + start[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL is not None:
        x += tl.load(RESIDUAL + dense, mask=inside, other=0.0).to(tl.float32)
        rounded = to_dtype(x, SUM.dtype.element_ty)
        tl.store(SUM + dense, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)
    h = to_dtype(x * scale[:, None], OUT.dtype.element_ty).to(tl.float32)
    tl.store(OUT + dense, to_dtype(weight[None, :] * h, OUT.dtype.element_ty), mask=inside)


class Tiles(NamedTuple):
    """What the kernel is compiled for."""

    rows: int  # of one program
    width: int  # the power of two from D on
    num_warps: int


def norm_tiles(D: int) -> Tiles:
    """About 1,024 elements a program, or one row of more. Not measured on a GPU yet."""
    width = triton.next_power_of_2(D)
    return Tiles(max(1024 // width, 1), width, min(max(width // 512, 2), 32))


def interpreter_tiles(D: int, rows: int) -> Tiles:
    """All rows at once, up to a million elements."""
    width = triton.next_power_of_2(D)
    return Tiles(min(max(2**20 // width, 1), triton.next_power_of_2(rows)), width, 1)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, pdl: bool = False, tiles: Tiles | None = None
) -> Tensor:
    """x [..., D] · weight [D] / rms(x) → [..., D], contiguous, of x's dtype.

    The last dimension must be dense. pdl: programmatic dependent launch, compute capability 9.0
    and newer (see the package's words). Raises `ValueError` for shapes, dtypes or devices that do
    not fit.
    """
    return _launch(x, None, weight, eps, pdl, tiles)[0]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    pdl: bool = False,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of x + residual [..., D], and the sum itself; both of x's dtype."""
    check_tensor("x", x, _any_shape(x), contiguous=False)
    check_tensor("residual", residual, x.shape, (x.dtype,), like=x)
    return _launch(x, residual, weight, eps, pdl, tiles)


def _any_shape(x: Tensor) -> list[None]:
    """Of one dimension at least; what is no tensor is left to `check_tensor`."""
    return [None] * max(x.dim() if isinstance(x, Tensor) else 1, 1)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, pdl: bool, tiles: Tiles | None
) -> tuple[Tensor, Tensor]:
    check_tensor("x", x, _any_shape(x), contiguous=False)
    D = x.shape[-1]
    check_range("the last dimension of x", D, 1, MAX_WIDTH)
    check_tensor("weight", weight, [D], like=x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.dim() > 3 or x.dim() == 1:  # rows that one or two strides cannot walk
        x = x.contiguous().view(-1, D)
    total = out if residual is None else torch.empty_like(out)
    rows, inner = out.numel() // D, x.shape[1] if x.dim() == 3 else 1
    if tiles is None:
        tiles = interpreter_tiles(D, rows) if INTERPRETED.value else norm_tiles(D)
    strides = (x.stride(0), x.stride(1) if x.dim() == 3 else 0)
    if rows:
        rms_norm_kernel[(triton.cdiv(rows, tiles.rows),)](
            x, residual, weight, out, total, rows, inner, *strides, eps,
            D=D, ROWS=tiles.rows, WIDTH=tiles.width, PDL=pdl,
            **launch_options(tiles.num_warps, 1, pdl),
        )  # fmt: skip
    return out, total


def rms_norm_cost(
    rows: int, D: int, *, add: bool = False, element: ElementBytes | None = None
) -> OpCost:
    """Of `rms_norm` over rows × D elements; add: of `add_rms_norm`."""
    e = element if element is not None else ElementBytes()
    passes, flops = (4, 5) if add else (2, 4)  # square, sum, scale, weight (and the addition)
    name = "add_rms_norm" if add else "rms_norm"
    return OpCost(name, flops * rows * D, D * e.weight, 0, passes * rows * D * e.activation)


def aot_cases() -> list[AotCase]:
    """Llama-1B's and SmolLM2's widths, and the head width of models that norm q and k."""
    cases = []
    for D, dtype, add, pdl in (
        (2048, "bf16", False, False),
        (2048, "bf16", True, False),
        (2048, "fp32", False, False),
        (576, "bf16", False, False),
        (576, "bf16", True, False),
        (128, "bf16", False, False),
        (8192, "bf16", False, False),
        (2048, "bf16", False, True),
    ):
        names = ("X", "RESIDUAL", "WEIGHT", "OUT", "SUM") if add else ("X", "WEIGHT", "OUT", "SUM")
        signature = dict.fromkeys(names, f"*{dtype}")
        signature |= dict.fromkeys(("rows", "inner", "stride_outer", "stride_inner"), "i32")
        rows, width, warps = norm_tiles(D)
        constants = {"D": D, "ROWS": rows, "WIDTH": width, "PDL": pdl}
        cases.append(
            AotCase(
                f"{dtype} D={D}{' added' if add else ''}{' pdl' if pdl else ''}",
                rms_norm_kernel,
                signature | {"eps": "fp32"},
                constants if add else constants | {"RESIDUAL": None},
                num_warps=warps,
                num_stages=1,
                aligned=("stride_outer", "stride_inner"),
                targets=NVIDIA[1:] if pdl else TARGETS,
                options={"launch_pdl": True} if pdl else {},
            )
        )
    return cases
