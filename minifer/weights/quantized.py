"""Weights of 4 or 8 bits: codes, and scales that groups of columns share.

    W[n, k] = code[n, k] · scale[n, g] (+ zero[n, g]),  g = k // group_size         W [N, K]

These are the numbers of a GGUF file's Q4_0, Q4_1 and Q8_0 blocks, laid out as plain tensors, and
what `quantize` makes of any matrix. What multiplies by them is `minifer.execution`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

QUANTIZE_GROUP = 32  # columns that share a scale in a GGUF block
_AT_ONCE = 1 << 20  # weights that are in float32 while they are quantised
_SMALLEST_NORMAL = torch.finfo(torch.float16).smallest_normal
_LARGEST = torch.finfo(torch.float16).max


class QuantizedWeight(nn.Module):
    """A matrix [N, K] in codes; it stands where a `Parameter` would (`Linear.weight`).

    codes: for 4 bits uint8 [N, K/2], column 2j in the low nibble and 2j + 1 in the high one, each
        0 … 15; for 8 bits int8 [N, K].
    scale: float16 [N, K/group_size] (float32 where float16 cannot hold the numbers).
    zero: as scale, what a code of 0 stands for; None where that is 0 (8 bits).

    packed: what a back end made of them for its kernels, or None.

    The tensors are buffers: they are not trained, and `model.to(dtype)` moves them but leaves
    their numbers alone. Raises `ValueError` for tensors that do not fit together.
    """

    bits: int
    group_size: int
    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    packed: tuple[Tensor, ...] | None

    def __init__(self, codes: Tensor, scale: Tensor, zero: Tensor | None = None) -> None:
        super().__init__()
        self.bits = 4 if codes.dtype == torch.uint8 else 8
        if codes.dtype not in (torch.uint8, torch.int8):
            raise ValueError(f"codes must be uint8 for 4 bits, int8 for 8 bits, got {codes.dtype}")
        if codes.dim() != 2 or scale.dim() != 2 or codes.shape[0] != scale.shape[0]:
            raise ValueError(
                "codes and scale must be matrices with a row for each row of the weight, got "
                f"{list(codes.shape)} and {list(scale.shape)}"
            )
        width = codes.shape[1] * (2 if self.bits == 4 else 1)
        if not scale.shape[1] or width % scale.shape[1]:
            raise ValueError(
                f"scale must have a column for each group of the {width} columns, "
                f"got {list(scale.shape)}"
            )
        if zero is not None and zero.shape != scale.shape:
            raise ValueError(
                f"zero must have scale's shape {list(scale.shape)}, got {list(zero.shape)}"
            )
        self.group_size = width // scale.shape[1]
        self.shape = torch.Size((codes.shape[0], width))
        self.packed = None
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("zero", zero)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The whole matrix [N, K]; computed in float32, rounded to dtype once."""
        return _dequantize(self.codes, self.scale, self.zero, dtype)

    def rows(self, ids: Tensor | slice, dtype: torch.dtype = torch.float32) -> Tensor:
        """Rows ids [T] (or a slice of T) → [T, K]: the look-up of an embedding."""
        zero = None if self.zero is None else self.zero[ids]
        return _dequantize(self.codes[ids], self.scale[ids], zero, dtype)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> QuantizedWeight:
        """The weight with its rows reordered or copied: `change` sees codes, scale and zero."""
        zero = None if self.zero is None else change(self.zero)
        return QuantizedWeight(change(self.codes), change(self.scale), zero)

    def numel(self) -> int:
        """Numbers the matrix holds, N · K."""
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scale and zero."""
        return sum(tensor.nbytes for tensor in self.buffers())

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedWeight:
        """Moves with its model, but keeps its numbers: a rounded scale is another weight."""
        self.packed = None
        for name, tensor in self._buffers.items():
            if tensor is not None:
                moved = fn(tensor)
                same = moved.dtype == tensor.dtype
                self._buffers[name] = moved if same else tensor.to(moved.device)
        return self

    def extra_repr(self) -> str:
        N, K = self.shape
        return f"{N} × {K}, bits={self.bits}, group_size={self.group_size}"


Weight = Tensor | QuantizedWeight


def dense(weight: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix [N, K] as it is, or what its codes stand for in dtype."""
    return weight.dequantize(dtype) if isinstance(weight, QuantizedWeight) else weight


def quantize(weight: Tensor, bits: int, group_size: int = QUANTIZE_GROUP) -> QuantizedWeight:
    """weight [N, K] → codes of `bits` bits with a scale for every `group_size` columns.

    4 bits span a group's least to its greatest weight in 15 steps, as Q4_1 does; 8 bits are
    symmetric, 127 steps to its greatest magnitude. Codes are chosen after scale and zero were
    rounded, so a weight is off by half a scale, or at a group's ends by what rounding moved them.
    Scales are float16 unless one would overflow or lose bits to underflow; then all are float32.

    Raises `ValueError`: bits not 4 or 8, a group that does not divide K, a weight that is not
    finite.
    """
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, got {bits}")
    if weight.dim() != 2:
        raise ValueError(f"weight must be a matrix, got the shape {list(weight.shape)}")
    N, K = weight.shape
    if group_size < 1 or K % group_size or (bits == 4 and K % 2):
        raise ValueError(
            f"group_size must divide the {K} columns of the weight"
            f"{', an even number for 4 bits' if bits == 4 else ''}, got {group_size}"
        )
    grouped = weight.detach().view(N, K // group_size, group_size)
    low, high = grouped.amin(-1).float(), grouped.amax(-1).float()
    if not (low.isfinite() & high.isfinite()).all():
        raise ValueError("weight must be finite: a NaN or an infinity has no code")
    zero: Tensor | None = None
    if bits == 4:
        scale, zero = _in_float16((high - low) / 15, low)
        codes = torch.empty(N, K // 2, dtype=torch.uint8, device=weight.device)
    else:
        scale, _ = _in_float16(torch.maximum(-low, high) / 127)
        codes = torch.empty(N, K, dtype=torch.int8, device=weight.device)
    rows = max(1, _AT_ONCE // K)
    for part in (slice(i, i + rows) for i in range(0, N, rows)):  # what is held twice is this
        steps = grouped[part].float()
        if zero is not None:
            steps = ((steps - zero[part].float()[..., None]) / _divisor(scale[part])).round_()
            codes[part] = pack_nibbles(steps.clamp_(0, 15).to(torch.uint8).flatten(1))
        else:
            codes[part] = (steps / _divisor(scale[part])).round_().clamp_(-127, 127).flatten(1)
    return QuantizedWeight(codes, scale, zero)


def concatenate(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Matrices [N_i, K] one below the other. Raises `ValueError` where their codes differ."""
    if not can_concatenate(parts):
        raise ValueError(f"parts must share width, bits and groups, got {list(parts)}")
    if len(parts) == 1:
        return parts[0]
    zeros = [part.zero for part in parts if part.zero is not None]
    return QuantizedWeight(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat(zeros) if zeros else None,
    )


def can_concatenate(parts: Sequence[QuantizedWeight]) -> bool:
    """Whether one weight can hold them: equal width, bits, groups, all or none with a zero."""
    return len({(p.shape[1], p.bits, p.group_size, p.zero is None) for p in parts}) == 1


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 codes 0 … 15 [N, K] → [N, K/2]: even columns in the low nibble, odd in the high."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """[N, K/2] → uint8 codes [N, K]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def quantized_weights(model: nn.Module) -> Iterator[tuple[str, QuantizedWeight]]:
    """The matrices of a model that are codes, under the names their parameters had."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedWeight):
            yield name, module


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights: parameters, codes, scales and zeros."""
    dense = sum(parameter.nbytes for parameter in model.parameters())
    return dense + sum(weight.nbytes for _, weight in quantized_weights(model))


def weight_tensors(model: nn.Module) -> list[Tensor]:
    """Whatever memory a product may read weights from: what a back end packed by now, too."""
    coded = [weight for _, weight in quantized_weights(model)]
    codes = [tensor for weight in coded for tensor in weight.buffers()]
    packed = [tensor for weight in coded for tensor in weight.packed or ()]
    return [*model.parameters(), *codes, *packed]


def set_weight(module: nn.Module, weight: QuantizedWeight) -> None:
    """Put codes where `module.weight` was. Raises `ValueError` for another shape."""
    held: Any = module.weight
    if held.shape != weight.shape:
        raise ValueError(f"weight must be {list(held.shape)}, got {list(weight.shape)}")
    del module.weight  # torch lets no module take a parameter's name
    module.weight = weight


def _dequantize(codes: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> Tensor:
    if codes.dtype == torch.uint8:
        codes = unpack_nibbles(codes)
    grouped = codes.unflatten(1, (scale.shape[1], -1)).float()
    # A product of a code and a float16 scale is exact in float32, so only the sum rounds.
    grouped.mul_(scale.float()[..., None])
    if zero is not None:
        grouped.add_(zero.float()[..., None])
    return grouped.flatten(1).to(dtype)


def _in_float16(scale: Tensor, zero: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Both in float16, or both in float32 where a scale would underflow or anything overflow."""
    zero = torch.zeros_like(scale) if zero is None else zero
    positive = scale[scale > 0]
    fits = not positive.numel() or bool(positive.min() >= _SMALLEST_NORMAL)
    fits = fits and bool(scale.max() <= _LARGEST) and bool(zero.abs().max() <= _LARGEST)
    dtype = torch.float16 if fits else torch.float32
    return scale.to(dtype), zero.to(dtype)


def _divisor(scale: Tensor) -> Tensor:
    """Scales to divide by: 1 for a group whose weights are all alike, and whose codes are 0."""
    scale = scale.float()
    return torch.where(scale > 0, scale, torch.ones_like(scale))[..., None]
