"""Weights of 8 or 4 bits with a scale a row or a group; `quantized_gemv` multiplies by them.

    W[n, k] ≈ (code[n, k] − zero[n, g]) · scale[n, g],  g = k // group          W [out, in]

The layout of the codes is described in `quantized_gemv.py`. Plain torch: it happens once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from minifer.kernels.checks import check_range, check_tensor

_GROUPS = {8: (32, 64, 128), 4: (32, 64)}


class QuantizedWeight(NamedTuple):
    """The arguments of `quantized_gemv` after x.

    packed: int8 [out, in], or uint8 [out, in / 2] of 4-bit codes. scales [out, in / group], zeros
    uint8 as scales or None; group None is a scale a row, [out, 1].
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int | None


def quantize_int8(weight: Tensor, group: int | None = None) -> QuantizedWeight:
    """weight [out, in] → symmetric codes, round(w / scale) with scale = max |w| / 127.

    Scales are of weight's dtype; a code is off by half a scale at most. Raises `ValueError` for a
    group that does not divide `in`, and for a weight that is not finite.
    """
    grouped = _grouped(weight, group, 8)
    scales = _scales(grouped.abs().amax(-1), 127, weight.dtype)
    codes = (grouped / scales.float()[..., None]).round().clamp(-127, 127)
    return QuantizedWeight(codes.to(torch.int8).view(weight.shape), scales, None, group)


def quantize_int4(weight: Tensor, group: int = 32, symmetric: bool = False) -> QuantizedWeight:
    """weight [out, in] → codes 0 … 15 that span each group's least to greatest weight and 0.

    symmetric: zero is 8 and scale max |w| / 7. Raises `ValueError` for a group that is not 32 or 64
    or does not divide `in`, and for a weight that is not finite.
    """
    grouped = _grouped(weight, group, 4)
    if symmetric:
        scales = _scales(grouped.abs().amax(-1), 7, weight.dtype)
        zeros = torch.full_like(scales, 8, dtype=torch.float32)
    else:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scales = _scales(high - low, 15, weight.dtype)
        zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = (grouped / scales.float()[..., None]).round() + zeros[..., None]
    low_half, high_half = codes.clamp(0, 15).to(torch.uint8).chunk(2, dim=-1)
    packed = (low_half | high_half << 4).reshape(weight.shape[0], weight.shape[1] // 2)
    return QuantizedWeight(packed, scales, None if symmetric else zeros.to(torch.uint8), group)


def _grouped(weight: Tensor, group: int | None, bits: int) -> Tensor:
    """weight [out, in] → float32 [out, groups, group]."""
    check_tensor("weight", weight, [None, None])
    out, width = weight.shape
    check_range("the last dimension of weight", width, 1)
    check_group(group, width, bits)
    if not weight.isfinite().all():
        raise ValueError("weight must be finite: a NaN or an infinity has no code")
    group = group or width
    return weight.float().view(out, width // group, group)


def _scales(span: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    scales = (span / steps).to(dtype)
    return torch.where(scales > 0, scales, torch.ones_like(scales))  # all zeros, or too small


def dequantize(
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group: int | None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The weight [out, in] that the codes stand for."""
    out, groups = scales.shape
    if packed.dtype == torch.int8:
        codes = packed.view(out, groups, packed.shape[1] // groups).to(dtype)
    else:
        halves = packed.view(out, groups, packed.shape[1] // groups)
        codes = torch.cat((halves & 15, halves >> 4), dim=-1).to(dtype)
        codes = codes - (8 if zeros is None else zeros.to(dtype)[..., None])
    return (codes * scales.to(dtype)[..., None]).flatten(1)


def check_group(group: int | None, width: int, bits: int) -> None:
    """Raises `ValueError` unless scales a group (None: a row, 8 bits only) can cover a row."""
    allowed = _GROUPS[bits]
    if group is None and bits == 8:
        return
    if group not in allowed:
        raise ValueError(f"group must be one of {allowed} for {bits} bits, got {group}")
    if width % group:
        raise ValueError(f"the last dimension of weight must be a multiple of {group}, got {width}")
