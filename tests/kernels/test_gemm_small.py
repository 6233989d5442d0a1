"""The product for 2 to 16 rows against float64, and its padding."""

from functools import partial

import pytest
import torch
from kernel_helpers import check_linear, random_tensor

from minifer.kernels.gemm_small import (
    gemm_small,
    gemm_small_cost,
    gemm_small_reference,
    gemm_small_tiles,
    padded_rows,
)
from minifer.kernels.products import GPUS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


check = partial(check_linear, gemm_small, gemm_small_reference)


@pytest.mark.parametrize("rows", range(1, 17))
def test_every_number_of_rows(rows):
    check(rows, 33, 77, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("out", "width"), [(1, 1), (1, 33), (31, 1), (33, 31), (100, 77)])
def test_ragged_shapes_in_poisoned_memory(out, width, dtype):
    check(3, out, width, dtype)
    check(9, out, width, dtype, added=False)


def test_a_product_of_smollm2():
    check(16, 576, 1536, torch.float32)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("target", GPUS)
def test_the_tiles_of_a_gpu(target, itemsize):
    """Slices of `in`, two tiles and a rest, rows that are padding."""
    tiles = gemm_small_tiles(2048, 2048, itemsize, GPUS[target])
    check(5, 17, 2 * tiles.columns + 3, torch.float32, tiles=tiles)
    check(11, 17, tiles.columns + 3, torch.bfloat16, tiles=tiles)


def test_large_activations_do_not_overflow():
    check(16, 33, 100, torch.float32, scale=1e4)
    check(16, 33, 100, torch.bfloat16, scale=1e4)


def test_a_row_does_not_depend_on_its_neighbours():
    x, weight = random_tensor(16, 77, seed=1), random_tensor(33, 77, seed=2)
    among = gemm_small(x, weight)[:1]
    for others in (0.0, 1e30, float("nan")):
        x[1:] = others
        assert torch.equal(gemm_small(x, weight)[:1], among)
    # Alone it has narrower tiles, and in what order numpy sums a tile is its library's choice.
    torch.testing.assert_close(gemm_small(x[:1].contiguous(), weight), among, rtol=1e-6, atol=1e-5)


def test_rows_are_padded_to_a_matrix_instruction():
    assert [padded_rows(n, hip=False) for n in (1, 2, 8, 9, 16)] == [8, 8, 8, 16, 16]
    assert padded_rows(2, hip=True) == 16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.ones(17, 6)}, "rows of x must be from 0 to 16, got 17"),
        ({"x": torch.ones(6)}, r"x must have shape \[any, any\]"),
        ({"x": torch.ones(6, 2).T}, "x must be contiguous"),
        ({"residual": torch.ones(1, 4)}, r"residual must have shape \[2, 4\]"),
        ({"residual": torch.ones(2, 4).half()}, "dtype must be the same.*residual torch.float16"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        gemm_small(**{"x": torch.ones(2, 6), "weight": torch.ones(4, 6), **change})


def test_cost_counts_no_padding():
    cost = gemm_small_cost(3, 2048, 3072)
    assert (cost.flops, cost.weight_bytes) == (2 * 3 * 2048 * 3072, 2 * 2048 * 3072)
