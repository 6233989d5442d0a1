"""One step's input as tensors: the frozen value that goes through the model.

A batch mixes prefill and decode: each request contributes its scheduled tokens, one after the
other, on a flat token axis. Example, three requests that compute 3, 1 and 2 tokens::

    token_ids     [ a0 a1 a2 | b7 | c4 c5 ]        T = 6
    positions     [  0  1  2 |  7 |  4  5 ]
    query_start   [ 0, 3, 4, 6 ]                    B + 1 (cu_seqlens_q)
    seq_lens      [ 3, 8, 6 ]                       context after this step
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from minifer.kv.step_input import StepInput


@dataclass(frozen=True)
class DecodeIndex:
    """The requests with one query, for attention over all of them at once.

    A chunk of one prompt token is among them: to attention it is no different from a decode.

    rows: int64 [B'], their rows on the token axis. slots: int64 [B', S], flat slots of their
    contexts, padded to the longest. lengths: int64 [B', 1]. ragged: is any of it padding?
    """

    rows: Tensor
    slots: Tensor
    lengths: Tensor
    ragged: bool


@dataclass(frozen=True)
class PrefillIndex:
    """A request with several queries: its rows [start, end), and its context's slots [S]."""

    start: int
    end: int
    slots: Tensor


@dataclass(frozen=True)
class ForwardBatch:
    """The input of one forward pass.

    token_ids, positions, slot_mapping: int64 [T]. slot = block_id · P + offset; a slot below 0
    is not written. query_start: B + 1 offsets on the token axis. seq_lens: B context lengths,
    counting this step's tokens. block_tables: int64 [B, max blocks], padded with 0.
    logits_rows: int64 [R], the token rows whose logits somebody needs.
    block_size: P. query_start_host, seq_lens_host: the same numbers as Python ints, so that no
    stage waits for the device to read them.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    logits_rows: Tensor
    block_size: int
    query_start_host: tuple[int, ...]
    seq_lens_host: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.query_start_host[-1]

    @property
    def num_requests(self) -> int:
        return len(self.seq_lens_host)

    @cached_property
    def decode(self) -> DecodeIndex | None:
        """Made once a step, used by every layer; None when nobody has a single query."""
        starts, lens = self.query_start_host, self.seq_lens_host
        single = [b for b in range(len(lens)) if starts[b + 1] - starts[b] == 1]
        if not single:
            return None
        lengths = [lens[b] for b in single]
        device = self.token_ids.device
        tables = self.block_tables
        if len(single) < len(lens):
            tables = tables[single]
        return DecodeIndex(
            rows=_int64([starts[b] for b in single], device),
            slots=self._slots(tables, max(lengths)),
            lengths=_int64(lengths, device)[:, None],
            ragged=min(lengths) < max(lengths),
        )

    @cached_property
    def prefill(self) -> list[PrefillIndex]:
        """The requests with more than one query, in batch order."""
        starts = self.query_start_host
        return [
            PrefillIndex(starts[b], starts[b + 1], self._slots(self.block_tables[b], length))
            for b, length in enumerate(self.seq_lens_host)
            if starts[b + 1] - starts[b] > 1
        ]

    def _slots(self, block_table: Tensor, length: int) -> Tensor:
        """Flat slots of positions 0 … length − 1; a table [..., blocks] may be batched."""
        P = self.block_size
        first = block_table[..., : -(-length // P), None] * P  # [..., blocks, 1]
        slots = first + torch.arange(P, device=block_table.device)
        return slots.flatten(-2)[..., :length].contiguous()

    @classmethod
    def of(cls, step: StepInput, device: torch.device) -> ForwardBatch:
        """A step of the engine as tensors."""
        return cls.build(
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

    @classmethod
    def build(
        cls,
        token_ids: Sequence[int],
        positions: Sequence[int],
        slot_mapping: Sequence[int],
        query_start: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        logits_rows: Sequence[int],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> ForwardBatch:
        """Python lists to tensors. Raises `ValueError` when the lengths do not agree."""
        T = query_start[-1]
        if not (len(token_ids) == len(positions) == len(slot_mapping) == T):
            raise ValueError(
                f"token_ids, positions and slot_mapping must have query_start[-1]={T} entries, "
                f"got {len(token_ids)}, {len(positions)} and {len(slot_mapping)}"
            )
        width = max(len(table) for table in block_tables)
        padded = array("q")
        for table in block_tables:
            padded.fromlist([*table, *[0] * (width - len(table))])

        def tensor(values: Sequence[int]) -> Tensor:
            return _int64(values, device)

        return cls(
            token_ids=tensor(token_ids),
            positions=tensor(positions),
            slot_mapping=tensor(slot_mapping),
            query_start=tensor(query_start),
            seq_lens=tensor(seq_lens),
            block_tables=tensor(padded).view(len(block_tables), width),
            logits_rows=tensor(logits_rows),
            block_size=block_size,
            query_start_host=tuple(query_start),
            seq_lens_host=tuple(seq_lens),
        )


def _int64(values: Sequence[int], device: torch.device | str) -> Tensor:
    """`torch.tensor(values)`, which looks at each number several times; an array does so once."""
    numbers = values if isinstance(values, array) else array("q", values)
    if not numbers:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.frombuffer(numbers, dtype=torch.int64).to(device)
