"""Codes, scales and zeros: layout, bounds of the error, and what a model does to them."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minifer.weights.quantized import (
    QuantizedWeight,
    can_concatenate,
    concatenate,
    pack_nibbles,
    quantize,
    unpack_nibbles,
)


def matrix(N=6, K=64, seed=0, std=0.05):
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) * std


def test_column_2j_is_the_low_nibble():
    packed = pack_nibbles(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8))
    assert packed.tolist() == [[0x21, 0x0F]]
    assert unpack_nibbles(packed).tolist() == [[1, 2, 15, 0]]


def test_a_4_bit_weight_is_code_times_scale_plus_zero():
    codes = pack_nibbles(torch.arange(16, dtype=torch.uint8).repeat(2)[None])
    weight = QuantizedWeight(codes, torch.tensor([[0.5]]).half(), torch.tensor([[-4.0]]).half())
    assert (weight.bits, weight.group_size, tuple(weight.shape)) == (4, 32, (1, 32))
    assert weight.dequantize().tolist() == [[c * 0.5 - 4.0 for c in [*range(16)] * 2]]


def test_an_8_bit_weight_is_code_times_scale():
    codes = torch.tensor([[-127, 3], [127, -1]], dtype=torch.int8)
    weight = QuantizedWeight(codes, torch.tensor([[0.25], [2.0]]).half())
    assert (weight.bits, weight.group_size) == (8, 2)
    assert weight.dequantize().tolist() == [[-31.75, 0.75], [254.0, -2.0]]


@given(
    bits=st.sampled_from((4, 8)),
    group=st.sampled_from((2, 32, 64)),
    seed=st.integers(0, 2**16),
    magnitude=st.integers(-30, 30),
    offset=st.sampled_from((0.0, 1.0, -8.0)),
)
@settings(max_examples=150, deadline=None)
def test_a_weight_is_off_by_half_a_scale(bits, group, seed, magnitude, offset):
    """Or, at a group's ends, by what rounding scale and zero to float16 (2**-11) moved them."""
    weight = (matrix(3, 64, seed, 1.0) + offset) * 2.0**magnitude
    made = quantize(weight, bits, group)
    error = (made.dequantize(torch.float64) - weight.double()).abs()
    scale = made.scale.double().repeat_interleave(group, 1)
    zero = 0 if made.zero is None else made.zero.double().repeat_interleave(group, 1).abs()
    steps = 15 if bits == 4 else 127
    rounding = 2.0**-11 * (steps * scale + zero)  # float16's, and more than float32's
    assert (error <= torch.maximum(scale / 2, rounding) * (1 + 1e-5) + weight.abs() * 2**-22).all()


@pytest.mark.parametrize("bits", (4, 8))
def test_scales_are_float32_where_float16_would_lose_them(bits):
    """Below 2**-14 float16 has fewer bits, above 65504 none."""
    assert quantize(matrix(), bits).scale.dtype == torch.float16
    for factor in (1e-5, 1e9):
        made = quantize(matrix() * factor, bits)
        assert made.scale.dtype == torch.float32
        error = (made.dequantize() / factor - matrix()).abs()
        half = (quantize(matrix(), bits).scale.float() / 2).repeat_interleave(32, 1)
        assert (error <= half * 1.001).all()


@pytest.mark.parametrize("bits", (4, 8))
def test_a_group_of_equal_weights_is_kept(bits):
    weight = torch.zeros(2, 64)
    weight[0, :32] = -0.75
    weight[1] = 2.0
    made = quantize(weight, bits)
    assert made.dequantize().allclose(weight, rtol=2**-10)
    assert torch.equal(made.dequantize()[0, 32:], torch.zeros(32))


def test_rows_are_rows_of_the_whole():
    made = quantize(matrix(9), 4)
    ids = torch.tensor([8, 0, 0, 3])
    assert torch.equal(made.rows(ids), made.dequantize()[ids])
    assert torch.equal(made.rows(ids, torch.bfloat16), made.dequantize(torch.bfloat16)[ids])


def test_parts_are_stacked_when_their_codes_are_alike():
    a, b = quantize(matrix(4), 4), quantize(matrix(2, seed=1), 4)
    assert torch.equal(
        concatenate([a, b]).dequantize(), torch.cat([a.dequantize(), b.dequantize()])
    )
    for other in (quantize(matrix(4), 8), quantize(matrix(4), 4, 64), quantize(matrix(4, 32), 4)):
        assert not can_concatenate([a, other])
        with pytest.raises(ValueError, match="parts must share"):
            concatenate([a, other])


def test_a_model_moves_it_and_keeps_its_numbers():
    """`model.to(bfloat16)` would round scales to 8 bits."""
    made = quantize(matrix(), 4)
    before = made.dequantize()
    holder = torch.nn.Module()
    holder.weight = made
    assert holder.to(torch.bfloat16).weight.scale.dtype == torch.float16
    assert torch.equal(made.float().dequantize(), before)
    assert copy.deepcopy(holder).weight.dequantize().equal(before)
    assert [name for name, _ in holder.named_parameters()] == []
    assert set(holder.state_dict()) == {"weight.codes", "weight.scale", "weight.zero"}


def test_bytes_are_those_of_a_gguf_block():
    """Q4_1: 20 bytes for 32 weights; Q8_0: 34."""
    assert quantize(matrix(6, 64), 4).nbytes == 6 * 2 * 20
    assert quantize(matrix(6, 64), 8).nbytes == 6 * 2 * 34
    assert quantize(matrix(6, 64), 8).numel() == 6 * 64


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((torch.zeros(2, 32), 5), "bits must be 4 or 8, got 5"),
        ((torch.zeros(32), 4), "must be a matrix"),
        ((torch.zeros(2, 48), 4), "group_size must divide the 48 columns"),
        ((torch.zeros(2, 3), 4, 1), "an even number for 4 bits"),
        ((torch.full((2, 32), torch.nan), 8), "must be finite"),
        ((torch.full((2, 32), torch.inf), 4), "must be finite"),
    ],
)
def test_what_cannot_be_quantised_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        quantize(*arguments)


@pytest.mark.parametrize(
    ("codes", "scale", "zero", "said"),
    [
        (torch.zeros(2, 8), torch.ones(2, 1), None, "codes must be uint8"),
        (torch.zeros(2, 8, dtype=torch.int8), torch.ones(3, 1), None, "a row for each row"),
        (torch.zeros(2, 8, dtype=torch.int8), torch.ones(2, 3), None, "a column for each group"),
        (torch.zeros(2, 8, dtype=torch.uint8), torch.ones(2, 1), torch.ones(1), "scale's shape"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(codes, scale, zero, said):
    with pytest.raises(ValueError, match=said):
        QuantizedWeight(codes, scale, zero)
