"""The sampler's contract: greedy picks, seeds, temperature, failing rows, and fair draws."""

import inspect
import math

import pytest
import torch
from sampling_helpers import chi_square, chi_square_limit, draw, drawn, log, make_request

from minifer.execution.sampler import Sampler, SampleRow, first_argmax

NAN, INF = math.nan, math.inf


def tokens(samples):
    return [sample.token_id for sample in samples]


# Greedy


def test_case_070_temperature_zero_is_argmax_and_ties_go_to_the_lowest_id():
    greedy = make_request(temperature=0)
    assert tokens(draw([1, 1, 0], greedy)) == [0]
    assert tokens(draw([[0, 3, 3, 3], [5, 1, 5, 1]], greedy, greedy)) == [1, 0]


@pytest.mark.parametrize("V", [7, 1000, 50_000])
def test_greedy_ties_go_to_the_lowest_id_in_a_large_vocabulary_too(V):
    logits = torch.zeros(V)
    logits[[V // 2, V // 2 + 1, V - 1]] = 1.0
    assert tokens(draw(logits, make_request(temperature=0))) == [V // 2]


def test_first_argmax_is_the_definition_one_number_at_a_time():
    scores = torch.randint(-3, 4, (50, 333), generator=torch.Generator().manual_seed(0)).float()
    scores[7] = -math.inf
    scores[8, :300] = -math.inf
    expected = [max(range(333), key=lambda i: (row[i], -i)) for row in scores.tolist()]
    assert first_argmax(scores).tolist() == expected
    assert first_argmax(scores).dtype == torch.int64
    scores[9, [5, 250]] = math.nan
    assert first_argmax(scores)[9] == scores.argmax(-1)[9] == 5
    assert first_argmax(scores[:, ::2]).tolist() == scores[:, ::2].argmax(-1).tolist()


@pytest.mark.parametrize("rules", [{}, {"logit_bias": {2: 1.5}}, {"logprobs": 3}])
@pytest.mark.parametrize("how", [{"temperature": 0}, {}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_logits_taken_as_they_are_are_not_changed_either(how, rules):
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    draw(logits, *[make_request(**how, **rules) for _ in range(3)])
    assert torch.equal(logits, before)


def test_greedy_ignores_the_seed_and_the_filters():
    request = make_request(temperature=0, top_k=1, top_p=0.1, min_p=0.9, seed=5)
    assert tokens(draw([0, 1, 0.5], *[request] * 3, seeds=[1, 2, 3])) == [1, 1, 1]


def test_the_callers_logits_are_not_changed_and_rows_may_be_taken_in_any_order():
    logits = torch.tensor([[0.0, 9.0, 1.0], [9.0, 0.0, 1.0]])
    before = logits.clone()
    masked = make_request(temperature=0, allowed_token_ids=[2], logit_bias={2: 4.0})
    greedy = make_request(temperature=0)
    rows = [SampleRow(1, greedy, 0), SampleRow(0, masked, 0), SampleRow(0, greedy, 0)]
    assert tokens(Sampler()(logits, rows)) == [0, 2, 1]
    assert torch.equal(logits, before)
    assert Sampler()(logits, []) == []


# Temperature


@pytest.mark.filterwarnings("ignore:temperature")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_case_071_a_tiny_temperature_gives_no_infinity(dtype):
    logits = torch.tensor([[-100.0, 100.0, 99.0, -100.0]], dtype=dtype)
    request = make_request(temperature=1e-4, top_p=1e-4)
    assert request.params.temperature == 0.01
    [sample] = Sampler()(logits, [SampleRow(0, request, 0)])
    assert (sample.token_id, sample.error) == (1, None)


def test_logits_at_the_ends_of_float32_are_sampled():
    top = torch.finfo(torch.float32).max
    assert set(drawn([-top, top, -top], temperature=0.01)) == {1}
    assert set(drawn([top, top, -top], temperature=2)) == {0, 1}


def test_case_085_default_parameters_sample_widely():
    assert set(drawn([0.0] * 8)) == set(range(8))
    for off in (0, -1):
        assert set(drawn([0.0] * 8, top_k=off)) == set(range(8))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_at_every_temperature(temperature):
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5, -3.0, 0.0])
    expected = torch.softmax(logits.double() / temperature, 0)
    requests = [make_request(output=[0] * i, temperature=temperature) for i in range(200)]
    seeds = [seed for seed in range(40) for _ in requests]  # 200 output indices of 40 seeds
    picked = torch.tensor(tokens(draw(logits, *requests * 40, seeds=seeds)))
    counts = picked.bincount(minlength=7).tolist()
    assert chi_square(counts, (8000 * expected).tolist()) < chi_square_limit(6)


def test_draws_after_top_k_and_top_p_follow_the_renormalised_softmax():
    p = [0.05, 0.4, 0.15, 0.3, 0.1]
    # top-k 4 drops .05; of the rest, .4/.95 + .3/.95 = .74 is below .8 and .15 crosses it
    counts = [drawn(log(p), draws=6000, top_k=4, top_p=0.8).count(t) for t in range(5)]
    assert counts[0] == counts[4] == 0
    expected = [6000 * p[t] / 0.85 for t in (1, 2, 3)]
    assert chi_square(counts[1:4], expected) < chi_square_limit(2)


def test_successive_draws_are_independent():
    requests = [make_request(output=[0] * index) for index in range(3000)]
    sequence = torch.tensor(tokens(draw([0.0] * 4, *requests, seeds=[1234] * 3000)))
    counts = (4 * sequence[1:] + sequence[:-1]).bincount(minlength=16).tolist()
    assert chi_square(counts, [2999 / 16] * 16) < chi_square_limit(15)


# Seeds


def test_case_086_the_same_seed_gives_the_same_tokens_whatever_else_is_in_the_batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 500, generator=generator)
    request = make_request(output=[3, 1], top_p=0.95)
    others = [
        make_request(),
        make_request(top_k=400),
        make_request(temperature=0),
        make_request(repetition_penalty=2.0, output=[1] * 9),
        make_request(min_p=0.5, top_p=0.1, logprobs=3),
    ]
    for seed in range(30):
        alone = draw(logits[0], request, seeds=[seed])
        among = draw(logits, request, *others, seeds=[seed, 1, 2, 3, 4, 5])
        assert among[0] == alone[0]


def test_case_087_a_seed_holds_beside_a_request_without_one():
    logits = torch.zeros(3, 1000)
    derived = 0x9E3779B97F4A7C15  # what an engine gives to a request that brings no seed
    a, b, c = tokens(draw(logits, *[make_request()] * 3, seeds=[1, derived, 1]))
    assert a == c != b


def test_the_output_index_moves_the_draw_on_and_the_prompt_does_not():
    def token(prompt, output):
        request = make_request(prompt, output)
        return draw([0.0] * 1000, request, seeds=[7])[0].token_id

    assert token([1], [2]) == token([5, 6, 7], [8])
    assert len({token([1], [2] * index) for index in range(50)}) > 40


def test_case_089_child_seeds_draw_differently_and_repeatably():
    request = make_request()
    first = tokens(draw([0.0] * 100, *[request] * 4, seeds=[40, 41, 42, 43]))
    again = tokens(draw([0.0] * 100, *[request] * 4, seeds=[40, 41, 42, 43]))
    assert first == again and len(set(first)) > 1


def test_case_091_n_samples_of_one_prompt_differ_in_their_first_token():
    rows = [SampleRow(0, make_request(), seed) for seed in range(16)]
    assert len(set(tokens(Sampler()(torch.zeros(1, 1000), rows)))) > 10


# Rows that fail


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ([NAN] * 4, "NaN"),
        ([0, NAN, 0, 0], "NaN"),
        ([NAN, INF, 0, 0], "NaN"),
        ([0, 0, INF, 0], "inf"),
        ([-INF] * 4, "every logit is -inf"),
    ],
)
def test_case_082_a_row_that_is_not_finite_fails_alone(temperature, bad, why):
    request = make_request(temperature=temperature, logprobs=2)
    good = [0.0, 5.0, 1.0, -INF]
    before, failed, after = draw([good, bad, good], *[request] * 3, seeds=[1, 1, 1])
    assert (failed.token_id, failed.logprobs, failed.logprob) == (-1, None, None)
    assert why in failed.error
    assert before == after == draw(good, request, seeds=[1])[0]
    assert before.error is None and before.token_id in (0, 1, 2)


@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_case_082_filters_do_not_hide_or_spread_a_nan(filters):
    request = make_request(**filters)
    bad, good = draw([[NAN, 0.0, 0.0], [0.0, 50.0, 0.0]], request, request)
    assert bad.error == "logits hold NaN" and good.token_id == 1


def test_a_nan_fails_the_row_even_where_the_token_is_not_allowed():
    [sample] = draw([NAN, 1.0], make_request(allowed_token_ids=[1]))
    assert sample.error == "logits hold NaN"


@pytest.mark.parametrize(
    "everything_masked",
    [
        {"allowed_token_ids": []},
        {"allowed_token_ids": [1], "bad_word_ids": [(1,)]},
        {"allowed_token_ids": [2], "eos_token_ids": [2], "min_tokens": 1},
        {"allowed_token_ids": [0], "stop_token_ids": [0], "min_tokens": 1},
    ],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_case_083_a_row_without_any_token_left_fails_alone(everything_masked, temperature):
    masked = make_request(temperature=temperature, **everything_masked)
    greedy = make_request(temperature=0)
    first, second = draw([[0, 1, 2], [0, 1, 2]], masked, greedy)
    assert first.token_id == -1 and "every token is masked" in first.error
    assert second.token_id == 2


@pytest.mark.parametrize(
    "overflow", [{"logit_bias": {0: 3e38}}, {"repetition_penalty": 1e-38, "temperature": 0}]
)
def test_a_bias_or_penalty_that_overflows_fails_alone(overflow):
    bad, good = draw([[3e38, 0.0], [3e38, 0.0]], make_request(**overflow), make_request())
    assert "overflow" in bad.error and good.token_id == 0


# Documentation


def test_case_078_the_order_of_the_steps_is_documented():
    contract = inspect.getdoc(Sampler)
    order = [
        "raw log-probabilities",
        "float32",
        "allowed_token_ids",
        "bad word",
        "min_tokens",
        "logit_bias",
        "penalties",
        "temperature 0",
        "divided by temperature",
        "min-p masks",
        "top-k keeps",
        "top-p renormalises",
        "drawn",
    ]
    places = [contract.index(step) for step in order]
    assert places == sorted(places)
