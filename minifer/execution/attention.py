"""Paged attention in torch, and the dense slow twin it is compared with.

The context of a request lies scattered over blocks; its block table says where. Decode rows (one
query each) run as one padded batch; every longer query runs on its own, over its exact context.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minifer.execution.forward_batch import DecodeIndex, ForwardBatch


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: ForwardBatch,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Causal attention of query [T, H, C] over caches [N, P, K, C]; returns [T, H, C].

    Query i at position p sees the keys at positions p − window + 1 … p of its own request (all
    of 0 … p when window is None). Heads are grouped: H/K query heads share one KV head.
    """
    out = torch.empty_like(query)
    keys, values = key_cache.flatten(0, 1), value_cache.flatten(0, 1)  # [N·P, K, C]
    if batch.decode is not None:
        rows = batch.decode.rows
        out[rows] = _decode(query[rows], keys, values, batch.decode, scale, window)
    for part in batch.prefill:
        span = slice(part.start, part.end)
        out[span] = chunk_attention(
            query[span], gather(keys, part.slots), gather(values, part.slots), scale, window
        )
    return out


def gather(cache: Tensor, slots: Tensor) -> Tensor:
    """Keys or values [N·P, K, C] at int64 slots [...], copied side by side: [..., K, C].

    `cache[slots]` is the same, but on a CPU it copies number by number and takes three times as
    long; `index_select` copies rows.
    """
    return cache.index_select(0, slots.flatten()).unflatten(0, slots.shape)


def chunk_attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """The last T of S positions attend: query [T, H, C], keys and values [S, K, C] → [T, H, C]."""
    T, S = query.shape[0], keys.shape[0]
    if window is None and T == S:
        mask, causal = None, True  # a prompt from its first token: the library's own mask
    else:
        mask, causal = causal_mask(T, S, window, query.device), False
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def _decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    index: DecodeIndex,
    scale: float,
    window: int | None,
) -> Tensor:
    """One query a request: query [B', H, C]; contexts padded to the longest, S."""
    k, v = gather(keys, index.slots), gather(values, index.slots)  # [B', S, K, C]
    seen = None
    if index.ragged or window is not None:
        position = torch.arange(k.shape[1], device=query.device)
        seen = position < index.lengths
        if window is not None:
            seen &= position >= index.lengths - window
        # What is masked is zeroed too: it may hold NaN, and 0 · NaN is NaN.
        hidden = ~seen[:, :, None, None]
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    out = F.scaled_dot_product_attention(
        query[:, :, None],
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=None if seen is None else seen[:, None, None],
        scale=scale,
        enable_gqa=True,
    )
    return out[:, :, 0]


def causal_mask(T: int, S: int, window: int | None, device: torch.device | str = "cpu") -> Tensor:
    """bool [T, S]: may query row t (position S − T + t) see key s?"""
    query = torch.arange(S - T, S, device=device)[:, None]
    key = torch.arange(S, device=device)[None]
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    return seen


def dense_attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """The slow twin: one request, contiguous keys and values, one query and head at a time.

    query [T, H, C] are the last T of the S positions of keys, values [S, K, C]. Written as the
    definition: softmax(q · Kᵀ · scale) · V over the keys a query may see. Returns [T, H, C].
    """
    T, H, _ = query.shape
    S, K, _ = keys.shape
    out = torch.empty_like(query)
    for t in range(T):
        position = S - T + t
        first = 0 if window is None else max(0, position - window + 1)
        for h in range(H):
            k = keys[first : position + 1, h * K // H]
            v = values[first : position + 1, h * K // H]
            weights = torch.softmax(k @ query[t, h] * scale, dim=0)
            out[t, h] = weights @ v
    return out
