"""RMSNorm joined to the product: against float64, and no further from it than torch's bfloat16."""

import pytest
import torch
from kernel_helpers import Poison, assert_rounded, random_tensor

from minifer.execution.backend import TorchBackend
from minifer.kernels.gemm_small import gemm_small, gemm_small_tiles
from minifer.kernels.gemv import gemv, gemv_tiles
from minifer.kernels.norm_gemv import norm_gemv, norm_gemv_cost, norm_gemv_reference
from minifer.kernels.products import GPUS
from minifer.kernels.rms_norm import rms_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


def rounded_norm(x, norm):
    """The norm as torch rounds it, float64: what the product reads."""
    return TorchBackend().rms_norm(x, norm, EPS).double()


def check(rows, out, width, dtype, *, biased=True, tiles=None, scale=1.0):
    with Poison() as memory:
        x = memory.place(random_tensor(rows, width, seed=1, dtype=dtype, scale=scale))
        norm = memory.place(random_tensor(width, seed=2, dtype=dtype))
        weight = memory.place(random_tensor(out, width, seed=3, dtype=dtype))
        bias = memory.place(random_tensor(out, seed=4, dtype=dtype)) if biased else None
        y = norm_gemv(x, norm, EPS, weight, bias, tiles=tiles)
    added = 0 if bias is None else bias.double()
    if dtype == torch.float32:
        arguments = [a.double() for a in (x, norm)]
        exact = norm_gemv_reference(*arguments, EPS, weight.double()) + added
    else:
        exact = rounded_norm(x, norm) @ weight.double().T + added
    terms = rounded_norm(x, norm).abs() @ weight.double().abs().T
    # A norm that another order of summation rounds the other way: one term off by a unit.
    flip = 0 if dtype == torch.float32 else rounded_norm(x, norm).abs().amax(-1, keepdim=True)
    eps = torch.finfo(dtype).eps
    assert_rounded(y, exact, 2 * terms + 2**22 * eps * flip * weight.double().abs().amax(-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 9, 16])
@pytest.mark.parametrize(("out", "width"), [(1, 1), (33, 31), (100, 77)])
def test_ragged_shapes_in_poisoned_memory(rows, out, width, dtype):
    check(rows, out, width, dtype)


def test_without_a_bias():
    check(1, 33, 31, torch.float32, biased=False)
    check(5, 33, 31, torch.float32, biased=False)


def test_a_product_of_smollm2():
    check(1, 96, 576, torch.float32)
    check(16, 96, 576, torch.float32)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("target", GPUS)
def test_the_tiles_of_a_gpu(target, itemsize):
    tiles = gemv_tiles(3072, 2048, itemsize, GPUS[target])
    check(1, tiles.rows + 1, 2 * tiles.columns + 3, torch.float32, tiles=tiles)
    tiles = gemm_small_tiles(3072, 2048, itemsize, GPUS[target])
    check(5, 17, 2 * tiles.columns + 3, torch.float32, tiles=tiles)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_activations_do_not_overflow(dtype):
    check(1, 33, 100, dtype, scale=1e4)
    check(3, 33, 100, dtype, scale=1e4)


def test_a_row_of_zeros_is_the_bias():
    x, weight, bias = torch.zeros(2, 50), random_tensor(9, 50, seed=1), random_tensor(9, seed=2)
    for rows in (1, 2):
        y = norm_gemv(x[:rows], torch.ones(50), EPS, weight, bias)
        assert torch.equal(y, bias.expand(rows, 9))


@pytest.mark.parametrize("rows", [1, 7])
def test_one_kernel_computes_what_two_do(rows):
    """Up to the order in which a row's squares are added."""
    x, norm = (random_tensor(*s, seed=5, dtype=torch.bfloat16) for s in ((rows, 96), (96,)))
    weight = random_tensor(40, 96, seed=6, dtype=torch.bfloat16)
    product = gemv if rows == 1 else gemm_small
    two = product(rms_norm(x, norm, EPS), weight)
    assert_rounded(norm_gemv(x, norm, EPS, weight), two.double())


@pytest.mark.parametrize("rows", [1, 12])
def test_bfloat16_is_no_further_from_float64_than_torch(rows):
    ours, torchs = [], []
    for seed in range(0, 40, 4):
        x = random_tensor(rows, 256, seed=seed, dtype=torch.bfloat16)
        norm = (1 + random_tensor(256, seed=seed + 1, scale=0.1)).bfloat16()
        weight = random_tensor(200, 256, seed=seed + 2, dtype=torch.bfloat16)
        bias = random_tensor(200, seed=seed + 3, dtype=torch.bfloat16)
        arguments = [a.double() for a in (x, norm, weight, bias)]
        exact = norm_gemv_reference(*arguments[:2], EPS, *arguments[2:])
        ours.append((norm_gemv(x, norm, EPS, weight, bias) - exact).square().mean())
        theirs = TorchBackend().norm_linear(x, norm, EPS, weight, bias)
        torchs.append((theirs - exact).square().mean())
    # The same roundings; which way a few of them go is the order of a sum.
    assert sum(ours) ** 0.5 <= 1.01 * sum(torchs) ** 0.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norm": torch.ones(5)}, r"norm must have shape \[6\], got \[5\]"),
        ({"norm": torch.ones(6).bfloat16()}, "dtype must be the same.*norm torch.bfloat16"),
        ({"x": torch.ones(17, 6)}, "rows of x must be from 0 to 16, got 17"),
        ({"bias": torch.ones(6)}, r"bias must have shape \[4\]"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    arguments = {"x": torch.ones(2, 6), "norm": torch.ones(6), "eps": EPS}
    with pytest.raises(ValueError, match=words):
        norm_gemv(**{**arguments, "weight": torch.ones(4, 6), **change})


def test_cost_counts_the_norm_once():
    cost = norm_gemv_cost(1, 2048, 3072)
    assert cost.flops == 2 * 2048 * 3072 + 4 * 2048
    assert cost.weight_bytes == 2 * (2048 * 3072 + 2048)
