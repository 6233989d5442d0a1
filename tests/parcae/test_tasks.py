"""The task that needs depth: its answers against brute force, its accuracy against a tally."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from minifer.parcae.lab.models import lab_model
from minifer.parcae.lab.tasks import (
    NUM_PERMUTATIONS,
    PERMUTATIONS,
    RECIPE,
    accuracy_by_depth,
    products,
    sample_task,
    train_task,
)
from minifer.parcae.monitor import logits_by_depth


def test_answers_are_where_three_things_end_up() -> None:
    """Three things on three places, moved about for real."""
    inputs, answers = sample_task(50, 12, torch.Generator().manual_seed(0))
    assert inputs.shape == answers.shape == (50, 12)
    for row, expected in zip(inputs.tolist(), answers.tolist(), strict=True):
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
    for drawn in (inputs, answers[:, -1]):
        counts = torch.bincount(drawn.flatten(), minlength=NUM_PERMUTATIONS)
        share = counts / counts.sum()
        assert float(share.min()) > 0.1 and float(share.max()) < 0.23


def test_accuracy_is_the_share_of_right_answers_after_each_number_of_hops() -> None:
    model = lab_model(NUM_PERMUTATIONS, layers=(0, 1, 0), length=5, zero_out=False)
    found = accuracy_by_depth(model, [3, 1], rows=40, length=5)
    assert list(found) == [1, 3]
    inputs, answers = sample_task(40, 5, torch.Generator().manual_seed(2**31))
    rows = torch.cat([inputs, inputs[:, :1]], 1)
    for depth, logits in logits_by_depth(model, rows, [1, 3]):
        guesses = logits.view(40, 5, NUM_PERMUTATIONS).argmax(-1).tolist()
        for hops in range(5):
            right = sum(g[hops] == a[hops] for g, a in zip(guesses, answers.tolist(), strict=True))
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
    """A minute or two: more hops are right with more loops, also beyond the depth of training."""
    accuracy = accuracy_by_depth(train_task(), [1, 2, 4, 8, 16])
    means = [sum(accuracy[depth]) / len(accuracy[depth]) for depth in (1, 2, 4, 8, 16)]
    for shallow, deep in itertools.pairwise(means):
        assert deep > shallow + 0.03
    assert accuracy[1][4] < 0.35 and accuracy[8][4] > 0.7


def test_rows_that_cannot_be_are_refused() -> None:
    for rows, length in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="rows and length must be at least 1"):
            sample_task(rows, length, torch.Generator())
