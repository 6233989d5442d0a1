"""Steps for the compiled runner: chunks of one request, decodes of several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minifer.execution.runner import ModelRunner
from minifer.kv.step_input import StepInput

BLOCK = 4


def scattered_table(num_tokens: int, num_blocks: int) -> list[int]:
    """Blocks for a request, in no order."""
    draw = torch.Generator().manual_seed(1)
    return torch.randperm(num_blocks, generator=draw)[: -(-num_tokens // BLOCK)].tolist()


def step_of(parts: Sequence[tuple[Sequence[int], int, list[int]]]) -> StepInput:
    """parts: (new tokens, position of the first, block table) of each request; logits of all."""
    step = StepInput(BLOCK)
    for tokens, start, table in parts:
        span = range(start, start + len(tokens))
        step.token_ids += tokens
        step.positions += span
        step.slot_mapping += [table[p // BLOCK] * BLOCK + p % BLOCK for p in span]
        step.query_start.append(len(step.token_ids))
        step.seq_lens.append(span.stop)
        step.block_tables.append(list(table))
    step.logits_rows = list(range(len(step.token_ids)))
    return step


def logits_in_chunks(
    runner: ModelRunner, tokens: Sequence[int], chunks: Sequence[int] = ()
) -> Tensor:
    """Logits [T, V] of one sequence: first `chunks`, then token by token."""
    table = scattered_table(len(tokens), runner.kv.num_blocks)
    sizes = [*chunks, *[1] * (len(tokens) - sum(chunks))]
    parts, start = [], 0
    for size in sizes:
        made = runner.forward(step_of([(tokens[start : start + size], start, table)]))
        assert isinstance(made, Tensor)
        parts.append(made)
        start += size
    return torch.cat(parts)
