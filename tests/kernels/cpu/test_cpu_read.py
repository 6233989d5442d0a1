"""Memory that is read for its speed alone is read whole."""

from __future__ import annotations

import pytest
import torch
from cpu_steps import SIZES, num_threads
from torch import Tensor

from minifer.kernels.cpu.build import load
from minifer.kernels.cpu.step import read_all

PIECE = 4096  # bytes that a thread takes at a time


def sum_of_words(data: Tensor) -> int:
    padded = torch.cat((data, data.new_zeros(-len(data) % 4)))
    return int((padded.view(torch.int32).long() & 0xFFFFFFFF).sum()) % 2**32


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("start", [0, 1, 4, 64, 100])
@pytest.mark.parametrize("size", [0, 1, 4, 63, 64, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 100_003])
def test_every_byte_counts_once(size: int, start: int, threads: int) -> None:
    """Sizes that no piece divides, and starts within a line of the cache."""
    draw = torch.Generator().manual_seed(size)
    memory = torch.randint(0, 256, (size + 200,), dtype=torch.uint8, generator=draw)
    data = memory[start : start + size]
    with num_threads(threads):
        assert read_all(load(*SIZES), data.clone()) == sum_of_words(data.clone())
        assert read_all(load(*SIZES), data) == sum_of_words(data.clone())


def test_one_bit_anywhere_is_seen() -> None:
    data = torch.zeros(5 * PIECE + 70, dtype=torch.uint8)
    for place in range(0, len(data), 61):
        data[place] = 1
        assert read_all(load(*SIZES), data) == 1 << 8 * (place % 4)
        data[place] = 0
