"""The tiled product of prefill against float64, and the order of its programs."""

from functools import partial

import pytest
import torch
import triton
from kernel_helpers import check_linear

from minifer.kernels.gemm import (
    GemmTiles,
    gemm,
    gemm_cost,
    gemm_reference,
    gemm_tiles,
    grouped_tile,
)
from minifer.kernels.products import GPUS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


check = partial(check_linear, gemm, gemm_reference)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 17, 33])
@pytest.mark.parametrize(("out", "width"), [(1, 1), (33, 31), (100, 77)])
def test_ragged_shapes_in_poisoned_memory(rows, out, width, dtype):
    check(rows, out, width, dtype)
    check(rows, out, width, dtype, added=False)


def test_a_product_of_smollm2():
    check(33, 576, 1536, torch.float32)


@pytest.mark.parametrize(
    "tiles",
    sorted(
        {gemm_tiles(rows, b, g) for rows in (32, 64, 512) for b in (2, 4) for g in GPUS.values()}
    ),
    ids=str,
)
def test_the_tiles_of_a_gpu(tiles):
    check(tiles.tokens + 1, tiles.rows + 1, 2 * tiles.columns + 3, torch.float32, tiles=tiles)


def test_more_tiles_down_than_a_group_has():
    check(9 * 16 + 1, 17, 16, torch.float32, tiles=GemmTiles(16, 16, 16, 1, 1))


def test_large_activations_do_not_overflow():
    check(17, 33, 100, torch.float32, scale=1e4)
    check(17, 33, 100, torch.bfloat16, scale=1e4)


@triton.jit
def number_tiles(OUT, down, across, GROUP: triton.language.constexpr):
    program = triton.language.program_id(0)
    row, column = grouped_tile(program, down, across, GROUP)
    triton.language.store(OUT + row * across + column, program)


@pytest.mark.parametrize(("down", "across"), [(1, 5), (3, 4), (5, 1), (7, 3)])
def test_every_tile_has_one_program(down, across):
    order = torch.full((down, across), -1, dtype=torch.int32)
    number_tiles[(down * across,)](order, down, across, GROUP=2)
    assert sorted(order.flatten().tolist()) == list(range(down * across))


def test_a_group_goes_down_before_it_goes_right():
    order = torch.empty(4, 3, dtype=torch.int32)
    number_tiles[(12,)](order, 4, 3, GROUP=2)
    assert order.tolist() == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.ones(20, 5)}, r"weight must have shape \[any, 5\]"),
        ({"weight": torch.ones(4, 6).half()}, "dtype must be the same"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        gemm(**{"x": torch.ones(20, 6), "weight": torch.ones(4, 6), **change})


def test_cost_reads_each_matrix_once():
    cost = gemm_cost(512, 2048, 8192)
    assert cost.flops == 2 * 512 * 2048 * 8192
    assert cost.bytes == 2 * (2048 * 8192 + 512 * (2048 + 8192))
