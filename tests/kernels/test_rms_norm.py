"""RMSNorm against float64, and against the rounding of torch's back end."""

from __future__ import annotations

import pytest
import torch
from kernel_helpers import Poison, assert_rounded, random_tensor

from minifer.execution.backend import TorchBackend
from minifer.kernels.mega.shapes import MODELS
from minifer.kernels.rms_norm import (
    MAX_WIDTH,
    add_rms_norm,
    add_rms_norm_reference,
    norm_tiles,
    rms_norm,
    rms_norm_cost,
    rms_norm_reference,
)
from minifer.perf.costs import decode_cost

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (31, 33), (33, 31), (100, 77), (1, 2048)], ids=str)
def test_ragged_shapes_in_poisoned_memory(shape, dtype):
    with Poison() as memory:
        x = memory.place(random_tensor(*shape, seed=1, dtype=dtype))
        residual = memory.place(random_tensor(*shape, seed=2, dtype=dtype))
        weight = memory.place(random_tensor(shape[1], seed=3, dtype=dtype))
        out = rms_norm(x, weight, EPS)
        normed, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    # Two roundings, of x / rms and of the product.
    truth = rms_norm_reference(x.double(), weight.double(), EPS)
    assert_rounded(out, truth, terms=8 * truth.abs(), ulps=2)
    truth = rms_norm_reference(total.double(), weight.double(), EPS)
    assert_rounded(normed, truth, terms=8 * truth.abs(), ulps=2)


def test_the_twin_of_the_sum_is_the_twin_of_both():
    x, residual, weight = (random_tensor(5, seed=i, dtype=torch.float64) for i in range(3))
    normed, total = add_rms_norm_reference(x[None], residual[None], weight, EPS)
    assert torch.equal(total[0], x + residual)
    assert torch.equal(normed, torch.nn.functional.rms_norm(total, (5,), weight, EPS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounds_where_the_torch_back_end_rounds(dtype):
    x, weight = random_tensor(64, 100, seed=1, dtype=dtype), random_tensor(100, seed=2, dtype=dtype)
    expected = TorchBackend().rms_norm(x, weight, EPS)
    same = (rms_norm(x, weight, EPS) == expected).double().mean()
    assert same > 0.999


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_is_normed_is_the_rounded_sum(dtype):
    """As a norm after an addition would read it: to the last bit the same."""
    x, residual = (random_tensor(8, 33, seed=i, dtype=dtype) for i in (1, 2))
    weight = random_tensor(33, seed=3, dtype=dtype)
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(normed, rms_norm(total, weight, EPS))


@pytest.mark.parametrize("D", [64, 128, 576, 2048, 8192])
def test_the_tiles_of_a_gpu(D):
    tiles = norm_tiles(D)
    x, weight = random_tensor(tiles.rows + 1, D, seed=1), random_tensor(D, seed=2)
    truth = rms_norm_reference(x.double(), weight.double(), EPS)
    assert_rounded(rms_norm(x, weight, EPS, tiles=tiles), truth, terms=8 * truth.abs())


def test_heads_are_read_where_they_lie_in_a_wider_product():
    """q of one product [T, (H + 2 K) · C], as a model that norms q and k calls it."""
    with Poison() as memory:
        product = memory.place(random_tensor(7, 10 * 16, seed=1), gap=5)
        q = product.unflatten(-1, (10, 16))[:, :6]
        out = rms_norm(q, memory.place(torch.ones(16)), EPS)
    assert out.shape == (7, 6, 16) and out.is_contiguous()
    truth = rms_norm_reference(q.double(), torch.ones(16).double(), EPS)
    assert_rounded(out, truth, terms=8 * truth.abs())


def test_large_numbers_and_a_row_of_zeros():
    x = torch.tensor([[3e18, -4e18], [0.0, 0.0], [1e-30, 1e-30]])
    out = rms_norm(x, torch.ones(2), EPS)
    truth = rms_norm_reference(x.double(), torch.ones(2).double(), EPS)
    assert_rounded(out, truth, terms=8 * truth.abs())
    assert out[1].tolist() == [0, 0]


def test_one_row_has_no_influence_on_another():
    x = torch.full((5, 33), torch.nan)
    x[2] = random_tensor(33, seed=1)
    out = rms_norm(x, torch.ones(33), EPS)
    assert torch.equal(out[2], rms_norm(x[2:3], torch.ones(33), EPS)[0])


def test_no_rows_and_one_dimension():
    assert rms_norm(torch.zeros(0, 5), torch.ones(5), EPS).shape == (0, 5)
    assert rms_norm(torch.ones(5), torch.ones(5), EPS).shape == (5,)
    assert rms_norm(torch.ones(2, 3, 4, 5), torch.ones(5), EPS).shape == (2, 3, 4, 5)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((torch.ones(2, 3), torch.ones(4)), r"weight must have shape \[3\], got \[4\]"),
        ((torch.ones(2, 3).double(), torch.ones(3)), "x must be one of float32, bfloat16"),
        ((torch.ones(3, 2).T, torch.ones(3)), "last dimension of x must be dense"),
        ((torch.ones(2, 0), torch.ones(0)), "the last dimension of x must be from 1 to 65536"),
        ((torch.ones(1, MAX_WIDTH + 1), torch.ones(1)), "must be from 1 to 65536, got 65537"),
        ((torch.ones(2, 3), torch.ones(3, device="meta")), "weight must be on cpu, got meta"),
        (([1.0], torch.ones(1)), "x must be a tensor, got list"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        rms_norm(*arguments, EPS)


def test_a_residual_that_does_not_fit_is_refused():
    x = torch.ones(2, 3)
    for residual in (torch.ones(2, 4), torch.ones(2, 3).half(), torch.ones(3, 2).T):
        with pytest.raises(ValueError, match="residual must"):
            add_rms_norm(x, residual, torch.ones(3), EPS)


def test_the_cost_is_that_of_the_models_norms():
    config = MODELS["llama-1b"]
    whole = decode_cost(config, 3, 10)["norms"]
    one = rms_norm_cost(3, config.hidden_size)
    assert (2 * config.num_layers + 1) * one.flops == whole.flops
    assert (2 * config.num_layers + 1) * one.bytes == whole.bytes
    assert (
        rms_norm_cost(3, 8, add=True).activation_bytes == 2 * rms_norm_cost(3, 8).activation_bytes
    )
