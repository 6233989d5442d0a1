"""Tensors in the middle of memory full of NaN: an access beside them shows.

A kernel that reads one element too many usually gets away with it, because the next tensor lies
there. Between guard bands it reads NaN; and what it writes there is seen afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minifer.course.block_language import WILD

BAND = 512  # elements before and after


class GuardBands:
    """Places tensors, and says afterwards what happened around them."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._placed: dict[str, tuple[Tensor, Tensor, Tensor]] = {}  # view, memory, its copy
        self._known: dict[int, Tensor] = {}

    def place(self, name: str, tensor: Tensor) -> Tensor:
        """A copy with the same shape and strides, NaN around it and in the gaps between its rows
        (integers: a wild number). The same tensor twice is placed once."""
        if id(tensor) in self._known:
            return self._known[id(tensor)]
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((n - 1) * step for n, step in steps) if tensor.numel() else 0
        poison: Any = torch.nan if tensor.is_floating_point() else WILD
        memory = torch.full((extent + 2 * BAND,), poison, dtype=tensor.dtype, device=self.device)
        view = memory.as_strided(tensor.shape, tensor.stride(), BAND)
        view.copy_(tensor)
        self._placed[name] = view, memory, memory.clone()
        self._known[id(tensor)] = view
        return view

    def written_outside(self, outputs: tuple[str, ...] = ()) -> dict[str, list[int]]:
        """Name → elements that changed though they may not: of an input anywhere, of an output
        outside of it. Counted from the tensor's first element, the first eight of them."""
        found = {}
        for name, (view, memory, copy) in self._placed.items():
            changed = _bits(memory) != _bits(copy)
            if name in outputs:
                changed.as_strided(view.shape, view.stride(), BAND).fill_(False)
            if places := changed.nonzero().flatten().tolist():
                found[name] = [place - BAND for place in places[:8]]
        return found


def _bits(tensor: Tensor) -> Tensor:
    """NaN differs from itself, its bits do not."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
