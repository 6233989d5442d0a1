"""Which tokens min-p, top-k and top-p leave, against published kept sets and transformers."""

import random

import pytest
import torch
from sampling_helpers import drawn, log

from minifer.execution.sampler import scaled_logits, survivors
from minifer.request import SamplingParams

WIDTHS = (1, 2, 1024)  # of the nucleus: narrow ones fall back to the whole vocabulary


def kept(logits, width=1024, **params) -> set[int]:
    """Ids that can still be drawn from one row of logits."""
    x = torch.as_tensor(logits)[None]
    wanted = [SamplingParams(**params)]
    values, ids = survivors(scaled_logits(x, x.amax(-1), wanted), wanted, width)
    return set(ids[values.isfinite()].tolist())


# Kept sets of vLLM 0.32's sampler, but for ties
KEPT_SETS = [
    ([0.1, 0.2, 0.3, 0.4], {"top_p": 0.6}, {2, 3}),
    ([0.1, 0.2, 0.3, 0.4], {"top_p": 0.4}, {3}),
    ([0.1, 0.2, 0.3, 0.4], {"top_p": 0.41}, {2, 3}),
    ([0.1, 0.2, 0.3, 0.4], {"top_p": 0.7}, {2, 3}),
    ([0.1, 0.2, 0.3, 0.4], {"top_p": 0.71}, {1, 2, 3}),
    ([0.1, 0.2, 0.3, 0.4], {"top_p": 1e-6}, {3}),
    ([0.1, 0.2, 0.3, 0.4], {"top_p": 1.0}, {0, 1, 2, 3}),
    ([0.1, 0.2, 0.3, 0.4], {"top_k": 4}, {0, 1, 2, 3}),
    ([0.4, 0.3, 0.2, 0.1], {"top_p": 0.8}, {0, 1, 2}),
    ([0.25] * 4, {"top_p": 0.5}, {0, 1}),  # vLLM: {2, 3}; minifer keeps the lowest ids
    ([0.25] * 4, {"top_k": 2}, {0, 1}),  # vLLM: all; minifer keeps exactly k
    ([0.4, 0.3, 0.3], {"top_k": 2}, {0, 1}),  # vLLM: all
    ([0.5, 0.3, 0.2], {"top_k": 2, "top_p": 0.6}, {0}),
    ([0.5, 0.3, 0.2], {"top_k": 2, "top_p": 0.63}, {0, 1}),
    ([0.5, 0.5], {"top_p": 0.5}, {0}),  # vLLM: {1}
]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("probabilities", "params", "expected"), KEPT_SETS)
def test_kept_sets(probabilities, params, expected, width):
    assert kept(log(probabilities), width, **params) == expected


@pytest.mark.parametrize(("probabilities", "params", "expected"), KEPT_SETS)
def test_draws_come_from_the_whole_kept_set_and_nothing_else(probabilities, params, expected):
    assert set(drawn(log(probabilities), **params)) == expected


def test_case_073_top_p_keeps_the_token_that_crosses():
    assert kept(log([0.4, 0.3, 0.2, 0.1]), top_p=0.8) == {0, 1, 2}


@pytest.mark.parametrize("width", WIDTHS)
def test_case_074_top_p_one_keeps_all_and_equality_adds_no_token(width):
    tail = log([0.5, 0.5 - 1e-9, 1e-9])
    assert kept(tail, width, top_p=1.0) == {0, 1, 2}
    assert kept(log([0.3, 0.1, 0.1, 0.5]), width, top_p=0.8) == {0, 3}
    for k in range(1, 10):  # ten equal tokens, p = k/10: exactly k, whatever float32 makes of 0.1
        assert kept(torch.zeros(10), width, top_p=k / 10) == set(range(k))
        assert kept(torch.full((10,), 37.7), width, top_p=k / 10) == set(range(k))


@pytest.mark.filterwarnings("ignore:temperature")
def test_case_075_top_k_and_top_p_together_leave_at_least_one():
    assert kept(log([0.5, 0.3, 0.2]), top_k=2, top_p=0.6) == {0}
    assert kept(log([0.5, 0.3, 0.2]), top_k=1, top_p=0.8) == {0}
    assert kept(log([0.5, 0.3, 0.2]), top_k=1, top_p=0.8, temperature=0.01) == {0}
    assert kept(torch.zeros(5), top_p=5e-324, min_p=1.0) == {0}
    assert kept(log([0.2, 0.5, 0.3]), top_p=1e-30, temperature=1e-9) == {1}


def test_case_077_min_p_comes_after_temperature():
    p = log([0.6, 0.25, 0.15])
    # at T = 2 the ratios to the largest are sqrt(.25/.6) = .65 and sqrt(.15/.6) = .5
    assert kept(p, temperature=2.0, min_p=0.3) == {0, 1, 2}
    assert kept(p, temperature=2.0, min_p=0.51) == {0, 1}
    assert kept(p, temperature=1.0, min_p=0.3) == {0, 1}
    assert set(drawn(p, temperature=2.0, min_p=0.3)) == {0, 1, 2}


def test_min_p_keeps_equality_and_ties_of_the_largest():
    assert kept(log([0.5, 0.25, 0.25]), min_p=0.5) == {0, 1, 2}
    assert kept(log([0.1, 0.45, 0.45]), min_p=1.0) == {1, 2}


def test_limits_that_are_met_exactly_are_decided_as_whole_numbers_decide():
    """Probabilities w / sum(w): float32 misses most of the limits below by a rounding."""
    chance = random.Random(0)
    for _ in range(100):
        weights = [chance.randint(1, 20) for _ in range(8)]
        order = sorted(range(8), key=lambda t: (-weights[t], t))
        logits = log([w / sum(weights) for w in weights])
        for n in range(1, 8):
            top_p = sum(weights[t] for t in order[:n]) / sum(weights)
            assert kept(logits, top_p=top_p) == set(order[:n])
        for token in range(8):
            min_p = weights[token] / max(weights)
            expected = {t for t in range(8) if weights[t] >= weights[token]}
            assert kept(logits, min_p=min_p) == expected


def test_top_p_counts_the_mass_that_min_p_and_top_k_left():
    p = log([0.5, 0.2, 0.2, 0.1])
    assert kept(p, top_p=0.7) == {0, 1}
    assert kept(p, top_p=0.7, min_p=0.3) == {0, 1}  # .5/.9 = .56, .7/.9 = .78
    assert kept(p, top_p=0.7, min_p=0.5) == {0}
    assert kept(p, top_p=0.7, top_k=2) == {0}  # .5/.7 = .71


def test_case_079_top_k_keeps_exactly_k_with_the_lowest_ids_among_ties():
    assert kept(torch.zeros(4), top_k=1) == {0}
    assert kept(torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0]), top_k=3) == {0, 1, 2}
    assert kept(torch.tensor([0.0, -0.0, 0.0]), top_k=1) == {0}
    assert kept(torch.tensor([-0.0, 0.0, 1.0]), top_k=2) == {0, 2}
    for k in range(1, 10):
        assert set(drawn(torch.zeros(10), top_k=k)) == set(range(k))


@pytest.mark.parametrize("k", [0, -1, 4, 5, 10**9])
def test_case_081_top_k_off_or_beyond_the_vocabulary_keeps_all(k):
    assert kept(torch.zeros(4), top_k=k) == {0, 1, 2, 3}
    assert set(drawn(torch.zeros(4), top_k=k)) == {0, 1, 2, 3}


def test_masked_tokens_do_not_fill_up_top_k():
    inf = float("inf")
    assert kept(torch.tensor([-inf, 1.0, -inf, -inf]), top_k=3) == {1}
    assert kept(torch.tensor([-inf, 1.0, -inf, 0.5]), top_p=0.999) == {1, 3}


@pytest.mark.parametrize("width", [4, 64, 1024])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.9])
@pytest.mark.parametrize(
    "params", [{"top_k": 17}, {"top_p": 0.7}, {"min_p": 0.05}, {"top_p": 0.999}]
)
def test_kept_sets_are_those_of_transformers_where_nothing_ties(params, temperature, width):
    from transformers.generation import logits_process as oracle

    logits = 3 * torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    warper = {
        "top_k": oracle.TopKLogitsWarper,
        "top_p": oracle.TopPLogitsWarper,
        "min_p": oracle.MinPLogitsWarper,
    }
    [(name, value)] = params.items()
    expected = warper[name](value)(None, logits / temperature)
    for row in range(4):
        theirs = set(expected[row].isfinite().nonzero()[:, 0].tolist())
        assert kept(logits[row], width, temperature=temperature, **params) == theirs


@pytest.mark.parametrize("width", [1, 3, 16])
def test_rows_of_a_batch_are_cut_as_if_alone(width):
    logits = 2 * torch.randn(6, 40, generator=torch.Generator().manual_seed(2))
    wishes = [
        {"top_k": 5},
        {"top_p": 0.9},
        {"top_k": 20, "top_p": 0.5},
        {"top_p": 0.01, "min_p": 0.2},
        {"top_k": 1},
        {"top_p": 1.0, "top_k": 39, "temperature": 0.5},
    ]
    params = [SamplingParams(**wish) for wish in wishes]
    values, ids = survivors(scaled_logits(logits, logits.amax(-1), params), params, width)
    for row, wish in enumerate(wishes):
        together = set(ids[row][values[row].isfinite()].tolist())
        assert together == kept(logits[row], width, **wish)
