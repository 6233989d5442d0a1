"""The three products of a transformer, each by the kernel that suits the number of rows.

    rows         1                2 … 16               17 …
    linear       gemv             gemm_small           gemm
    norm_linear  norm_gemv        norm_gemv (dots)     rms_norm, then gemm
    gated        gate_up          gate_up (dots)       rms_norm, gemm, silu_mul

Up to 16 rows a product takes as long as its weights take to arrive, so what stands around it is
fused; beyond, a norm in every program would cost more than a kernel of its own.
"""

from __future__ import annotations

from torch import Tensor

from minifer.kernels.checks import check_tensor
from minifer.kernels.gate_up import gate_up, silu_mul
from minifer.kernels.gemm import gemm
from minifer.kernels.gemm_small import MOST_ROWS, gemm_small
from minifer.kernels.gemv import gemv
from minifer.kernels.norm_gemv import norm_gemv
from minifer.kernels.rms_norm import rms_norm


def _rows(x: Tensor) -> int:
    check_tensor("x", x, [None, None])
    return x.shape[0]


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    pdl: bool = False,
) -> Tensor:
    """x [T, in] · weight [out, in]ᵀ + bias [out] (+ residual [T, out]) → [T, out].

    pdl: programmatic dependent launch, see `gemv`. Raises `ValueError` for what does not fit.
    """
    if _rows(x) == 1:
        return gemv(x, weight, bias, residual, pdl=pdl)
    if _rows(x) <= MOST_ROWS:
        return gemm_small(x, weight, bias, residual, pdl=pdl)
    return gemm(x, weight, bias, residual, pdl=pdl)


def norm_linear(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    pdl: bool = False,
) -> Tensor:
    """`linear` of RMSNorm: x [T, D], norm [D], weight [out, D], bias [out] → [T, out]."""
    if _rows(x) <= MOST_ROWS:
        return norm_gemv(x, norm, eps, weight, bias, pdl=pdl)
    return gemm(rms_norm(x, norm, eps, pdl=pdl), weight, bias, pdl=pdl)


def gated(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    pdl: bool = False,
) -> Tensor:
    """x [T, D], norm [D], weight [2 F, D], gate's rows first → silu(gate) · up [T, F]."""
    if _rows(x) <= MOST_ROWS:
        return gate_up(x, norm, eps, weight, bias, pdl=pdl)
    return silu_mul(gemm(rms_norm(x, norm, eps, pdl=pdl), weight, bias, pdl=pdl), pdl=pdl)
