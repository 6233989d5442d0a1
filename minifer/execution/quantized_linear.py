"""Products with weights of 4 or 8 bits on a CPU, by what torch brings.

bfloat16 and few tokens take torch's packed kernels, which read the codes and nothing else:

- 4 bits: `_weight_int4pack_mm_for_cpu`. It wants scales in bfloat16 and (code − 8) · scale + zero;
  rounding the two costs up to 2**-8 of what they say, 0.2 % on average; codes stay as they are.
- 8 bits: `_weight_int8pack_mm`, one scale a row. Groups of 32 are quantised again, per row: a
  weight is then off by up to 1/254 of the greatest of its row.

Everything else multiplies by dequantised slices (`sliced_linear`): exact weights, any dtype and
any group, some megabytes at a time. In float32 that is the only way torch has that is not slower
still, and much slower than a float32 model: it is there to be right.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minifer.weights.quantized import QuantizedWeight, quantize, unpack_nibbles

_SLICE = 1 << 21  # weights dequantised at a time: 8 MB in float32
_FEW_TOKENS = 96  # above, reading codes once a tile costs more than dequantising them once
_INT4_GROUPS = (32, 64, 128, 256)
_INT4_ROWS = 16  # a tile of the kernel


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """x [T, K] · W [N, K]ᵀ + bias [N] → [T, N] in x's dtype, by the fastest of the ways above."""
    few = x.dtype == torch.bfloat16 and x.shape[0] <= _FEW_TOKENS
    if few and can_pack(weight):
        out = packed_linear(x, weight)
        return out if bias is None else out + bias
    return sliced_linear(x, weight, bias)


def quantized_linear_reference(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None
) -> Tensor:
    """The slow twin: the whole matrix in float32."""
    bias = None if bias is None else bias.float()
    return F.linear(x.float(), weight.dequantize(), bias).to(x.dtype)


def sliced_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Dequantise some rows to x's dtype, multiply, forget them."""
    N, K = weight.shape
    step = max(1, _SLICE // K)
    if step >= N:
        return F.linear(x, weight.dequantize(x.dtype), bias)
    out = x.new_empty(x.shape[0], N)
    for start in range(0, N, step):
        rows = slice(start, start + step)
        part = None if bias is None else bias[rows]
        out[:, rows] = F.linear(x, weight.rows(rows, x.dtype), part)
    return out


def can_pack(weight: QuantizedWeight) -> bool:
    """Whether torch has a packed kernel for it. Any 8 bits can be scaled by rows."""
    on_cpu = weight.device.type == "cpu"
    if weight.bits == 8:
        return on_cpu
    return on_cpu and weight.group_size in _INT4_GROUPS and weight.shape[0] % _INT4_ROWS == 0


def packed_linear(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """x bfloat16 [T, K]. The packed form is made at the first call and kept beside the codes."""
    if weight.packed is None:
        weight.packed = _pack_int4(weight) if weight.bits == 4 else _pack_int8(weight)
    codes, scale = weight.packed
    x = x.contiguous()
    if weight.bits == 4:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, codes, weight.group_size, scale)
    return torch.ops.aten._weight_int8pack_mm(x, codes, scale)


def packed_error(weight: QuantizedWeight) -> Tensor:
    """What the packed kernels multiply by minus what the codes say, float32 [N, K]."""
    if weight.bits == 8:
        codes, scale = _pack_int8(weight)
        return codes.float() * scale.float()[:, None] - weight.dequantize()
    _, pair = _pack_int4(weight)
    scale, zero = (part.float().t()[..., None] for part in pair.unbind(-1))  # [N, groups, 1]
    codes = unpack_nibbles(weight.codes).unflatten(1, (-1, weight.group_size))
    return ((codes.float() - 8) * scale + zero).flatten(1) - weight.dequantize()


def _pack_int4(weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """Codes in the kernel's order; bfloat16 [K/group, N, 2], scale and what a code of 8 means."""
    codes = unpack_nibbles(weight.codes).to(torch.int32)
    scale = weight.scale.float()
    zero = 8 * scale if weight.zero is None else weight.zero.float() + 8 * scale
    pair = torch.stack((scale, zero), dim=-1).transpose(0, 1).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return packed, pair.to(torch.bfloat16)


def _pack_int8(weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """int8 [N, K] and bfloat16 [N]."""
    if weight.group_size == weight.shape[1]:
        return weight.codes, weight.scale[:, 0].to(torch.bfloat16)
    N, K = weight.shape
    codes = torch.empty(N, K, dtype=torch.int8)
    scale = torch.empty(N, dtype=torch.bfloat16)
    step = max(1, _SLICE // K)
    for rows in (slice(start, start + step) for start in range(0, N, step)):
        again = quantize(weight.rows(rows), 8, K)
        codes[rows], scale[rows] = again.codes, again.scale[:, 0]
    return codes, scale
