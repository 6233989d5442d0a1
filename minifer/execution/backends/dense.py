"""Rows of one length, side by side, without a KV cache: how a model is trained.

What the engine's back ends do token by token and block by block is here one product over all rows,
and autograd goes through it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minifer.execution.backend import TorchBackend
from minifer.execution.forward_batch import ForwardBatch
from minifer.execution.kv_storage import KVStorage


class RowsBackend(TorchBackend):
    """Attention over all rows of a batch made by `row_batch` at once, differentiable."""

    name = "rows"

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
        """query [B · S, H, C] is seen as [B, H, S, C]; returns [B · S, H, C] in float32.

        Raises `ValueError` for a sliding window, which it does not have.
        """
        if window is not None:
            raise ValueError(f"the {self.name} back end attends to whole rows, got window={window}")
        group = query.shape[1] // key.shape[1]
        q, k, v = (
            x.float().unflatten(0, (batch.num_requests, -1)).transpose(1, 2)
            for x in (query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1))
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return out.transpose(1, 2).flatten(0, 1)


def row_batch(rows: int, length: int, device: torch.device | str = "cpu") -> ForwardBatch:
    """`rows` sequences of `length` tokens that keep no KV; the token ids are filled in later."""
    T = rows * length
    return ForwardBatch.build(
        token_ids=[0] * T,
        positions=list(range(length)) * rows,
        slot_mapping=[-1] * T,
        query_start=list(range(0, T + 1, length)),
        seq_lens=[length] * rows,
        block_tables=[[0]] * rows,
        logits_rows=[],
        block_size=1,
        device=device,
    )
