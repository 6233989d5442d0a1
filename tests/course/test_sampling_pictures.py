"""The values of lecture 8's pictures, against what can be counted by hand."""

from __future__ import annotations

import math
import random

import pytest
import torch

from minifer import SamplingParams
from minifer.course import example
from minifer.course.pictures import sampling as pic
from minifer.course.pictures import text_stream as txt
from minifer.course.pictures.sampling_costs import bytes_a_logit
from minifer.execution import sampler
from minifer.execution.noise import vocabulary_noise
from minifer.execution.sampler import Sampled, SampleRow
from minifer.execution.sampler_reference import reference_probabilities


def test_stages_end_with_what_the_slow_sampler_may_draw() -> None:
    rng = random.Random(1)
    for _ in range(30):
        logits = torch.tensor([rng.randint(-8, 8) / 2 for _ in range(30)])
        params = {
            "temperature": rng.choice((0.5, 1.0, 1.6)),
            "min_p": rng.choice((0.0, 0.1)),
            "top_k": rng.choice((0, 7)),
            "top_p": rng.choice((0.6, 1.0)),
        }
        last = pic.filter_stages(logits, **params)[-1]
        truth = reference_probabilities(logits.tolist(), pic.make_request(**params))
        assert last.support == sorted(truth)
        for token, p in truth.items():
            assert abs(float(last.probabilities[token]) - p) < 1e-6


def test_each_stage_only_cuts_and_keeps_the_sum() -> None:
    stages = pic.filter_stages(torch.tensor([0.4, 0.3, 0.2, 0.1]).log(), top_k=3, top_p=0.7)
    assert [stage.name for stage in stages] == ["model", "temperature", "min-p", "top-k", "top-p"]
    assert [len(stage.support) for stage in stages] == [4, 4, 4, 3, 2]
    assert all(abs(float(stage.probabilities.sum()) - 1) < 1e-12 for stage in stages)


def test_entropy_and_chi_square_by_hand() -> None:
    assert pic.entropy(torch.tensor([0.5, 0.25, 0.25])) == 1.5
    assert str(pic.entropy(torch.tensor([1.0, 0.0]))) == "0.0"
    assert pic.chi_square([60, 40], [0.5, 0.5]) == 4.0
    half = pic.chi_square_limit(4) / 2  # with 4 degrees the tail is exp(-x / 2) · (1 + x / 2)
    assert 1e-7 < math.exp(-half) * (1 + half) <= 1e-6


def test_the_logits_of_every_drawn_token_are_found() -> None:
    served = example.run()
    rows = pic.rows_of(served)
    assert len(rows) == 27
    for name in "ABC":
        drawn = [int(rows[name, place].argmax()) for place in range(len(served.tokens(name)))]
        assert drawn == served.tokens(name)
    with pytest.raises(ValueError, match="output_index must be below 12 for A, got 12"):
        pic.logits_before(served, "A", 12)


def test_company_changes_nothing_but_for_a_shared_generator() -> None:
    params = SamplingParams(temperature=1, seed=3, ignore_eos=True)
    strips = pic.in_company(params)
    assert len(strips) == 4 and all(strip == strips["alone"] for strip in strips.values())

    def shared() -> object:
        generator = torch.Generator().manual_seed(3)

        def sample(logits: torch.Tensor, rows: list[SampleRow]) -> list[Sampled]:
            p = logits[[row.logits_row for row in rows]].softmax(-1)
            return [Sampled(int(torch.multinomial(q, 1, generator=generator))) for q in p]

        return sample

    strips = pic.in_company(params, shared)
    assert strips["with B and C"] != strips["alone"]


def test_a_scripted_stream_holds_what_its_bytes_say() -> None:
    stopping = SamplingParams(temperature=0, ignore_eos=True, stop=["END"])
    told = example.run(sampling=stopping, prepare=txt.scripted())
    tokens = txt.stream_data(told.events)
    held = {n: [t.held for t in tokens if t.request_id == n] for n in "ABC"}
    assert held["A"] == [0, 0, 0, 1, 2, 3, 0, 0, 0, 0, 0, 0]
    assert held["B"] == [1, 2, 0, 1, 2, 0, 0, 0, 0]
    assert held["C"] == [0, 0, 0, 1, 2, 3]
    for name in "AB":
        assert "".join(t.released for t in tokens if t.request_id == name) == txt.REPLIES[name]
        assert bytes(t.byte for t in tokens if t.request_id == name).decode() == txt.REPLIES[name]


def test_what_a_check_holds_back() -> None:
    assert txt.held_by(None, "abc") == [0, 0, 0]
    assert txt.held_by(txt.RegexCheck(r"\d{4}"), "abcdef") == [1, 2, 3, 3, 3, 3]
    assert txt.held_by(txt.WordListCheck(["key"], whole_word=False), "a key") == [0, 0, 1, 2, 5 - 2]


def test_greedy_moves_four_bytes_a_logit() -> None:
    assert abs(bytes_a_logit(4096, temperature=0) - 4) < 0.1  # no copy, one look for the largest
    assert bytes_a_logit(4096) > 99 * bytes_a_logit(4096, temperature=0)


def test_labels_of_bytes() -> None:
    assert [pic.piece(b) for b in (65, 32, 10, 0xF0)] == ["A", "␣", "\\n", "F0"]
    html = pic.filters_html(pic.filter_stages(torch.tensor([2.0, 1.0, 0.0]), top_k=1), tokens=3)
    assert html.count("cut") == 4  # two tokens, cut by top-k and still so after top-p


def test_a_cut_changes_no_race_among_those_it_spares(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(1))
    assert pic.spared_win_again(logits, range(200), top_k=9)

    def by_rank(seeds: list[int], indices: list[int], ids: torch.Tensor) -> torch.Tensor:
        return vocabulary_noise(seeds, indices, ids.shape[1])

    monkeypatch.setattr(sampler, "token_noise", by_rank)
    assert not pic.spared_win_again(logits, range(200), top_k=9)
