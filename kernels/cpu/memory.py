"""One stretch of memory for all weights, in large pages where the system has them.

A step reads every panel once, in one order. Laid one after the other the panels are a single
stream, and pages of 2 MiB spare it most of the look-ups of addresses that pages of 4 KiB cost.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

import torch
from torch import Tensor

_LINE = 64  # bytes
_LARGE_PAGE = 2 << 20


class Arena:
    """Memory of `capacity` bytes that `hold` fills from front to back. Untouched, it costs none."""

    def __init__(self, capacity: int) -> None:
        size = capacity + 2 * _LARGE_PAGE
        if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        else:
            memory = mmap.mmap(-1, size)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory alive
        self._place = -self._bytes.data_ptr() % _LARGE_PAGE

    def hold(self, data: Tensor) -> Tensor:
        """A copy of data, uint8 [n], behind what is here. Raises `ValueError` when it is full."""
        end = self._place + len(data)
        if end > len(self._bytes):
            raise ValueError(f"data must fit into the arena, got {len(data)} bytes too late")
        held = self._bytes[self._place : end]
        held.copy_(data)
        self._place = end + -end % _LINE
        return held


def prefer_large_pages(tensor: Tensor) -> None:
    """Ask for large pages where a tensor of 2 MiB or more will be touched. Linux; else nothing."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    start = tensor.data_ptr() + -tensor.data_ptr() % _LARGE_PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // _LARGE_PAGE * _LARGE_PAGE
    if end > start:
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE)
