"""Products with codes against float64, against their slow twin, and what packing changes."""

import pytest
import torch
import torch.nn.functional as F

from minifer.execution.backend import TorchBackend
from minifer.execution.quantized_linear import (
    can_pack,
    packed_error,
    packed_linear,
    quantized_linear,
    quantized_linear_reference,
    sliced_linear,
)
from minifer.weights.quantized import quantize

WAYS = [(4, 32), (4, 64), (8, 32), (8, 576)]


def case(bits, group, T, N=96, K=576, dtype=torch.float32):
    generator = torch.Generator().manual_seed(bits * 1000 + group + T)
    weight = quantize(torch.randn(N, K, generator=generator) * 0.05, bits, group)
    x = torch.randn(T, K, generator=generator).to(dtype)
    bias = torch.randn(N, generator=generator).to(dtype)
    return x, weight, bias


def in_float64(x, weight, bias):
    return F.linear(x.double(), weight.dequantize(torch.float64), bias.double())


@pytest.mark.parametrize(("bits", "group"), WAYS)
@pytest.mark.parametrize("T", [1, 5, 130])
def test_float32_products_are_those_of_float64(bits, group, T):
    """576 products of about 0.05 round to 2**-24 of their sum of magnitudes, 20."""
    x, weight, bias = case(bits, group, T)
    out = quantized_linear(x, weight, bias)
    assert out.dtype == torch.float32
    assert torch.allclose(out.double(), in_float64(x, weight, bias), rtol=0, atol=2e-5)
    assert torch.equal(out, quantized_linear_reference(x, weight, bias))


@pytest.mark.parametrize(("bits", "group"), WAYS)
@pytest.mark.parametrize("T", [1, 3, 16, 130])
def test_bfloat16_products_are_near_those_of_float64(bits, group, T):
    """Few tokens are packed, many are not: both are near the truth.

    The result's last bit is 2**-8 of it; weights rounded to bfloat16 (or, in groups of 32 quantised
    again per row, to 1/254 of the row's greatest, 0.0008) are off independently, so their sum over
    576 products is off by about sqrt(576) · 0.0008.
    """
    x, weight, bias = case(bits, group, T, dtype=torch.bfloat16)
    truth = in_float64(x, weight, bias)
    out = quantized_linear(x, weight, bias)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.double(), truth, rtol=2**-7, atol=0.04)
    relative = (out.double() - truth).norm() / truth.norm()
    assert relative < 0.01


@pytest.mark.parametrize(("bits", "group"), WAYS)
def test_packed_products_are_those_of_the_packed_weights(bits, group):
    """Against float64 with the weights that `packed_error` says the kernel has."""
    x, weight, _ = case(bits, group, 4, dtype=torch.bfloat16)
    packed = weight.dequantize(torch.float64) + packed_error(weight).double()
    truth = F.linear(x.double(), packed)
    # The kernels may round a dequantised weight to bfloat16 (2**-8), and round the result.
    assert torch.allclose(packed_linear(x, weight).double(), truth, rtol=2**-7, atol=0.02)


def test_packing_4_bits_changes_weights_by_what_bfloat16_rounds():
    _, weight, _ = case(4, 32, 1)
    error = packed_error(weight).abs()
    scale = weight.scale.float().repeat_interleave(32, 1)
    middle = (weight.zero.float() + 8 * weight.scale.float()).abs().repeat_interleave(32, 1)
    assert (error <= 2**-8 * (8 * scale + middle) * 1.001).all()
    whole = weight.dequantize()
    assert 0.0005 < error.norm() / whole.norm() < 0.004  # "about 0.2 %"


def test_packing_groups_of_8_bits_changes_weights_by_half_a_step_of_the_row():
    _, weight, _ = case(8, 32, 1)
    error = packed_error(weight).abs()
    greatest = weight.dequantize().abs().amax(1, keepdim=True)
    assert (error <= greatest / 127 * (0.5 + 127 * 2**-8)).all()
    per_row = quantize(weight.dequantize(), 8, 576)
    assert (packed_error(per_row).abs() <= greatest * 2**-8 * 1.001).all()


@pytest.mark.parametrize(("bits", "group"), WAYS)
def test_slices_change_nothing(monkeypatch, bits, group):
    import minifer.execution.quantized_linear as module

    x, weight, bias = case(bits, group, 3)
    whole = sliced_linear(x, weight, bias)
    monkeypatch.setattr(module, "_SLICE", 576 * 7)
    assert torch.allclose(sliced_linear(x, weight, bias), whole, rtol=0, atol=1e-5)


def test_what_torch_cannot_pack_is_sliced():
    x, weight, bias = case(4, 32, 2, N=40, dtype=torch.bfloat16)
    assert not can_pack(weight)  # 40 rows are no whole number of the kernel's tiles
    out = quantized_linear(x, weight, bias)
    assert torch.allclose(out.double(), in_float64(x, weight, bias), rtol=2**-7, atol=0.04)
    assert not can_pack(quantize(torch.randn(32, 16), 4, 8))


def test_packed_once_and_forgotten_when_moved():
    x, weight, _ = case(4, 32, 1, dtype=torch.bfloat16)
    quantized_linear(x, weight)
    first = weight.packed
    quantized_linear(x, weight)
    assert weight.packed is first
    weight.to("cpu")
    assert weight.packed is None


def test_the_back_end_adds_bias_and_residual():
    x, weight, bias = case(8, 32, 4)
    residual = torch.ones(4, 96)
    out = TorchBackend().linear(x, weight, bias, residual)
    truth = in_float64(x, weight, bias) + residual
    assert torch.allclose(out.double(), truth, rtol=0, atol=2e-5)


def test_strided_input_is_read_where_it_lies():
    """A gate may hand in the first columns of wider rows."""
    x, weight, _ = case(4, 32, 4, dtype=torch.bfloat16)
    wide = torch.cat((x, torch.full_like(x, 100.0)), dim=1)[:, :576]
    assert torch.equal(quantized_linear(wide, weight), quantized_linear(x, weight))
