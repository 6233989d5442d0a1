"""Log-probabilities: from the raw logits, with true ranks, against float64 log-softmax."""

import math

import pytest
import torch
from sampling_helpers import draw, log, make_request

from minifer.execution.logprobs import exact_topk, prompt_logprobs, token_logprobs


def truth(logits, token: int) -> float:
    return torch.as_tensor(logits).double().log_softmax(-1)[token].item()


@pytest.mark.parametrize("k", [0, 1, 5, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_ranks_are_those_of_a_float64_softmax(k, dtype):
    V = 50
    logits = (4 * torch.randn(3, V, generator=torch.Generator().manual_seed(0))).to(dtype)
    chosen = [7, int(logits[1].argmax()), int(logits[2].argmin())]
    for row, entry in enumerate(token_logprobs(logits, chosen, [k] * 3)):
        order = sorted(range(V), key=lambda t: (-logits[row, t].item(), t))
        likeliest = order if k == -1 else order[:k]
        assert set(entry) == {chosen[row], *likeliest}
        assert next(iter(entry)) == chosen[row]  # the chosen token comes first
        for token, item in entry.items():
            assert item.rank == order.index(token) + 1
            assert item.logprob == pytest.approx(truth(logits[row], token), rel=1e-5, abs=1e-6)
            assert type(item.logprob) is float and type(item.rank) is int


def test_rows_may_ask_for_different_counts():
    logits = torch.tensor([[0.0, 1.0, 2.0]] * 3)
    sizes = [len(entry) for entry in token_logprobs(logits, [0, 0, 0], [0, 1, -1])]
    assert sizes == [1, 2, 3]
    assert token_logprobs(logits[:0], [], []) == []


def test_large_logits_lose_no_precision():
    logits = torch.tensor([[10_000.0, 10_001.0, 9_999.0]])
    [entry] = token_logprobs(logits, [0], [3])
    for token in range(3):
        assert entry[token].logprob == pytest.approx(truth(logits[0], token), abs=1e-6)


def test_ties_rank_by_token_id():
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0]])
    for token, rank in enumerate([3, 1, 4, 2]):
        [entry] = token_logprobs(logits, [token], [0])
        assert entry[token].rank == rank
        [entry] = token_logprobs(logits, [0], [-1])
        assert entry[token].rank == rank


def test_case_103_a_token_that_the_model_rules_out_has_minus_infinity():
    [entry] = token_logprobs(torch.tensor([[0.0, -math.inf]]), [1], [2])
    assert entry[1].logprob == -math.inf and entry[1].rank == 2
    assert entry[0].logprob == 0.0


def test_case_077_sampling_rules_do_not_change_the_logprobs():
    logits = log([0.6, 0.25, 0.15])
    rules = {
        "temperature": 0.5,
        "top_k": 1,
        "min_p": 0.9,
        "logit_bias": {2: 50.0},
        "repetition_penalty": 5.0,
        "allowed_token_ids": [2, 1],
    }
    [sample] = draw(logits, make_request([0, 1], [1], logprobs=2, **rules))
    assert sample.token_id == 2
    assert sample.logprob == pytest.approx(math.log(0.15), rel=1e-5)
    assert list(sample.logprobs) == [2, 0, 1]
    assert sample.logprobs[2].rank == 3
    assert sample.logprobs[0].logprob == pytest.approx(math.log(0.6), rel=1e-5)


def test_logprobs_go_to_the_rows_that_ask_also_beside_a_failing_one():
    nan = [math.nan] * 3
    wants, plain = make_request(temperature=0, logprobs=0), make_request(temperature=0)
    rows = draw(
        [[0.0, 1.0, 2.0], nan, [3.0, 1.0, 2.0], [0.0, 4.0, 2.0]], plain, wants, wants, plain
    )
    assert [row.logprobs is not None for row in rows] == [False, False, True, False]
    assert list(rows[2].logprobs) == [0]
    assert rows[2].logprob == pytest.approx(truth([3.0, 1.0, 2.0], 0))
    assert rows[0].logprob is None and rows[1].error is not None


def test_asking_for_logprobs_does_not_change_the_draw():
    logits = torch.randn(100, generator=torch.Generator().manual_seed(3))
    for seed in range(20):
        [plain] = draw(logits, make_request(), seeds=[seed])
        [asked] = draw(logits, make_request(logprobs=-1), seeds=[seed])
        assert plain.token_id == asked.token_id
        assert len(asked.logprobs) == 100


@pytest.mark.parametrize("T", [1, 63, 64, 65, 130])
def test_case_102_prompt_logprobs_of_any_length(T):
    logits = torch.randn(T, 11, generator=torch.Generator().manual_seed(T))
    following = [t % 11 for t in range(T)]
    entries = prompt_logprobs(logits, following, 2)
    assert len(entries) == T
    for row, token, entry in zip(logits, following, entries, strict=True):
        assert entry[token].logprob == pytest.approx(truth(row, token), rel=1e-4, abs=1e-6)
        assert 2 <= len(entry) <= 3


@pytest.mark.parametrize("k", [1, 3, 40, 1000])
def test_exact_topk_is_a_stable_sort(k):
    grid = torch.randint(-3, 4, (5, 1000), generator=torch.Generator().manual_seed(k)) / 2
    grid[0, 5], grid[0, 9], grid[1] = -math.inf, math.inf, -grid[1].abs()
    grid[2, ::2] *= -0.0  # zeros of both signs are one value
    grid[3] = torch.randn(1000) * 1e-42  # subnormal
    values, ids = grid.sort(dim=-1, descending=True, stable=True)
    top_values, top_ids = exact_topk(grid, k)
    assert torch.equal(top_ids, ids[:, :k])
    assert torch.equal(top_values, values[:, :k])
