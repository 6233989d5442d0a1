"""Products with 8- and 4-bit weights: quantising, its error, and the kernel against float64."""

import pytest
import torch
from kernel_helpers import Poison, assert_rounded, random_tensor

from minifer.kernels.products import GPUS, Tiles
from minifer.kernels.quantization import dequantize, quantize_int4, quantize_int8
from minifer.kernels.quantized_gemv import (
    quantized_gemv,
    quantized_gemv_cost,
    quantized_gemv_reference,
    quantized_tiles,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = {
    "int8 by row": quantize_int8,
    "int8 groups of 64": lambda weight: quantize_int8(weight, 64),
    "int4 groups of 32": quantize_int4,
    "int4 groups of 64": lambda weight: quantize_int4(weight, 64),
    "int4 symmetric": lambda weight: quantize_int4(weight, 32, symmetric=True),
}


def check(rows, out, width, kind, dtype, *, tiles=None, scale=1.0):
    weight = KINDS[kind](random_tensor(out, width, seed=1, dtype=dtype))
    with Poison() as memory:
        x = memory.place(random_tensor(rows, width, seed=2, dtype=dtype, scale=scale))
        tensors = [None if a is None else memory.place(a) for a in weight[:3]]
        y = quantized_gemv(x, *tensors, weight.group, tiles=tiles)
    assert y.dtype == dtype
    exact = quantized_gemv_reference(x.double(), *weight)
    assert_rounded(y, exact, x.double().abs() @ dequantize(*weight, torch.float64).abs().T)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 9, 16])
def test_against_float64_in_poisoned_memory(rows, kind):
    check(rows, 33, 192, kind, torch.float32)
    check(rows, 1, 64, kind, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_16_bit_activations(kind, dtype):
    check(1, 31, 128, kind, dtype)
    check(5, 31, 128, kind, dtype)


@pytest.mark.parametrize(("out", "width"), [(1, 1), (33, 31), (100, 77)])
def test_ragged_rows_have_one_scale(out, width):
    check(1, out, width, "int8 by row", torch.float32)
    check(3, out, width, "int8 by row", torch.float32)


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_tiles_of_a_gpu(kind, target):
    group = 64 if "64" in kind else 32
    for rows in (1, 5):
        bits = 8 if "int8" in kind else 4
        tiles = quantized_tiles(3072, 2048, rows, group, bits, GPUS[target])
        check(rows, tiles.rows + 1, tiles.columns + 64, kind, torch.float32, tiles=tiles)


def test_large_activations_do_not_overflow():
    check(1, 33, 128, "int4 groups of 32", torch.float32, scale=1e4)
    check(3, 33, 128, "int8 by row", torch.bfloat16, scale=1e4)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_dependent_launch_computes_the_same(rows):
    weight = quantize_int4(random_tensor(33, 96, seed=1))
    x = random_tensor(rows, 96, seed=2)
    assert torch.equal(quantized_gemv(x, *weight, pdl=True), quantized_gemv(x, *weight))


def test_int8_by_hand():
    codes, scales, zeros, group = quantize_int8(torch.tensor([[1.27, -0.5, 0.004, 0.0]]))
    assert codes.tolist() == [[127, -50, 0, 0]]
    assert scales.item() == pytest.approx(0.01)
    assert zeros is None and group is None


def test_int4_by_hand():
    """Weights −0.5 … 1.0 in steps of 0.1 are the codes 0 … 15 around zero 5; byte j holds codes j
    and j + 16."""
    weight = torch.linspace(-0.5, 1.0, 16).repeat(2)[None]
    packed, scales, zeros, group = quantize_int4(weight)
    assert scales.item() == pytest.approx(0.1)
    assert zeros.tolist() == [[5]] and group == 32
    assert packed.tolist() == [[j | j << 4 for j in range(16)]]
    assert (dequantize(packed, scales, zeros, group) - weight).abs().max() < 1e-6


def test_the_halves_of_a_byte():
    weight = torch.cat((torch.full((16,), -0.7), torch.full((16,), 0.7)))[None]
    packed, scales, zeros, group = quantize_int4(weight, symmetric=True)
    assert packed.tolist() == [[1 | 15 << 4] * 16]
    assert (dequantize(packed, scales, zeros, group) - weight).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_off_by_half_a_step(kind, dtype):
    """One step where a zero was rounded as well, or a scale to 16 bits."""
    weight = random_tensor(20, 128, seed=3, dtype=dtype)
    quantized = KINDS[kind](weight)
    assert quantized.scales.dtype == dtype
    error = (dequantize(*quantized) - weight.float()).abs()
    step = quantized.scales.float()[..., None]
    error = error.view(*step.shape[:2], -1)
    steps = 0.501 if dtype == torch.float32 and quantized.zeros is None else 1.01
    assert (error <= steps * step).all()


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zero(kind):
    weight = torch.zeros(3, 64)
    weight[1, 3] = 1.0
    restored = dequantize(*KINDS[kind](weight))
    assert torch.equal(restored[0], torch.zeros(64)) and torch.equal(restored[2], torch.zeros(64))
    assert torch.equal(restored[1, 4:], torch.zeros(60))


X = torch.ones(2, 64)
ROWS = quantize_int8(torch.ones(4, 64))
GROUPS = quantize_int4(torch.ones(4, 64))


@pytest.mark.parametrize(
    ("x", "weight", "words"),
    [
        (torch.ones(17, 64), ROWS, "rows of x must be from 0 to 16, got 17"),
        (torch.ones(2, 32), ROWS, r"packed must have shape \[4, 32\], got \[4, 64\]"),
        (X, ROWS._replace(packed=torch.ones(4, 64)), "packed must be one of int8, uint8"),
        (X, ROWS._replace(group=16), r"group must be one of \(32, 64, 128\) for 8 bits, got 16"),
        (X, ROWS._replace(scales=torch.ones(4)), r"scales must have shape \[4, 1\]"),
        (X, ROWS._replace(zeros=torch.ones(4, 1)), "zeros must be None for 8-bit codes"),
        (X, GROUPS._replace(group=None), r"group must be one of \(32, 64\) for 4 bits, got None"),
        (X, GROUPS._replace(group=64), r"scales must have shape \[4, 1\], got \[4, 2\]"),
        (X, GROUPS._replace(zeros=torch.ones(4, 2)), "zeros must be one of uint8"),
        (torch.ones(2, 65), GROUPS, "must be a multiple of 32, got 65"),
    ],
)
def test_what_does_not_fit_is_refused(x, weight, words):
    with pytest.raises(ValueError, match=words):
        quantized_gemv(x, *weight)


@pytest.mark.parametrize(("group", "width"), [(16, 64), (32, 40), (128, 128)])
def test_what_cannot_be_quantised_is_refused(group, width):
    with pytest.raises(ValueError, match=r"group|multiple of 32"):
        quantize_int4(torch.ones(2, width), group)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_without_a_code_is_refused(kind, value):
    weight = torch.ones(2, 128)
    weight[1, 70] = value
    with pytest.raises(ValueError, match="weight must be finite"):
        KINDS[kind](weight)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_to_quantise(kind):
    quantized = KINDS[kind](torch.ones(0, 128))
    assert dequantize(*quantized).shape == (0, 128)
    assert quantized_gemv(torch.ones(1, 128), *quantized).shape == (1, 0)
    with pytest.raises(ValueError, match="last dimension of weight must be at least 1, got 0"):
        KINDS[kind](torch.ones(2, 0))


def test_cost_counts_packed_bytes():
    cost = quantized_gemv_cost(1, 2048, 3072, 4, 32, zeros=True)
    assert cost.weight_bytes == 3072 * (2048 / 2 + 64 * 3)
    assert quantized_gemv_cost(1, 2048, 3072, 8, None).weight_bytes == 3072 * (2048 + 2)


def test_tiles_hold_whole_groups():
    for gpu in GPUS.values():
        for rows, group, bits in ((1, 64, 4), (8, 128, 8), (16, 32, 4)):
            tiles = quantized_tiles(576, 576, rows, group, bits, gpu)
            assert isinstance(tiles, Tiles) and tiles.columns % group == 0
