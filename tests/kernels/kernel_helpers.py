"""What kernel tests share: operands in poisoned memory, and how far a result may be from float64.

A kernel that reads one element too many usually gets away with it: the next tensor lies there. So
every operand of a test lies inside a bigger buffer of NaN, and so does every output.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

MARGIN = 4096  # elements of poison before and after; a multiple of 16 bytes for every dtype
_INT_POISON = -77


class Poison:
    """Hands out tensors that lie in poisoned memory, and looks at all of it on leaving:

        with Poison() as memory:
            x, out = memory.place(values), memory.empty((3, 5), torch.float32)
            kernel(x, out)

    An input that changed, or a write outside an output, fails the test. An output is poison until
    it is written, so a hole in it is a NaN (integers: a number no kernel returns).
    """

    def __init__(self, margin: int = MARGIN) -> None:
        self._margin = margin
        self._buffers: list[tuple[Tensor, Tensor, slice]] = []  # buffer, copy, what may change

    def __enter__(self) -> Poison:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.check()

    def place(self, values: Tensor, *, writable: bool = False, gap: int = 0) -> Tensor:
        """A copy of `values` between poison. writable: the kernel may change it. gap: that many
        elements of poison after each row, so that the result is not contiguous."""
        size = values.shape[-1] if values.dim() else 1
        rows = values.reshape(-1, size) if values.numel() else values.new_empty(0, size)
        inside = rows.shape[0] * (size + gap)
        buffer = self._filled(inside, values.dtype)
        body = slice(self._margin, self._margin + inside)
        grid = buffer[body].view(rows.shape[0], size + gap)[:, :size]
        grid.copy_(rows)
        may_change = body if writable else slice(0, 0)
        self._buffers.append((buffer, buffer.clone(), may_change))
        if not gap:
            return buffer[body].view(values.shape)
        strides = [size + gap, 1]
        for length in reversed(values.shape[1:-1]):
            strides.insert(0, strides[0] * length)
        return buffer.as_strided(values.shape, strides[-values.dim() :], self._margin)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An output: contiguous, and poison itself."""
        size = int(torch.Size(shape).numel())
        buffer = self._filled(size, dtype)
        body = slice(self._margin, self._margin + size)
        self._buffers.append((buffer, buffer.clone(), body))
        return buffer[body].view(shape)

    def check(self) -> None:
        """Raises `AssertionError` where something was written that may not be."""
        for buffer, copy, may_change in self._buffers:
            same = _bits(buffer) == _bits(copy)
            same[may_change] = True
            wrong = (~same).nonzero().flatten().tolist()
            assert not wrong, f"written outside an output: {[i - self._margin for i in wrong[:8]]}"

    def _filled(self, inside: int, dtype: torch.dtype) -> Tensor:
        if dtype == torch.bool:
            value: float = True
        elif dtype.is_floating_point:
            value = float("nan")
        else:
            value = 77 if dtype == torch.uint8 else _INT_POISON
        return torch.full((inside + 2 * self._margin,), value, dtype=dtype)


def _bits(tensor: Tensor) -> Tensor:
    """NaN differs from itself, its bits do not."""
    if not tensor.dtype.is_floating_point:
        return tensor
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def ulp(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of neighbours in `dtype` around each element of `exact`, float64."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(exact.double().abs().clamp_min(info.tiny))
    return torch.ldexp(torch.full_like(exact, info.eps, dtype=torch.float64), exponent - 1)


def assert_rounded(
    out: Tensor, exact: Tensor, terms: Tensor | float = 0.0, ulps: float = 1
) -> None:
    """`out` is `exact` (float64) in its own dtype, give or take one unit in the last place.

    terms: the sum of the absolute values that were added up for each element, float64. A float32
    sum is wrong by a small multiple of their rounding, which matters where they cancel.
    """
    assert out.shape == exact.shape, f"shape {list(out.shape)}, expected {list(exact.shape)}"
    assert torch.isfinite(out).all(), f"{(~torch.isfinite(out)).sum().item()} elements not finite"
    error = (out.double() - exact.to(out.dtype).double()).abs()
    allowed = ulps * ulp(exact, out.dtype) + 4 * 2.0**-24 * terms
    worst = (error / allowed).max().item() if error.numel() else 0.0
    assert worst <= 1, f"an element is {worst:.3g} times as far from float64 as it may be"


def random_tensor(
    *shape: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Tensor:
    """Normal numbers · scale, the same for a seed on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def check_linear(
    multiply: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    rows: int,
    out: int,
    width: int,
    dtype: torch.dtype,
    *,
    added: bool = True,
    tiles: Any = None,
    scale: float = 1.0,
) -> None:
    """multiply(x [rows, width], weight [out, width], bias [out], residual [rows, out]) in poisoned
    memory is `reference` in float64, rounded. added: with bias and residual. scale: of x."""
    with Poison() as memory:
        x = memory.place(random_tensor(rows, width, seed=1, dtype=dtype, scale=scale))
        weight = memory.place(random_tensor(out, width, seed=2, dtype=dtype))
        bias = memory.place(random_tensor(out, seed=3, dtype=dtype)) if added else None
        residual = memory.place(random_tensor(rows, out, seed=4, dtype=dtype)) if added else None
        y = multiply(x, weight, bias, residual, tiles=tiles)
    arguments = [None if a is None else a.double() for a in (x, weight, bias, residual)]
    terms = [None if a is None else a.abs() for a in arguments]
    assert y.dtype == dtype
    assert_rounded(y, reference(*arguments), reference(*terms))
