"""Offsets beyond 2³¹ elements: 32 bits would wrap around, and read or write somewhere else.

One buffer of 2³² float16, of which the system gives only what is touched. Views begin in its
middle, so that a wrapped offset lands in it too and gives a wrong number, not a crash.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from kernel_helpers import random_tensor
from torch import Tensor

from minifer.kernels.flash_attention import flash_attention
from minifer.kernels.inject import inject
from minifer.kernels.paged_decode import paged_decode
from minifer.kernels.products import load_tile
from minifer.kernels.rms_norm import rms_norm
from minifer.kernels.rope_append import rope_append
from minifer.kernels.sample import sample

HALF, C = 2**31, 16
FAR = 2**30  # twice this is too much for 32 bits


@pytest.fixture(scope="module")
def memory() -> Tensor:
    try:
        return torch.empty(2 * HALF + 4096, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("no address space for 8.6 GB")


def apart(memory: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Random numbers with these strides, from the middle of the memory on."""
    view = memory.as_strided(shape, strides, HALF)
    view.copy_(random_tensor(*shape, seed=1, dtype=torch.float16))
    return view


# [T, H, C] with heads, or tokens, far from each other
LAYOUTS = [((2, 3, C), (C, FAR, 1)), ((3, 2, C), (FAR, C, 1))]


@pytest.mark.parametrize(("shape", "strides"), LAYOUTS, ids=["heads", "tokens"])
def test_queries_keys_and_values(memory, shape, strides):
    x = apart(memory, shape, strides)
    T, H, _ = shape
    turn = random_tensor(T, C // 2, seed=2)

    def rotated(x: Tensor) -> tuple[Tensor, ...]:
        caches = torch.zeros(2, 2, T, H, C, dtype=torch.float16)
        slots = torch.arange(T)
        return rope_append(x, x, x, turn, turn, caches[0], caches[1], slots), caches

    for got, expected in zip(rotated(x), rotated(x.contiguous()), strict=True):
        assert torch.equal(got, expected)
    cache = random_tensor(4, 4, 1, C, seed=3, dtype=torch.float16)
    table, length = torch.tensor([[1, 2]]), torch.tensor([7])

    def attended(x: Tensor) -> Tensor:
        start = torch.tensor([0, T])
        return flash_attention(x, cache, cache, table, start, length, 0.3, max_query=T)

    def decoded(x: Tensor) -> Tensor:
        return paged_decode(x, cache, cache, table.expand(T, 2), length.repeat(T), 0.3)

    assert torch.equal(attended(x), attended(x.contiguous()))
    assert torch.equal(decoded(x), decoded(x.contiguous()))


@pytest.mark.parametrize(
    ("shape", "strides"), [*LAYOUTS, ((3, C), (FAR, 1))], ids=["inner", "outer", "rows"]
)
def test_rows_to_norm(memory, shape, strides):
    x, weight = apart(memory, shape, strides), random_tensor(C, seed=2, dtype=torch.float16)
    assert torch.equal(rms_norm(x, weight, 1e-5), rms_norm(x.contiguous(), weight, 1e-5))


def test_rows_of_a_state(memory):
    h, term = apart(memory, (3, C), (FAR, 1)), random_tensor(3, C, seed=2)
    decay = random_tensor(C, seed=3).sigmoid()
    assert torch.equal(inject(h, decay, term), inject(h.contiguous(), decay, term))
    wide = memory.view(torch.float32).as_strided((3, C), (FAR // 2, 1), HALF // 2)
    wide.copy_(term)
    assert torch.equal(inject(term, decay, wide), inject(term, decay, term))


def test_rows_of_logits(memory):
    x = apart(memory, (3, 40), (FAR, 1))
    zeros, index = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    for temperature in (zeros, zeros + 1):
        got = sample(x, temperature, index, zeros + 1, index, index)
        assert torch.equal(got, sample(x.contiguous(), temperature, index, zeros + 1, index, index))


def test_blocks_of_a_large_pool(memory):
    """The last block's first element is number 2³¹ of the pool."""
    P, K = 4, 2
    count = HALF // (P * K * C) + 1
    pool = memory[HALF : HALF + count * P * K * C].view(count, P, K, C)
    new = random_tensor(P, K, C, seed=1, dtype=torch.float16)
    turn = torch.ones(P, C // 2), torch.zeros(P, C // 2)
    spare = torch.zeros(1, P, K, C, dtype=torch.float16)
    slots = torch.arange((count - 1) * P, count * P)
    pool[0], pool[-1] = 0, 0
    rope_append(new, new, new, *turn, pool, pool, slots)
    assert torch.equal(pool[-1], new) and not pool[0].any()
    rope_append(new, new, new, *turn, spare, spare, slots - (count - 1) * P)
    query = random_tensor(P, 2 * K, C, seed=2, dtype=torch.float16)
    start, length = torch.tensor([0, P]), torch.tensor([P])
    for call, more in (
        (flash_attention, (start, length, 0.3)),
        (paged_decode, (length, 0.3)),
    ):
        q, options = (query, {"max_query": P}) if call is flash_attention else (query[:1], {})
        far, near = (
            call(q, cache, cache, torch.tensor([[len(cache) - 1]]), *more, **options)
            for cache in (pool, spare)
        )
        assert torch.equal(far, near)


@triton.jit
def copy_tile(W, OUT, first, N, K, ROWS: tl.constexpr, BK: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, BK)
    tile = load_tile(W, (first + row)[:, None], column[None, :], N, K)
    tl.store(OUT + row[:, None] * BK + column[None, :], tile)


def test_rows_of_a_large_weight(memory):
    rows = HALF // C + 2
    weight = memory[HALF : HALF + rows * C].view(rows, C)
    weight[-2:] = random_tensor(2, C, seed=1, dtype=torch.float16)
    out = torch.zeros(2, C, dtype=torch.float16)
    copy_tile[(1,)](weight, out, rows - 2, rows, C, ROWS=2, BK=C)
    assert torch.equal(out, weight[-2:])
