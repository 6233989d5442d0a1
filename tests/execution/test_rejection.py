"""Accept or reject, as taught: whatever q was, what comes out is distributed as p."""

from __future__ import annotations

import pytest
import torch
from sampling_helpers import chi_square, chi_square_limit, log, make_request

from minifer.execution.sampler import Sampler, SampleRow
from minifer.execution.speculation.rejection import acceptance, judge, residual

PAIRS = [
    ([0.5, 0.5], [0.9, 0.1]),
    ([0.2, 0.3, 0.5], [0.5, 0.3, 0.2]),
    ([0.0, 0.6, 0.4], [1.0, 0.0, 0.0]),  # nothing in common
    ([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]),
    ([0.25, 0.25, 0.5, 0.0], [0.0, 0.0, 0.1, 0.9]),
]


def tensors(*rows) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(row, dtype=torch.float64) for row in rows)


def test_case_138_the_residual_is_what_p_has_more_of():
    p, q = tensors([0.5, 0.5], [0.9, 0.1])
    assert acceptance(p, q).tolist() == pytest.approx([0.5 / 0.9, 1.0])
    assert float(acceptance(p, q)[0]) == pytest.approx(0.5556, abs=1e-4)
    assert residual(p, q).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_accepted_and_replaced_together_are_p(p, q):
    """The sum over all ways to get a token, in exact numbers."""
    p, q = tensors(p, q)
    accepted = q * acceptance(p, q)
    together = accepted + (1 - accepted.sum()) * residual(p, q)
    assert together.tolist() == pytest.approx(p.tolist(), abs=1e-12)


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_what_is_never_drafted_or_never_wanted_does_no_harm(p, q):
    p, q = tensors(p, q)
    assert bool(torch.isfinite(acceptance(p, q)).all())
    assert float(residual(p, q).sum()) == pytest.approx(1)


def test_a_draft_is_accepted_below_its_chance_and_replaced_above():
    p, q = tensors([[0.5, 0.5]] * 2, [[0.9, 0.1]] * 2)
    chance = torch.tensor([0.555, 0.556])
    noise = torch.ones(2, 2)
    assert judge(p, q, [0, 0], chance, noise).tolist() == [0, 1]


def test_a_guess_out_of_nothing_is_never_its_own_replacement():
    p, q = tensors([[0.6, 0.3, 0.1]], [[1.0, 0.0, 0.0]])
    for noise in (torch.tensor([[1e-9, 1.0, 1.0]]), torch.tensor([[1.0, 1e-9, 1.0]])):
        assert judge(p, q, [0], torch.tensor([0.61]), noise).tolist() == [1]
        assert judge(p, q, [0], torch.tensor([0.59]), noise).tolist() == [0]


# -- in the sampler

LOGITS = log([0.4, 0.3, 0.15, 0.1, 0.05])
DRAWS = 20_000


def judged(draft, q, **params) -> list[int]:
    """Tokens of many seeds at a place where `draft` was drafted: a token, or a function of the
    seed that says which one was drawn from q."""
    sampler, rows = Sampler(rejection=True), []
    for seed in range(DRAWS):
        request = make_request(**params)
        request.draft_token_ids = [draft(seed) if callable(draft) else draft]
        request.draft_probs = None if q is None else torch.tensor([q])
        rows.append(SampleRow(0, request, seed))
    return [sampled.token_id for sampled in sampler(LOGITS[None], rows)]


@pytest.mark.parametrize("draft", [0, 2, 4])
def test_a_guessed_draft_leaves_the_distribution_as_it_is(draft):
    tokens = judged(draft, None, temperature=1.0)
    counts = [tokens.count(t) for t in range(5)]
    expected = [p * DRAWS for p in LOGITS.exp().tolist()]
    assert chi_square(counts, expected) < chi_square_limit(4)


def test_a_drawn_draft_leaves_the_distribution_as_it_is():
    """Drafts come from the draws of another distribution with the same seeds, as in the engine."""
    q = [0.1, 0.1, 0.2, 0.3, 0.3]
    rows = [SampleRow(0, make_request(temperature=1.0), seed) for seed in range(DRAWS)]
    drafts = [sampled.token_id for sampled in Sampler()(log(q)[None], rows)]
    tokens = judged(drafts.__getitem__, q, temperature=1.0)
    counts = [tokens.count(t) for t in range(5)]
    expected = [p * DRAWS for p in LOGITS.exp().tolist()]
    assert chi_square(counts, expected) < chi_square_limit(4)
    met = sum(a == b for a, b in zip(drafts, tokens, strict=True)) / DRAWS
    overlap = sum(min(a, b) for a, b in zip(q, LOGITS.exp().tolist(), strict=True))
    assert met == pytest.approx(overlap, abs=0.02)  # 1 − the distance of the two


def test_what_the_request_cut_away_is_never_accepted():
    """p is what the request's rules leave: a draft outside of it has no chance."""
    tokens = judged(3, None, temperature=1.0, top_k=2)
    counts = [tokens.count(t) for t in range(2)]
    assert sum(counts) == DRAWS
    assert chi_square(counts, [DRAWS * 4 / 7, DRAWS * 3 / 7]) < chi_square_limit(1)


def test_at_temperature_0_the_likeliest_token_is_right_and_no_other():
    assert set(judged(0, None, temperature=0)) == {0}
    assert set(judged(1, None, temperature=0)) == {0}


@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.3}, {"temperature": 0.5, "top_k": 4}],
    ids=str,
)
def test_probabilities_are_what_is_drawn_from(params):
    params = {"temperature": 1.0, **params}
    sampler, request = Sampler(), make_request(**params)
    (p,) = sampler.probabilities(LOGITS[None], [SampleRow(0, request, 0)])
    rows = [SampleRow(0, request, seed) for seed in range(DRAWS)]
    tokens = [sampled.token_id for sampled in sampler(LOGITS[None], rows)]
    kept = [t for t in range(5) if p[t] > 0]
    assert set(tokens) == set(kept)
    counts = [tokens.count(t) for t in kept]
    assert chi_square(counts, [float(p[t]) * DRAWS for t in kept]) < chi_square_limit(len(kept))


def test_each_place_after_a_draft_has_the_noise_it_will_have_without_it():
    """Row i of a request with drafts draws what row 0 will draw i tokens later."""
    flat = torch.zeros(1, 50)
    before, after = make_request(temperature=1.0), make_request(output=[5, 7], temperature=1.0)
    before.draft_token_ids = [5, 7]
    for seed in range(30):
        (a,) = Sampler()(flat, [SampleRow(0, before, seed, num_drafts=2)])
        (b,) = Sampler()(flat, [SampleRow(0, after, seed)])
        assert a == b


def test_rules_at_a_place_see_the_drafts_before_it():
    logits = log([0.4, 0.3, 0.2, 0.1])[None]
    request = make_request(temperature=0, frequency_penalty=2.0)
    request.draft_token_ids = [0, 1]
    rows = [SampleRow(0, request, 0, num_drafts=i) for i in range(3)]
    assert [sampled.token_id for sampled in Sampler()(logits, rows)] == [0, 1, 2]
    assert request.token_ids == [0]
