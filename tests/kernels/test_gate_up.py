"""Norm, gate and up in one kernel, and silu(gate) · up alone, against float64."""

import pytest
import torch
from kernel_helpers import Poison, assert_rounded, random_tensor

from minifer.execution.backend import TorchBackend
from minifer.kernels.gate_up import (
    gate_up,
    gate_up_cost,
    gate_up_reference,
    gate_up_small_tiles,
    gate_up_tiles,
    silu_mul,
    silu_mul_cost,
    silu_mul_reference,
)
from minifer.kernels.products import GPUS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


def operands(rows, hidden, width, dtype, scale=1.0):
    x = random_tensor(rows, width, seed=1, dtype=dtype, scale=scale)
    norm = (1 + random_tensor(width, seed=2, scale=0.1)).to(dtype)
    weight = random_tensor(2 * hidden, width, seed=3, dtype=dtype, scale=width**-0.5)
    return x, norm, weight, random_tensor(2 * hidden, seed=4, dtype=dtype)


def check(rows, hidden, width, dtype, *, biased=True, tiles=None, scale=1.0):
    with Poison() as memory:
        x, norm, weight, bias = map(memory.place, operands(rows, hidden, width, dtype, scale))
        y = gate_up(x, norm, EPS, weight, bias if biased else None, tiles=tiles)
    x, norm, weight, bias = (a.double() for a in (x, norm, weight, bias))
    bias = bias if biased else torch.zeros_like(bias)
    exact = gate_up_reference(x, norm, EPS, weight, bias)
    assert y.dtype == dtype and y.shape == (rows, hidden)
    if dtype == torch.float32:
        h = norm * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        gate, up = (h.abs() @ weight.abs().T + bias.abs()).chunk(2, dim=-1)
        assert_rounded(y, exact, 8 * gate * (1 + up))
    else:  # the norm is rounded twice before the products
        assert torch.isfinite(y).all()
        assert (y - exact).abs().max() <= 4 * torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 9, 16])
@pytest.mark.parametrize(("hidden", "width"), [(1, 1), (33, 31), (50, 77)])
def test_ragged_shapes_in_poisoned_memory(rows, hidden, width, dtype):
    check(rows, hidden, width, dtype)


@pytest.mark.parametrize("rows", [1, 4])
def test_without_a_bias(rows):
    check(rows, 33, 31, torch.float32, biased=False)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("target", GPUS)
def test_the_tiles_of_a_gpu(target, itemsize):
    tiles = gate_up_tiles(8192, 2048, itemsize, GPUS[target])
    check(1, tiles.rows + 1, 2 * tiles.columns + 3, torch.float32, tiles=tiles)
    tiles = gate_up_small_tiles(8192, 2048, itemsize, GPUS[target])
    check(5, tiles.rows + 1, 2 * tiles.columns + 3, torch.float32, tiles=tiles)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_activations_do_not_overflow(dtype):
    check(1, 33, 100, dtype, scale=1e4)
    check(3, 33, 100, dtype, scale=1e4)


@pytest.mark.parametrize("rows", [1, 12])
def test_bfloat16_is_no_further_from_float64_than_torch(rows):
    x, norm, weight, bias = operands(rows, 300, 256, torch.bfloat16)
    exact = gate_up_reference(x.double(), norm.double(), EPS, weight.double(), bias.double())
    ours = (gate_up(x, norm, EPS, weight, bias) - exact).square().mean()
    torchs = (TorchBackend().norm_gate_up(x, norm, EPS, weight, bias) - exact).square().mean()
    assert ours <= torchs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 1), (17, 33), (33, 100)])
def test_silu_mul(rows, hidden, dtype):
    with Poison() as memory:
        both = memory.place(random_tensor(rows, 2 * hidden, seed=1, dtype=dtype, scale=3.0))
        y = silu_mul(both)
    assert y.dtype == dtype
    # Five float32 operations, each right to half a unit; beside 16-bit rounding they vanish.
    ulps = 5 if dtype == torch.float32 else 1
    assert_rounded(y, silu_mul_reference(both.double()), ulps=ulps)


def test_silu_of_what_an_exponential_cannot_hold():
    gate = torch.tensor([[-1e4, -200.0, -0.0, 0.0, 200.0, 1e4]])
    y = silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    assert torch.equal(y, torch.tensor([[0.0, 0.0, 0.0, 0.0, 200.0, 1e4]]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": torch.ones(5, 6)}, "rows of weight must be a multiple of 2, got 5"),
        ({"weight": torch.ones(0, 6)}, "rows of weight must be at least 2, got 0"),
        ({"bias": torch.ones(2)}, r"bias must have shape \[4\]"),
        ({"norm": torch.ones(4)}, r"norm must have shape \[6\]"),
        ({"x": torch.ones(17, 6)}, "rows of x must be from 0 to 16, got 17"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    arguments = {"x": torch.ones(2, 6), "norm": torch.ones(6), "eps": EPS}
    with pytest.raises(ValueError, match=words):
        gate_up(**{**arguments, "weight": torch.ones(4, 6), **change})


@pytest.mark.parametrize(
    ("both", "words"),
    [
        (torch.ones(2, 5), "last dimension of gate_up must be a multiple of 2, got 5"),
        (torch.ones(4, 2).T, "gate_up must be contiguous"),
        (torch.ones(4), r"gate_up must have shape \[any, any\]"),
    ],
)
def test_what_silu_mul_refuses(both, words):
    with pytest.raises(ValueError, match=words):
        silu_mul(both)


def test_costs():
    cost = gate_up_cost(2, 2048, 8192)
    assert cost.flops == 2 * 2 * 2048 * 16384 + 4 * 2 * 2048 + 5 * 2 * 8192
    assert cost.weight_bytes == 2 * (16384 * 2048 + 2048)
    assert cost.activation_bytes == 2 * 2 * (2048 + 8192)
    assert silu_mul_cost(3, 100).activation_bytes == 2 * 3 * 300
