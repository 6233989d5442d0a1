"""The whole engine's slow twin: no cache, no batch, no blocks.

Every token recomputes the full sequence with `DenseBackend`. Slow on purpose, and short enough to
be believed; tests compare every clever path with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minifer.execution.attention import dense_attention
from minifer.execution.backend import TorchBackend
from minifer.execution.forward_batch import ForwardBatch
from minifer.execution.kv_storage import KVStorage


class DenseBackend(TorchBackend):
    """Attention over the tokens of this very batch: reads and writes no KV cache."""

    name = "dense"

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv: KVStorage | None,
        slot: int,
        batch: ForwardBatch,
        scale: float,
        window: int | None,
    ) -> Tensor:
        starts = batch.query_start_host
        parts = [
            dense_attention(query[a:b], key[a:b], value[a:b], scale, window)
            for a, b in itertools.pairwise(starts)
        ]
        return torch.cat(parts)


def sequence_batch(token_ids: Sequence[int], device: torch.device | str = "cpu") -> ForwardBatch:
    """One whole sequence as a batch that touches no cache and asks for logits everywhere."""
    T = len(token_ids)
    rows = list(range(T))
    return ForwardBatch.build(token_ids, rows, [-1] * T, [0, T], [T], [[0]], rows, 1, device)


@torch.inference_mode()
def reference_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """Logits float32 [T, V] at every position of one sequence."""
    backend = DenseBackend()
    device = next(model.parameters()).device
    batch = sequence_batch(token_ids, device)
    return model.logits(model(batch, None, backend), backend).float()


def reference_generate(
    model: Any, prompt: Sequence[int], max_tokens: int, eos_token_ids: Sequence[int] = ()
) -> list[int]:
    """Greedy continuation: argmax of the last row, again and again; ends after an end token."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        token = int(reference_logits(model, tokens)[-1].argmax())
        tokens.append(token)
        if token in eos_token_ids:
            break
    return tokens[len(prompt) :]
