"""The back end of our own kernels: compiled on a GPU, in Triton's interpreter on a CPU.

A layer is six launches for a decode step, seven where contexts are split: norm and qkv product,
RoPE and append, attention (and its merge), output product and residual, norm and gate/up product,
down product and residual.

Importing this module imports triton, which then has decided where kernels run: call
`minifer.kernels.mode.prepare` first.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from minifer.execution.backend import TorchBackend, Weight
from minifer.execution.forward_batch import ForwardBatch
from minifer.execution.kv_storage import KVStorage
from minifer.kernels.compat import num_programs_at_once
from minifer.kernels.flash_attention import flash_attention
from minifer.kernels.inject import inject
from minifer.kernels.linear import gated, linear, norm_linear
from minifer.kernels.mode import prepare
from minifer.kernels.paged_decode import num_splits, paged_decode
from minifer.kernels.rms_norm import rms_norm
from minifer.kernels.rope_append import rope_append


@dataclass(frozen=True)
class _Part:
    """Some requests of a batch. rows: theirs on the token axis, int64; None: all of them."""

    rows: Tensor | None
    block_tables: Tensor
    seq_lens: Tensor
    query_start: Tensor
    max_query: int
    max_context: int


def _whole(weight: Weight) -> Tensor:
    """For the type checker: `make_runner` refuses codes."""
    assert isinstance(weight, Tensor), weight
    return weight


class TritonBackend(TorchBackend):
    """Every operation of `Backend` as a kernel of `minifer.kernels`.

    device: "cpu", "cuda", "cuda:1", …; raises `ValueError` where kernels cannot run on it. pdl:
    programmatic dependent launch, NVIDIA GPUs of compute capability 9.0 and newer.
    """

    name = "triton"

    def __init__(self, device: str, pdl: bool = False) -> None:
        prepare(device)
        self._pdl = pdl
        self._programs = num_programs_at_once(torch.device(device))
        self._split: tuple[ForwardBatch, _Part | None, _Part | None] | None = None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps, pdl=self._pdl)

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None = None
    ) -> Tensor:
        # a view only where a gate reads the first channels of wider rows
        return linear(x.contiguous(), _whole(weight), bias, residual, pdl=self._pdl)

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, weight: Weight, bias: Tensor | None
    ) -> Tensor:
        return norm_linear(x, norm, eps, _whole(weight), bias, pdl=self._pdl)

    def norm_gate_up(
        self, x: Tensor, norm: Tensor, eps: float, weight: Weight, bias: Tensor | None
    ) -> Tensor:
        return gated(x, norm, eps, _whole(weight), bias, pdl=self._pdl)

    def inject(self, h: Tensor, decay: Tensor, term: Tensor) -> Tensor:
        return inject(h, decay, term, pdl=self._pdl)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv: KVStorage | None,
        slot: int,
        batch: ForwardBatch,
        scale: float,
        window: int | None,
    ) -> Tensor:
        if kv is None:
            raise ValueError(f"the {self.name} back end keeps a KV cache, kv must not be None")
        caches, slots = (kv.keys[slot], kv.values[slot]), batch.slot_mapping
        query = rope_append(query, key, value, cos, sin, *caches, slots, pdl=self._pdl)
        decode, prefill = self._parts(batch)
        if prefill is None and decode is not None:
            return self._decode(query, caches, decode, scale, window)
        if decode is None and prefill is not None:
            return self._prefill(query, caches, prefill, scale, window)
        assert decode is not None and prefill is not None
        out = torch.empty_like(query)
        out[decode.rows] = self._decode(query[decode.rows], caches, decode, scale, window)
        out[prefill.rows] = self._prefill(query[prefill.rows], caches, prefill, scale, window)
        return out

    def _decode(
        self,
        query: Tensor,
        caches: tuple[Tensor, Tensor],
        part: _Part,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """The requests with one query: query [B', H, C]."""
        longest = part.max_context if window is None else min(part.max_context, window)
        splits = num_splits(len(query), caches[0].shape[2], longest, self._programs)
        return paged_decode(
            query, *caches, part.block_tables, part.seq_lens, scale, window,
            num_splits=splits, pdl=self._pdl,
        )  # fmt: skip

    def _prefill(
        self,
        query: Tensor,
        caches: tuple[Tensor, Tensor],
        part: _Part,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """The requests with more queries, one after the other: query [T', H, C]."""
        return flash_attention(
            query, *caches, part.block_tables, part.query_start, part.seq_lens, scale, window,
            max_query=part.max_query, pdl=self._pdl,
        )  # fmt: skip

    def _parts(self, batch: ForwardBatch) -> tuple[_Part | None, _Part | None]:
        """The requests with one query and those with more, found once a step for all layers."""
        if self._split is None or self._split[0] is not batch:
            starts = batch.query_start_host
            counts = [end - start for start, end in pairwise(starts)]
            single = [b for b, count in enumerate(counts) if count == 1]
            longer = [b for b, count in enumerate(counts) if count > 1]
            self._split = (batch, _part(batch, counts, single), _part(batch, counts, longer))
        return self._split[1:]


def _part(batch: ForwardBatch, counts: list[int], members: list[int]) -> _Part | None:
    if not members:
        return None
    most = max(counts[b] for b in members)
    context = max(batch.seq_lens_host[b] for b in members)
    if len(members) == len(counts):
        whole = (batch.block_tables, batch.seq_lens, batch.query_start)
        return _Part(None, *whole, max_query=most, max_context=context)
    device, starts = batch.token_ids.device, batch.query_start_host
    rows: list[int] = []
    query_start = [0]
    for b in members:
        rows += range(starts[b], starts[b + 1])
        query_start.append(len(rows))
    chosen = torch.tensor(members, device=device)
    return _Part(
        torch.tensor(rows, device=device),
        batch.block_tables[chosen],
        batch.seq_lens[chosen],
        torch.tensor(query_start, device=device),
        most,
        context,
    )
