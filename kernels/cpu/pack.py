"""Matrices in the layout of `panels.h`: sixteen rows side by side.

W [N, K] becomes ⌈N / 16⌉ panels, each of them columns after columns. N is padded to whole panels
and K to a multiple of 32, both with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minifer.weights.quantized import QuantizedWeight, unpack_nibbles

LANES = 16  # rows of a panel
GROUP = 32  # columns that share a scale
_AT_ONCE = 4096  # rows: what is made on the way stays small
F32, BF16, Q4, Q8 = range(4)  # `Kind` of panels.h


@dataclass(frozen=True)
class Panels:
    """data: uint8, the panels one after the other. rows, columns: padded. bias: float32 [rows]."""

    data: Tensor
    rows: int
    columns: int
    kind: int
    bias: Tensor | None = None


def pack(
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None = None,
    dense: torch.dtype = torch.float32,
) -> Panels:
    """weight [N, K]: float32, bfloat16, or a `QuantizedWeight`; bias [N].

    dense: the model's dtype, in which codes are multiplied out that no kernel reads. It must be
    the type of the vectors: float32 panels meet no bfloat16 ones.
    """
    rows, columns = _padded(weight)
    if bias is not None:
        bias = F.pad(bias.detach().float(), (0, rows - len(bias))).contiguous()
    kind = kind_of(weight, dense)
    data = torch.empty(packed_bytes(weight, dense), dtype=torch.uint8)
    for start in range(0, rows, _AT_ONCE):
        end = min(start + _AT_ONCE, rows)
        part = data[len(data) * start // rows : len(data) * end // rows]
        part.copy_(_panels(weight, start, end, kind))
    return Panels(data, rows, columns, kind, bias)


def kind_of(weight: Tensor | QuantizedWeight, dense: torch.dtype) -> int:
    """`Kind` of panels.h. Codes that no kernel reads are multiplied out."""
    if isinstance(weight, QuantizedWeight) and _readable(weight):
        return Q4 if weight.bits == 4 else Q8
    dtype = weight.dtype if isinstance(weight, Tensor) else dense
    return {torch.float32: F32, torch.bfloat16: BF16}[dtype]


def packed_bytes(weight: Tensor | QuantizedWeight, dense: torch.dtype) -> int:
    """Of the panels of a matrix."""
    rows, columns = _padded(weight)
    of_group = {F32: 128, BF16: 64, Q4: 20, Q8: 34}[kind_of(weight, dense)]  # 32 columns of a row
    return rows * columns // GROUP * of_group


def _padded(weight: Tensor | QuantizedWeight) -> tuple[int, int]:
    rows, columns = weight.shape
    return rows + -rows % LANES, columns + -columns % GROUP


def _panels(weight: Tensor | QuantizedWeight, start: int, end: int, kind: int) -> Tensor:
    """Rows start … end − 1 of the padded matrix as bytes."""
    held = slice(start, min(end, weight.shape[0]))
    above = end - held.stop
    if kind in (Q4, Q8):
        assert isinstance(weight, QuantizedWeight)
        return _quantized(weight.map_rows(lambda tensor: tensor[held]), above)
    if isinstance(weight, QuantizedWeight):
        rows = weight.rows(held, torch.float32 if kind == F32 else torch.bfloat16)
    else:
        rows = weight.detach()[held]
    padded = F.pad(rows, (0, -rows.shape[1] % GROUP, 0, above))
    return _columns(padded, 1 if kind == F32 else 2).view(torch.uint8).flatten()


def _readable(weight: QuantizedWeight) -> bool:
    """Whole groups with float16 scales, and zeros with 4 bits only."""
    halves = weight.scale.dtype == torch.float16
    if weight.zero is not None:
        halves = halves and weight.zero.dtype == torch.float16 and weight.bits == 4
    return halves and weight.group_size % GROUP == 0


def _columns(weight: Tensor, together: int) -> Tensor:
    """[N, K] → [N/16, K/together, 16, together], contiguous."""
    panels = weight.unflatten(0, (-1, LANES)).unflatten(2, (-1, together))
    return panels.transpose(1, 2).contiguous()


def _quantized(weight: QuantizedWeight, above: int) -> Tensor:
    repeat = weight.group_size // GROUP
    scales = [weight.scale]
    if weight.bits == 4:
        scales.append(torch.zeros_like(weight.scale) if weight.zero is None else weight.zero)
    tails = []
    for numbers in scales:
        numbers = F.pad(numbers.repeat_interleave(repeat, 1), (0, 0, 0, above))
        tails.append(_columns(numbers, 1)[..., 0])  # [panels, groups, 16]
    codes = F.pad(weight.codes, (0, 0, 0, above))
    if weight.bits == 8:
        octets = codes.view(torch.uint8) ^ 128  # 128 above the code
    else:  # two columns a byte → columns 4 apart
        octets = unpack_nibbles(codes).unflatten(1, (-1, 2, 4))
        octets = (octets[:, :, 0] | (octets[:, :, 1] << 4)).flatten(1)
    words = _columns(octets, 4).flatten(2)  # [panels, columns of words, 16 · 4]
    lanes = words.unflatten(1, (-1, GROUP * weight.bits // 32)).flatten(2)
    return _join(lanes, *tails)


def _join(*parts: Tensor) -> Tensor:
    """[panels, groups, …] each → their bytes, group by group."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1).flatten()


def interleave(gate: Panels, up: Panels) -> Panels:
    """A panel of gate's rows, then the same rows of up, and so on. Both are `pack`ed."""
    panels = gate.rows // LANES
    data = torch.stack((gate.data.view(panels, -1), up.data.view(panels, -1)), 1).flatten()
    bias = None
    if gate.bias is not None and up.bias is not None:
        bias = torch.stack((gate.bias.view(panels, -1), up.bias.view(panels, -1)), 1).flatten()
    return Panels(data, 2 * gate.rows, gate.columns, gate.kind, bias)
