"""The task that needs depth: its answers against brute force, its accuracy against a tally."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from minifer.parcae.lab.models import lab_model
from minifer.parcae.lab.tasks import (
    NO_ANSWER,
    NUM_PERMUTATIONS,
    NUM_SYMBOLS,
    PERMUTATIONS,
    RECIPE,
    START,
    accuracy_by_depth,
    products,
    sample_task,
    train_task,
)
from minifer.parcae.monitor import logits_by_depth


def test_answers_are_where_three_things_end_up() -> None:
    """Three things on three places, moved about for real."""
    inputs, answers = sample_task(50, 12, torch.Generator().manual_seed(0))
    assert inputs.shape == answers.shape == (50, 13)
    assert (inputs[:, 0] == START).all() and (answers[:, 0] == NO_ANSWER).all()
    for row, expected in zip(inputs[:, 1:].tolist(), answers[:, 1:].tolist(), strict=True):
        at = [0, 1, 2]  # where each thing lies
        for number, answer in zip(row, expected, strict=True):
            at = [PERMUTATIONS[number][place] for place in at]
            assert tuple(at) == PERMUTATIONS[answer]


def test_the_table_of_products_is_a_group_whose_order_matters() -> None:
    table = products()
    identity = PERMUTATIONS.index((0, 1, 2))
    everything = list(range(NUM_PERMUTATIONS))
    assert table[identity].tolist() == table[:, identity].tolist() == everything
    for row in [*table, *table.T]:
        assert sorted(row.tolist()) == everything
    for a in everything:
        assert torch.equal(table[table[a]], table[a][table])  # (a b) c = a (b c)
    assert not torch.equal(table, table.T)


def test_every_permutation_is_drawn_and_every_answer_occurs() -> None:
    inputs, answers = sample_task(300, 6, torch.Generator().manual_seed(0))
    for drawn in (inputs[:, 1:], answers[:, -1]):
        counts = torch.bincount(drawn.flatten(), minlength=NUM_PERMUTATIONS)
        share = counts / counts.sum()
        assert float(share.min()) > 0.1 and float(share.max()) < 0.23


def best_shares(inputs: Tensor, answers: Tensor) -> list[float]:
    """What can be right after 0, 1, … hops, by brute force: positions whose logits are the same in
    an untrained model are the same question, and get the answer that is right most often."""
    model = lab_model(NUM_SYMBOLS, layers=(0, 1, 0), length=inputs.shape[1], zero_out=False)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "core" in name and weight.dim() == 2:
                weight.mul_(4)  # attention far from uniform: the order of a row shows
    shown = torch.cat([inputs, inputs[:, :1]], 1)
    [(_, logits)] = logits_by_depth(model, shown, [6])
    asked = (answers != NO_ANSWER).flatten()
    apart = (logits[asked, None] - logits[asked]).abs().amax(-1)
    questions = (apart < 1e-3).int().argmax(1)  # the first position that looks like this one
    expected = answers.flatten()[asked]
    counts = torch.zeros(len(expected), NUM_PERMUTATIONS, dtype=torch.int64)
    counts.index_put_((questions, expected), torch.ones_like(expected), accumulate=True)
    right = (counts.argmax(1)[questions] == expected).view(len(inputs), -1)
    return right.double().mean(0).tolist()


def test_every_question_can_be_answered_but_not_without_the_start_symbol() -> None:
    """All rows of three permutations. Without a start, "a a" and "a a a" look like "a"."""
    symbols = torch.cartesian_prod(*[torch.arange(NUM_PERMUTATIONS)] * 3)
    answers = symbols.clone()
    for i in (1, 2):
        answers[:, i] = products()[symbols[:, i], answers[:, i - 1]]
    start, silent = torch.full((216, 1), START), torch.full((216, 1), NO_ANSWER)
    with_start = torch.cat([start, symbols], 1), torch.cat([silent, answers], 1)
    assert best_shares(*with_start) == [1.0, 1.0, 1.0]
    assert best_shares(*sample_task(150, 3, torch.Generator().manual_seed(0))) == [1.0, 1.0, 1.0]
    without = best_shares(symbols, answers)
    assert without[0] == 1.0 and without[1] == pytest.approx(31 / 36)


def test_accuracy_is_the_share_of_right_answers_after_each_number_of_hops() -> None:
    model = lab_model(NUM_SYMBOLS, layers=(0, 1, 0), length=6, zero_out=False)
    found = accuracy_by_depth(model, [3, 1], rows=40, length=5)
    assert list(found) == [1, 3]
    inputs, answers = sample_task(40, 5, torch.Generator().manual_seed(2**31))
    rows = torch.cat([inputs, inputs[:, :1]], 1)
    for depth, logits in logits_by_depth(model, rows, [1, 3]):
        guesses = logits.view(40, 6, NUM_SYMBOLS).argmax(-1).tolist()
        for hops in range(5):
            at = 1 + hops
            right = sum(g[at] == a[at] for g, a in zip(guesses, answers.tolist(), strict=True))
            assert found[depth][hops] == pytest.approx(right / 40)


def test_training_learns_the_answer_that_takes_no_hop_first() -> None:
    seen: list[int] = []
    recipe = replace(RECIPE, steps=25, rows=16, length=3, mean_recurrence=2, warmup=5)
    model = train_task(recipe, width=32, on_step=lambda record: seen.append(record.step))
    assert seen == list(range(1, 26))
    accuracy = accuracy_by_depth(model, [2], rows=200, length=3)[2]
    assert accuracy[0] > 0.9 and accuracy[0] > accuracy[2] + 0.3


@pytest.mark.slow
def test_each_loop_is_worth_about_a_hop() -> None:
    """A minute or two: more hops are right with more loops, also beyond the depth of training, and
    in the end all are."""
    accuracy = accuracy_by_depth(train_task(), [1, 2, 4, 8, 16])
    means = [sum(accuracy[depth]) / len(accuracy[depth]) for depth in (1, 2, 4, 8, 16)]
    for shallow, deep in itertools.pairwise(means):
        assert deep > shallow + 0.05
    assert accuracy[1][4] < 0.25 and accuracy[4][4] > 0.7
    assert accuracy[8][11] < 0.6 and min(accuracy[16]) > 0.95


def test_rows_that_cannot_be_are_refused() -> None:
    for rows, length in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="rows and length must be at least 1"):
            sample_task(rows, length, torch.Generator())
