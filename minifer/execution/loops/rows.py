"""The rows of one step of a loop model, and any part of them as a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from minifer.execution.backend import Backend
from minifer.execution.forward_batch import ForwardBatch
from minifer.execution.kv_storage import KVStorage
from minifer.execution.loops.state import Span, make_spans
from minifer.kv.step_input import StepInput
from minifer.parcae.layers import Group, Pass

Members = tuple[int, ...]  # rows of the step, ascending
RowGroup = tuple[Members, bool, int]  # of one iteration; do they write KV, and to which slot


class Rows:
    """The rows of one step. spans: of each entry. h, term: [T, D], once tokens have entered.

    Index tensors and parts of the batch are made once a step: rows that go through one iteration
    together mostly go through the next one together, too.
    """

    def __init__(self, step: StepInput, device: torch.device) -> None:
        self.step = step
        self.batch = ForwardBatch.of(step, device)
        self.cos = self.sin = self.h = self.term = self.batch.token_ids  # set by the runner
        self.spans = [
            make_spans(entry, first)
            for entry, first in zip(step.scheduled, step.query_start, strict=False)
        ]
        self.index = cache(lambda rows: torch.tensor(rows, device=device))
        self.part = cache(self._part)

    def done(self, entry: int) -> bool:
        return not any(span.looping for span in self.spans[entry])

    def take(self, tensor: Tensor, rows: Members) -> Tensor:
        """The entries of some rows; all of them are no copy."""
        return tensor if len(rows) == self.batch.num_tokens else tensor[self.index(rows)]

    def put(self, tensor: Tensor, rows: Members, new: Tensor) -> Tensor:
        """`tensor` with the entries of some rows replaced, in place unless it is all of them."""
        if len(rows) == self.batch.num_tokens:
            return new
        if tensor.shape[1:] != new.shape[1:]:  # the first to come
            tensor = new.new_empty(self.batch.num_tokens, *new.shape[1:])
        tensor[self.index(rows)] = new
        return tensor

    def cut(
        self, rows: Members, groups: Sequence[RowGroup], kv: KVStorage, backend: Backend
    ) -> Pass:
        """The pass over some rows."""
        place = {row: i for i, row in enumerate(rows)} if len(groups) > 1 else {}
        parts = tuple(
            Group(
                self.index(tuple(place[row] for row in members)) if place else None,
                self.part(members, writes),
                slot,
            )
            for members, writes, slot in groups
        )
        token_ids = self.take(self.batch.token_ids, rows)
        cos, sin = self.take(self.cos, rows), self.take(self.sin, rows)
        return Pass(token_ids, cos, sin, parts, kv, backend)

    def _part(self, rows: Members, writes: bool = True) -> ForwardBatch:
        """These rows as a batch of their own."""
        if not writes:
            part = self.part(rows, True)
            return replace(part, slot_mapping=torch.full_like(part.slot_mapping, -1))
        if len(rows) == self.batch.num_tokens:
            return self.batch
        return select_rows(self.batch, self.step.positions, rows, self.index(rows))


def rows_of(spans: Iterable[Span]) -> Members:
    return tuple(row for span in spans for row in span.rows)


def select_rows(
    batch: ForwardBatch, positions: Sequence[int], rows: Members, chosen: Tensor
) -> ForwardBatch:
    """Rows of a batch alone. A request that keeps all of its rows stays as it is; one that keeps
    some is taken apart into a request for each, whose context ends with it.

    positions: of all rows. chosen: `rows` as a tensor.
    """
    members: list[int] = []
    query_start, seq_lens = [0], []
    kept = set(rows)
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
