"""GEMV against float64: ragged shapes, poisoned memory, every dtype, tiles of a GPU."""

import pytest
import torch
from kernel_helpers import Poison, assert_rounded, random_tensor

from minifer.kernels.gemv import gemv, gemv_cost, gemv_reference, gemv_tiles
from minifer.kernels.products import GPUS, Tiles

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GPU_TILES = sorted(
    {
        gemv_tiles(out, width, itemsize, gpu)
        for out, width in ((3072, 2048), (2048, 8192), (576, 576), (128256, 2048))
        for itemsize in (2, 4)
        for gpu in GPUS.values()
    }
)


def check(out, width, dtype, *, added=True, tiles=None, scale=1.0):
    with Poison() as memory:
        x = memory.place(random_tensor(1, width, seed=1, dtype=dtype, scale=scale))
        weight = memory.place(random_tensor(out, width, seed=2, dtype=dtype))
        bias = memory.place(random_tensor(out, seed=3, dtype=dtype)) if added else None
        residual = memory.place(random_tensor(1, out, seed=4, dtype=dtype)) if added else None
        y = memory.empty((1, out), dtype)
        assert gemv(x, weight, bias, residual, y, tiles=tiles) is y
    arguments = [None if a is None else a.double() for a in (x, weight, bias, residual)]
    terms = [None if a is None else a.abs() for a in arguments]
    assert_rounded(y, gemv_reference(*arguments), gemv_reference(*terms))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("out", "width"), [(1, 1), (1, 33), (31, 1), (33, 31), (100, 77)])
def test_ragged_shapes_in_poisoned_memory(out, width, dtype):
    check(out, width, dtype)
    check(out, width, dtype, added=False)


def test_a_product_of_smollm2():
    check(576, 1536, torch.float32)
    check(96, 576, torch.bfloat16)


@pytest.mark.parametrize("tiles", GPU_TILES, ids=str)
def test_the_tiles_of_a_gpu(tiles):
    """Two tiles across and a rest, two down and a rest."""
    check(2 * tiles.rows + 1, 2 * tiles.columns + 3, torch.float32, tiles=tiles)


def test_large_activations_do_not_overflow():
    check(33, 100, torch.float32, scale=1e4)
    check(33, 100, torch.bfloat16, scale=1e4)


def test_a_vector_gives_a_vector():
    x, weight = random_tensor(7, seed=1), random_tensor(5, 7, seed=2)
    y = gemv(x, weight, residual=torch.ones(5))
    assert_rounded(y, weight.double() @ x.double() + 1, weight.double().abs() @ x.double().abs())


def test_the_residual_may_be_overwritten():
    x, weight = random_tensor(1, 70, seed=1), random_tensor(50, 70, seed=2)
    stream = random_tensor(1, 50, seed=3)
    tiles = Tiles(16, 64, 1, 1)
    expected = gemv(x, weight, residual=stream, tiles=tiles)
    gemv(x, weight, residual=stream, out=stream, tiles=tiles)
    assert torch.equal(stream, expected)


def test_a_dependent_launch_computes_the_same():
    x, weight = random_tensor(1, 70, seed=1), random_tensor(50, 70, seed=2)
    assert torch.equal(gemv(x, weight, pdl=True), gemv(x, weight))


X, W = torch.ones(1, 6), torch.ones(4, 6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.ones(2, 6)}, r"x must have shape \[1, any\], got \[2, 6\]"),
        ({"x": torch.ones(1, 5)}, r"weight must have shape \[any, 5\], got \[4, 6\]"),
        ({"x": torch.ones(1, 6, dtype=torch.int32)}, "x must be one of float32.*int32"),
        ({"x": torch.ones(1, 0), "weight": torch.ones(4, 0)}, "last dimension of x.*got 0"),
        ({"weight": W.bfloat16()}, "dtype must be the same for all.*weight torch.bfloat16"),
        ({"weight": torch.ones(6, 4).T}, "weight must be contiguous"),
        ({"weight": W.to("meta")}, "weight must be on cpu, got meta"),
        ({"bias": torch.ones(3)}, r"bias must have shape \[4\], got \[3\]"),
        ({"residual": torch.ones(4)}, r"residual must have shape \[1, 4\], got \[4\]"),
        ({"out": torch.ones(1, 5)}, r"out must have shape \[1, 4\], got \[1, 5\]"),
        ({"out": torch.ones(1, 4, dtype=torch.float16)}, "out must be one of float32"),
        ({"x": [1.0]}, "x must be a tensor, got list"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        gemv(**{"x": X, "weight": W, **change})


def test_tiles_give_every_processor_work():
    h100 = GPUS["sm_90"]
    assert gemv_tiles(3072, 2048, 2, h100)[:2] == (16, 512)
    assert gemv_tiles(2048, 2048, 2, h100)[:2] == (8, 1024)  # 128 tiles of 16 rows, 132 SMs
    assert gemv_tiles(576, 576, 2, h100)[:2] == (4, 1024)
    assert gemv_tiles(2048, 8192, 4, h100)[:2] == (8, 512)


def test_cost_is_that_of_the_shapes():
    cost = gemv_cost(2048, 128256)
    assert cost.flops == 2 * 2048 * 128256
    assert cost.weight_bytes == 525_336_576  # 525 MB: the head of Llama-3.2-1B
    assert cost.activation_bytes == 2 * (2048 + 128256)
