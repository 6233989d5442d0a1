"""The rows of one step of a loop model, and any part of them as a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from minifer.execution.backend import Backend
from minifer.execution.forward_batch import ForwardBatch
from minifer.execution.kv_storage import KVStorage
from minifer.execution.loops.state import SuspendedLoops
from minifer.kv.step_input import StepInput
from minifer.parcae.layers import Group, Pass

RowGroup = tuple[list[int], ForwardBatch, int]  # rows of the step, their batch, their KV slot


class Rows:
    """The rows of one step, and how far each has come.

    spans: of each entry. loops, depth: iterations run, and to run. looping: does it go on?
    threshold: of those that may leave early.
    """

    def __init__(self, step: StepInput, device: torch.device) -> None:
        self.step = step
        self.batch = ForwardBatch.build(
            step.token_ids,
            step.positions,
            step.slot_mapping,
            step.query_start,
            step.seq_lens,
            step.block_tables,
            step.logits_rows,
            step.block_size,
            device,
        )
        self.cos = self.sin = self.batch.token_ids  # set by `_enter`
        self.h: Tensor | None = None
        self.term: Tensor | None = None
        self.spans: list[range] = []
        self.new: list[int] = []
        self.suspended: list[tuple[range, SuspendedLoops]] = []
        self.loops: list[int] = []
        self.looping: list[bool] = []
        self.depth: list[int] = []
        self.threshold: list[float | None] = []
        self.part = cache(partial(_part, self.batch))
        for entry, first in zip(step.scheduled, step.query_start, strict=False):
            request, span = entry.request, range(first, first + entry.num_new)
            self.spans.append(span)
            if request.suspended is None:
                self.new += span
                self.loops += [0] * len(span)
                self.looping += [True] * len(span)
            else:
                self.suspended.append((span, request.suspended))
                self.loops += request.suspended.loops
                self.looping += request.suspended.looping
            self.depth += [request.num_loops or 1] * len(span)
            self.threshold += [
                request.params.exit_threshold if p >= request.num_prompt_tokens else None
                for p in range(entry.start, entry.end)
            ]

    def done(self, entry: int) -> bool:
        span = self.spans[entry]
        return not any(self.looping[span.start : span.stop])

    def cut(
        self,
        rows: list[int],
        groups: Sequence[RowGroup],
        kv: KVStorage,
        backend: Backend,
    ) -> Pass:
        """The pass over some rows; groups name theirs by their place in the whole batch."""
        place = {row: i for i, row in enumerate(rows)}
        device = self.batch.token_ids.device
        parts = tuple(
            Group(
                None
                if len(groups) == 1
                else torch.tensor([place[row] for row in members], device=device),
                batch,
                slot,
            )
            for members, batch, slot in groups
        )
        token_ids, cos, sin = self.batch.token_ids[rows], self.cos[rows], self.sin[rows]
        return Pass(token_ids, cos, sin, parts, kv, backend)


def _part(batch: ForwardBatch, rows: tuple[int, ...], writes: bool = True) -> ForwardBatch:
    part = batch if len(rows) == batch.num_tokens else select_rows(batch, rows)
    return part if writes else replace(part, slot_mapping=torch.full_like(part.slot_mapping, -1))


def select_rows(batch: ForwardBatch, rows: Sequence[int]) -> ForwardBatch:
    """These rows alone, ascending. A request that keeps all of its rows stays as it is; one
    that keeps some is taken apart into a request for each, whose context ends with it."""
    members: list[int] = []
    query_start, seq_lens = [0], []
    kept, positions = set(rows), batch.positions.tolist()
    for b, length in enumerate(batch.seq_lens_host):
        own = range(batch.query_start_host[b], batch.query_start_host[b + 1])
        left = [row for row in own if row in kept]
        if len(left) == len(own):
            members.append(b)
            seq_lens.append(length)
            query_start.append(query_start[-1] + len(own))
            continue
        for row in left:
            members.append(b)
            seq_lens.append(positions[row] + 1)
            query_start.append(query_start[-1] + 1)
    device = batch.token_ids.device
    chosen = torch.tensor(rows, device=device)
    return ForwardBatch(
        token_ids=batch.token_ids[chosen],
        positions=batch.positions[chosen],
        slot_mapping=batch.slot_mapping[chosen],
        query_start=torch.tensor(query_start, device=device),
        seq_lens=torch.tensor(seq_lens, device=device),
        block_tables=batch.block_tables[torch.tensor(members, device=device)],
        logits_rows=chosen[:0],
        block_size=batch.block_size,
        query_start_host=tuple(query_start),
        seq_lens_host=tuple(seq_lens),
    )
