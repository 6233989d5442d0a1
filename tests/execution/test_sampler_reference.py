"""The sampler and its slow twin choose the same token, whatever is asked for."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampling_helpers import drawn, log, make_request

from minifer.execution.sampler import Sampler, SampleRow
from minifer.execution.sampler_reference import reference_probabilities, reference_race
from minifer.request import Request

V = 12
tokens = st.integers(0, V - 1)
# A coarse grid: exact in float32, and full of ties.
logit = st.one_of(st.integers(-40, 40).map(lambda i: i / 8), st.just(-math.inf))
quarters = st.integers(-8, 8).map(lambda i: i / 4)


@st.composite
def requests(draw) -> Request:
    """A request with any mixture of fields."""
    params = {
        "temperature": draw(st.sampled_from([0, 0.01, 0.5, 1.0, 1.7, 2.0])),
        "top_k": draw(st.sampled_from([0, -1, 1, 2, 3, 7, 50])),
        "top_p": draw(st.sampled_from([1.0, 0.999, 0.9, 0.75, 0.5, 0.1, 1e-6])),
        "min_p": draw(st.sampled_from([0, 0, 0.01, 0.2, 0.5, 1.0])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.0, 0.5, 1.25, 4.0])),
        "presence_penalty": draw(st.one_of(st.just(0), quarters)),
        "frequency_penalty": draw(st.one_of(st.just(0), quarters)),
        "logit_bias": draw(st.one_of(st.none(), st.dictionaries(tokens, quarters, max_size=4))),
        "allowed_token_ids": draw(st.one_of(st.none(), st.lists(tokens, max_size=8))),
        "stop_token_ids": draw(st.lists(tokens, max_size=2)),
        "min_tokens": draw(st.integers(0, 4)),
    }
    return make_request(
        draw(st.lists(tokens, min_size=1, max_size=6)),
        draw(st.lists(tokens, max_size=6)),
        eos_token_ids=draw(st.lists(tokens, max_size=2)),
        bad_word_ids=draw(
            st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=4)
        ),
        **params,
    )


def check_that_both_choose_the_same(rows, nucleus_width):
    logits = torch.tensor([row for row, _, _ in rows])
    batch = [SampleRow(i, request, seed) for i, (_, request, seed) in enumerate(rows)]
    samples = Sampler(nucleus_width)(logits, batch)
    for sample, (row, request, seed) in zip(samples, rows, strict=True):
        race = reference_race(row, request, seed)
        if not race:
            assert sample.token_id == -1
            assert ("every logit" if max(row) == -math.inf else "masked") in sample.error
            continue
        winner, *others = sorted(race, key=race.__getitem__, reverse=True)
        assume(not others or race[winner] - race[others[0]] > 1e-4)  # float32 cannot tell
        assert (sample.token_id, sample.error) == (winner, None)


any_rows = st.lists(
    st.tuples(st.lists(logit, min_size=V, max_size=V), requests(), st.integers(0, 2**64 - 1)),
    min_size=1,
    max_size=4,
)
any_width = st.sampled_from([1, 2, 5, 1024])


@settings(max_examples=100, deadline=None)
@given(any_rows, any_width)
def test_the_sampler_and_its_slow_twin_choose_the_same_token(rows, nucleus_width):
    check_that_both_choose_the_same(rows, nucleus_width)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(any_rows, any_width)
def test_the_sampler_and_its_slow_twin_choose_the_same_token_2000_times(rows, nucleus_width):
    check_that_both_choose_the_same(rows, nucleus_width)


def test_the_slow_twin_keeps_the_published_sets():
    def kept(probabilities, **params):
        return set(reference_probabilities(log(probabilities).tolist(), make_request(**params)))

    assert kept([0.4, 0.3, 0.2, 0.1], top_p=0.8) == {0, 1, 2}
    assert kept([0.1, 0.2, 0.3, 0.4], top_p=0.7) == {2, 3}
    assert kept([0.5, 0.3, 0.2], top_k=2, top_p=0.6) == {0}
    assert kept([0.25] * 4, top_k=2) == {0, 1}
    assert kept([0.6, 0.25, 0.15], temperature=2.0, min_p=0.51) == {0, 1}
    assert kept([0.6, 0.25, 0.15], temperature=0) == {0}


def test_a_large_vocabulary_draws_as_the_slow_twin_does():
    logits = 3 * torch.randn(1500, generator=torch.Generator().manual_seed(5))
    for params in ({"top_k": 40}, {"top_p": 0.9}, {"top_k": 1200, "top_p": 0.99}, {"min_p": 0.01}):
        request = make_request(**params)
        expected = []
        for seed in range(5):
            race = reference_race(logits.tolist(), request, seed)
            expected.append(max(race, key=race.__getitem__))
        assert drawn(logits, draws=5, **params) == expected
