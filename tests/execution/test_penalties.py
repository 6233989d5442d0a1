"""Masks, bias and penalties on one row of logits."""

import math

import pytest
import torch
from sampling_helpers import draw, make_request

from minifer.execution.logits_rules import apply_rules, bad_word_ends, has_rules

INF = math.inf


def after(logits, request) -> list[float]:
    row = torch.tensor(logits, dtype=torch.float32)
    apply_rules(row, request)
    return row.tolist()


# Penalties. Expected values: vLLM 0.32's, prompt {0, 1}, outputs 2, 2, 3

LOGITS = [2.0, -2.0, 1.0, -1.0, 0.5]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"repetition_penalty": 2.0}, [1, -4, 0.5, -2, 0.5]),
        ({"presence_penalty": 0.5}, [2, -2, 0.5, -1.5, 0.5]),
        ({"frequency_penalty": 0.5}, [2, -2, 0, -1.5, 0.5]),
        ({"presence_penalty": -0.5}, [2, -2, 1.5, -0.5, 0.5]),
        # repetition comes first: token 2 is halved, then loses 2 · .5 + .25
        (
            {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25},
            [1, -4, -0.75, -2.75, 0.5],
        ),
    ],
)
def test_penalties(params, expected):
    assert after(LOGITS, make_request([0, 1], [2, 2, 3], **params)) == expected


def test_presence_and_frequency_leave_the_prompt_alone():
    request = make_request([2, 2, 3], [], presence_penalty=1.0, frequency_penalty=1.0)
    assert after(LOGITS, request) == LOGITS


def test_repetition_penalty_counts_a_token_once_however_often_it_came():
    request = make_request([0, 0, 0], [0, 0], repetition_penalty=2.0)
    assert after([8.0, 1.0], request) == [4.0, 1.0]


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty_is_that_of_transformers(penalty):
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    seen = [3, 9, 9, 40, 3]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([seen]), logits.clone())
    ours = after(logits[0].tolist(), make_request(seen[:3], seen[3:], repetition_penalty=penalty))
    torch.testing.assert_close(torch.tensor(ours), expected[0])


def test_penalties_reach_logits_beyond_the_tokenizers_ids_and_leave_them_sane():
    padded = [*LOGITS, 0.0, -7.0]  # a vocabulary padded to a round number
    request = make_request([0, 1], [2], repetition_penalty=2.0, presence_penalty=1.0)
    assert after(padded, request) == [1, -4, -0.5, -1, 0.5, 0, -7]


def test_case_093_a_ragged_batch_penalises_no_padding():
    # Token 0, the usual padding id, is a real token that the short request never saw.
    short = make_request([1], [2], temperature=0, repetition_penalty=10.0, presence_penalty=2.0)
    long = make_request([1, 3, 1, 3], [0, 2, 2], temperature=0, repetition_penalty=10.0)
    logits = [[3.0, 2.0, 1.0, 1.0, 0.0]] * 2
    assert [s.token_id for s in draw(logits, short, long)] == [0, 0]
    assert after(logits[0], short)[0] == 3.0
    assert after(logits[0], long)[0] == pytest.approx(0.3)


# Masks and bias


def test_allowed_tokens_mask_everything_else():
    assert after(LOGITS, make_request(allowed_token_ids=[1, 3])) == [-INF, -2, -INF, -1, -INF]


def test_logit_bias_is_added_and_does_not_revive_a_masked_token():
    request = make_request(allowed_token_ids=[0, 1], logit_bias={1: 200, 2: 200, 0: -0.5})
    assert after(LOGITS, request) == [1.5, 198, -INF, -INF, -INF]


def test_bias_comes_before_penalties():
    request = make_request([1], logit_bias={1: 4.0}, repetition_penalty=2.0)
    assert after(LOGITS, request)[1] == 1.0  # (−2 + 4) / 2


@pytest.mark.parametrize(
    ("output", "masked"),
    [
        ([], {4}),
        ([1], {4, 2}),
        ([1, 2], {4, 3}),
        ([2, 1], {4, 2}),
        ([1, 1, 2], {4, 3}),
        ([1, 2, 0], {4}),
    ],
)
def test_a_bad_word_masks_its_last_token_once_the_output_ends_with_the_rest(output, masked):
    # The prompt ends with 1: only what was generated counts.
    request = make_request([0, 1], output, bad_word_ids=[(1, 2), (1, 2, 3), (4,)])
    assert set(bad_word_ends(request)) == masked
    row = after(LOGITS, request)
    assert {token for token in range(5) if row[token] == -INF} == masked


def test_bad_words_are_never_generated():
    request = make_request(temperature=0, bad_word_ids=[(2, 1), (0,)])
    for _ in range(8):
        request.token_ids.append(draw([[9.0, 7.0, 8.0, 1.0]], request)[0].token_id)
    assert request.output_token_ids == [2] * 8
    request = make_request(temperature=0, bad_word_ids=[(2, 2)])
    for _ in range(4):
        request.token_ids.append(draw([[0.0, 7.0, 8.0, 1.0]], request)[0].token_id)
    assert request.output_token_ids == [2, 1, 2, 1]


def test_case_094_end_tokens_are_masked_until_min_tokens_are_out():
    request = make_request(
        temperature=0, min_tokens=4, eos_token_ids=[1, 3], stop_token_ids=[4], logit_bias={1: 100}
    )
    while request.num_output_tokens < 10:
        token = draw([[0.0, 0.0, -1.0, 50.0, 50.0]], request)[0].token_id
        request.token_ids.append(token)
        if token in {1, 3, 4}:
            break
    assert request.output_token_ids == [0, 0, 0, 0, 1]


def test_min_tokens_masks_stop_ids_but_no_end_token_that_is_ignored():
    # admission leaves eos_token_ids empty when ignore_eos is set
    request = make_request(
        ignore_eos=True, eos_token_ids=[], min_tokens=2, stop_token_ids=[0], max_tokens=9
    )
    assert after(LOGITS, request) == [-INF, *LOGITS[1:]]


def test_case_097_an_end_token_the_model_cannot_produce_does_not_touch_another():
    # Out of range, as a tokenizer's own end token may be; −1 would have named the last token.
    request = make_request(eos_token_ids=[5, 10**9], min_tokens=1, bad_word_ids=[(7,)])
    assert after(LOGITS, request) == LOGITS
    with pytest.raises(ValueError, match=r"stop_token_ids must be .* at least 0, got -1"):
        make_request(stop_token_ids=[-1])


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [0]},
        {"bad_word_ids": [(1,)]},
        {"min_tokens": 1},
        {"logit_bias": {0: 1}},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
    ],
)
def test_only_requests_that_ask_have_rules(params):
    assert has_rules(make_request(**params))
    plain = make_request(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, logprobs=2)
    assert not has_rules(plain)
    assert not has_rules(make_request(output=[1, 2], min_tokens=2))


def test_rules_of_one_row_do_not_touch_its_neighbours():
    ruled = make_request([0], [2], temperature=0, logit_bias={1: -50}, frequency_penalty=2.0)
    plain = make_request(temperature=0)
    logits = [[0.0, 9.0, 8.5, 8.0]] * 3
    assert [s.token_id for s in draw(logits, plain, ruled, plain)] == [1, 3, 1]
