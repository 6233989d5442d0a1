"""A step as tensors is what its lists say, position by position."""

from __future__ import annotations

import random

import pytest
import torch

from minifer.execution.forward_batch import ForwardBatch


def build(queries: list[int], contexts: list[int], block_size: int) -> ForwardBatch:
    """A batch of requests with these queries and contexts on shuffled blocks."""
    draw = random.Random(sum(contexts))
    needed = [-(-context // block_size) for context in contexts]
    blocks = list(range(sum(needed)))
    draw.shuffle(blocks)
    tables = [[blocks.pop() for _ in range(count)] for count in needed]
    starts, positions, slots = [0], [], []
    for query, context, table in zip(queries, contexts, tables, strict=True):
        starts.append(starts[-1] + query)
        own = range(context - query, context)
        positions += own
        slots += [table[p // block_size] * block_size + p % block_size for p in own]
    tokens = [draw.randrange(100) for _ in positions]
    rows = [start - 1 for start in starts[1:]]
    return ForwardBatch.build(tokens, positions, slots, starts, contexts, tables, rows, block_size)


def slots_of(batch: ForwardBatch, request: int, length: int) -> list[int]:
    """The definition: slot = block · P + offset, one position at a time."""
    P, table = batch.block_size, batch.block_tables[request].tolist()
    return [table[p // P] * P + p % P for p in range(length)]


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize(
    ("queries", "contexts"),
    [([1], [1]), ([1, 1, 1], [33, 32, 17]), ([1, 4, 1, 20], [9, 4, 48, 31]), ([2], [50])],
)
def test_slots_of_contexts_are_those_of_the_definition(queries, contexts, block_size):
    batch = build(queries, contexts, block_size)
    single = [b for b, query in enumerate(queries) if query == 1]
    if single:
        longest = max(contexts[b] for b in single)
        found = batch.decode
        assert found.rows.tolist() == [batch.query_start_host[b] for b in single]
        assert found.lengths.flatten().tolist() == [contexts[b] for b in single]
        assert found.slots.shape == (len(single), longest)
        for row, b in enumerate(single):
            assert found.slots[row, : contexts[b]].tolist() == slots_of(batch, b, contexts[b])
    else:
        assert batch.decode is None
    several = [b for b, query in enumerate(queries) if query > 1]
    assert len(batch.prefill) == len(several)
    for part, b in zip(batch.prefill, several, strict=True):
        assert part.slots.tolist() == slots_of(batch, b, contexts[b])


def test_lists_become_tensors_of_their_own():
    tokens, tables = [5, 6, 7], [[4, 2], [9]]
    batch = ForwardBatch.build(tokens, [0, 1, 0], [8, 9, 18], [0, 2, 3], [2, 1], tables, [], 2)
    assert batch.block_tables.tolist() == [[4, 2], [9, 0]]
    assert batch.token_ids.tolist() == tokens
    assert batch.token_ids.dtype == batch.logits_rows.dtype == torch.int64
    assert batch.logits_rows.shape == (0,)
    tokens[0], tables[0][0] = 1, 1
    assert batch.token_ids[0] == 5
    assert batch.block_tables[0, 0] == 4
