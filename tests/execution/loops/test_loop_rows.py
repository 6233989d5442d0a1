"""Some rows of a step as a batch of their own: what is built of them from the start."""

from __future__ import annotations

from dataclasses import fields

import torch

from minifer.execution.forward_batch import ForwardBatch
from minifer.execution.loops.rows import select_rows

# Three requests compute tokens 4 … 6, 2 and 0 … 1; blocks of 4.
POSITIONS = [4, 5, 6, 2, 0, 1]
TABLES = [[3, 7], [5], [1]]
SLOTS = [28, 29, 30, 22, 4, 5]
TOKENS = [10, 11, 12, 13, 14, 15]


def whole() -> ForwardBatch:
    return ForwardBatch.build(TOKENS, POSITIONS, SLOTS, [0, 3, 4, 6], [7, 3, 2], TABLES, [2, 3], 4)


def check(rows: tuple[int, ...], starts: list[int], lengths: list[int], owners: list[int]) -> None:
    """`rows` are requests `owners` with contexts `lengths`, from `starts` on."""
    part = select_rows(whole(), POSITIONS, rows, torch.tensor(rows))
    tokens, positions, slots = ([of[r] for r in rows] for of in (TOKENS, POSITIONS, SLOTS))
    tables = [TABLES[owner] + [0] * (2 - len(TABLES[owner])) for owner in owners]
    expected = ForwardBatch.build(tokens, positions, slots, starts, lengths, tables, [], 4)
    for field in fields(ForwardBatch):
        ours, right = getattr(part, field.name), getattr(expected, field.name)
        if isinstance(right, torch.Tensor):
            assert ours.dtype == right.dtype and ours.tolist() == right.tolist(), field.name
        else:
            assert ours == right, field.name


def test_a_request_that_keeps_all_of_its_rows_stays_one():
    check((0, 1, 2, 4, 5), [0, 3, 5], [7, 2], [0, 2])


def test_one_that_keeps_some_is_a_request_a_row_whose_context_ends_with_it():
    check((0, 2, 3, 5), [0, 1, 2, 3, 4], [5, 7, 3, 2], [0, 0, 1, 2])


def test_one_that_keeps_none_is_gone():
    check((3,), [0, 1], [3], [1])
