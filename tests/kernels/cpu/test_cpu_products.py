"""Matrices in panels times a few vectors, against float64.

The vectors are exact (±norm), so whatever is off comes from summing, or from rounding weights
where codes are multiplied out for many vectors.
"""

from __future__ import annotations

import pytest
import torch
from cpu_steps import num_threads, product_rows, product_step, signs
from torch import Tensor

from minifer.kernels.cpu.pack import Q4, Q8, pack
from minifer.weights.quantized import QuantizedWeight, quantize

EPS32, EPS16 = 2.0**-24, 2.0**-9  # half a unit in the last place, relative
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def matrix(rows: int, columns: int, seed: int = 1, scale: float = 1.0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale


def four_bits_without_zero(weight: Tensor) -> QuantizedWeight:
    made = quantize(weight - weight.amin() + 0.1, 4)
    return QuantizedWeight(made.codes, made.scale)


def eight_bits_with_zero(weight: Tensor) -> QuantizedWeight:
    made = quantize(weight, 8)
    return QuantizedWeight(made.codes, made.scale, torch.full_like(made.scale, 0.25))


# name: (weight [V, D] → what is packed, has it a kernel of its own?)
KINDS = {
    "float32": (lambda w: w, None),
    "bfloat16": (lambda w: w.bfloat16(), None),
    "4 bits": (lambda w: quantize(w, 4), Q4),
    "4 bits, groups of 64": (lambda w: quantize(w, 4, 64), Q4),
    "4 bits without zero": (four_bits_without_zero, Q4),
    "4 bits, float32 scales": (lambda w: quantize(w * 1e6, 4), None),
    "4 bits, groups of 16": (lambda w: quantize(w, 4, 16), None),
    "8 bits": (lambda w: quantize(w, 8), Q8),
    "8 bits, whole rows": (lambda w: quantize(w, 8, w.shape[1]), Q8),
    "8 bits, float32 scales": (lambda w: quantize(w * 1e9, 8), None),
    "8 bits with zero": (eight_bits_with_zero, None),
}


def check(made, norm: Tensor, counts, dtype: torch.dtype, coded: bool) -> None:
    is_codes = isinstance(made, QuantizedWeight)
    exact = (made.dequantize(torch.float32) if is_codes else made).double()
    magnitude = exact.abs()
    if is_codes and coded:  # a sum over codes · scale, another over zeros
        zero = 0 if made.zero is None else made.zero
        magnitude = (
            QuantizedWeight(
                made.codes.abs() if made.bits == 8 else made.codes,
                made.scale.abs(),
                None if made.zero is None else zero.abs(),
            )
            .dequantize()
            .double()
        )
    step = product_step(made, norm, dtype)
    columns = exact.shape[1]
    for count in counts:
        x = signs(count, columns, count)
        vectors = (x * norm).double()
        got = step.logits(product_rows(x))
        weight_rounding = is_codes and dtype == torch.bfloat16 and (not coded or count > 4)
        relative = 2 * (columns + 8) * EPS32 + weight_rounding * EPS16
        bound = relative * (vectors.abs() @ magnitude.T)
        error = (got.double() - vectors @ exact.T).abs()
        assert bool((error <= bound).all()), (count, float((error / bound).max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_float64_for_every_number_of_rows(kind: str, dtype: str) -> None:
    """V 40 is no multiple of a panel's 16 rows; 40 rows are taken as 16, 16 and 8."""
    make, coded = KINDS[kind]
    if (kind, dtype) == ("float32", "bfloat16"):
        pytest.skip("no model has vectors narrower than its weights")
    made = make(matrix(40, 128))
    assert coded is None or pack(made).kind == coded
    norm = matrix(1, 128, 5)[0].bfloat16().float()
    check(made, norm, range(1, 41), DTYPES[dtype], coded is not None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (16, 32), (17, 33), (31, 50), (33, 100)])
def test_sizes_that_no_panel_divides(rows: int, columns: int, dtype: str) -> None:
    made = matrix(rows, columns).to(DTYPES[dtype])
    norm = matrix(1, columns, 5)[0].bfloat16().float()
    check(made, norm, (1, 2, 3, 7, 17), DTYPES[dtype], False)


@pytest.mark.parametrize("columns", [50, 33])
def test_codes_in_groups_that_end_within_32_columns(columns: int) -> None:
    made = quantize(matrix(20, columns), 8, columns)
    check(made, torch.ones(columns), (1, 5), torch.float32, False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wide_matrix(dtype: str) -> None:
    made = matrix(50, 4096, scale=0.02).to(DTYPES[dtype])
    norm = matrix(1, 4096, 5)[0].bfloat16().float()
    check(made, norm, (1, 4, 19), DTYPES[dtype], False)


@pytest.mark.parametrize("outlier", [300.0, 1e5])
@pytest.mark.parametrize("kind", ["4 bits", "8 bits", "8 bits, whole rows"])
def test_an_entry_that_dwarfs_all_others_costs_16_bits_of_itself(kind: str, outlier: float) -> None:
    """Where codes meet integers. bfloat16 takes 9 bits of it, and leaves small entries alone."""
    made = KINDS[kind][0](matrix(40, 128))
    norm = matrix(1, 128, 5)[0].bfloat16().float()
    norm[70] = outlier = float(torch.tensor(outlier).bfloat16())
    step = product_step(made, norm, torch.bfloat16)
    exact = made.dequantize().double()
    for count in (1, 3):
        x = signs(count, 128, count)
        got = step.logits(product_rows(x)).double()
        error = (got - (x * norm).double() @ exact.T).abs()
        assert bool((error <= outlier * 2.0**-16 * exact.abs().sum(1)).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 3, 9, 40])
@pytest.mark.parametrize("kind", ["4 bits", "8 bits"])
def test_a_vector_that_is_no_number_meets_codes_as_such(kind: str, count: int, dtype: str) -> None:
    """Integers know neither NaN nor infinity: its row is NaN, and its neighbours are as before."""
    step = product_step(KINDS[kind][0](matrix(40, 128)), torch.ones(128), DTYPES[dtype])
    x = signs(count, 128)
    clean = step.logits(product_rows(x))
    for bad in (float("nan"), float("inf")):
        broken = x.clone()
        broken[count // 2, 77] = bad
        logits = step.logits(product_rows(broken))
        assert logits[count // 2].isnan().all()
        others = [row for row in range(count) if row != count // 2]
        assert torch.equal(logits[others], clean[others])


def test_float32_panels_and_bfloat16_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match="bfloat16 vectors meet no float32 panels"):
        product_step(matrix(40, 64), torch.ones(64), torch.bfloat16)


def test_only_the_rows_asked_for_in_their_order() -> None:
    weight = matrix(40, 64)
    step = product_step(weight, torch.ones(64), torch.float32)
    x = signs(21, 64)
    every = step.logits(product_rows(x))
    wanted = [20, 3, 4, 0, 11]
    assert torch.equal(step.logits(product_rows(x, wanted)), every[wanted])
    tokens, values = step.largest(product_rows(x, wanted))
    assert tokens.tolist() == every[wanted].argmax(-1).tolist()
    assert torch.equal(values, every[wanted].amax(-1))


def test_nobody_asks() -> None:
    step = product_step(matrix(40, 64), torch.ones(64), torch.float32)
    assert step.logits(product_rows(signs(3, 64), [])).shape == (0, 40)
    assert step.largest(product_rows(signs(3, 64), []))[0].tolist() == []


def test_a_row_asked_for_twice_is_refused() -> None:
    step = product_step(matrix(40, 64), torch.ones(64), torch.float32)
    with pytest.raises(ValueError, match="logits_rows must name each row once, got 2 of them"):
        step.logits(product_rows(signs(1, 64), [0, 0]))


# -- the head as the embedding


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_is_looked_up_in_the_head(kind: str, dtype: str) -> None:
    """Its row, normalised to a root mean square of 1, times the head: all in float64."""
    if (kind, dtype) == ("float32", "bfloat16"):
        pytest.skip("no model has vectors narrower than its weights")
    made = KINDS[kind][0](matrix(40, 128))
    exact = (made.dequantize() if isinstance(made, QuantizedWeight) else made).double()
    ids = [39, 0, 16, 15, 7, 39]
    x = exact[ids] / exact[ids].pow(2).mean(-1, keepdim=True).sqrt()
    step = product_step(made, torch.ones(128), DTYPES[dtype])
    error = (step.logits(product_rows(ids)).double() - x @ exact.T).abs()
    rounding = 3 * EPS16 if dtype == "bfloat16" else 256 * EPS32
    assert bool((error <= rounding * (x.abs() @ exact.abs().T)).all())


@pytest.mark.parametrize("bad", [-1, 40, 2**40])
def test_a_token_beyond_the_vocabulary_is_refused(bad: int) -> None:
    step = product_step(matrix(40, 64), torch.ones(64), torch.float32)
    with pytest.raises(IndexError, match=f"tokens must be 0 … 39, got .3, {bad}."):
        step.logits(product_rows([3, bad]))


# -- the largest


@pytest.mark.parametrize("rows", [1, 5, 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_lowest_of_equal_tokens_is_taken(rows: int, threads: int) -> None:
    """Ties within a panel, across panels, and across the threads' shares of them."""
    weight = matrix(200, 32).round()
    for places in ([3, 4], [199, 64, 65], [16, 0], [150, 90, 40, 30]):
        tied = weight.clone()
        tied[places] = torch.full((32,), 9.0) * signs(1, 32)
        step = product_step(tied, torch.ones(32), torch.float32)
        with num_threads(threads):
            tokens, values = step.largest(product_rows(signs(1, 32).repeat(rows, 1)))
        assert tokens.tolist() == [min(places)] * rows
        assert values.tolist() == [9.0 * 32] * rows


def test_below_zero_and_beyond_the_vocabulary() -> None:
    """Rows that fill up the last panel have logits of 0, and are no tokens."""
    step = product_step(
        -torch.ones(21, 32) - torch.arange(21)[:, None], torch.ones(32), torch.float32
    )
    tokens, values = step.largest(product_rows(torch.ones(1, 32)))
    assert (tokens.tolist(), values.tolist()) == ([0], [-32.0])


@pytest.mark.parametrize("place", [0, 17, 39])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_none(bad: float, place: int) -> None:
    """One NaN makes the largest logit NaN, wherever it is; an infinity is one or is not."""
    weight = matrix(40, 32)
    weight[place] = 0
    weight[place, 0] = bad
    step = product_step(weight, torch.ones(32), torch.float32)
    x = torch.ones(2, 32)
    logits = step.logits(product_rows(x))
    tokens, values = step.largest(product_rows(x))
    if bad != bad:
        assert values.isnan().all() and logits[:, place].isnan().all()
    else:
        assert torch.equal(values, logits.amax(-1))
        assert (tokens == place).all() == (bad > 0)
    others = [i for i in range(40) if i != place]
    assert logits[:, others].isfinite().all()
