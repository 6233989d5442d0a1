"""Steps of `minifer.kernels.cpu` over made-up weights, and what float64 says about them."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from minifer.config import ModelConfig
from minifer.kernels.cpu.build import load
from minifer.kernels.cpu.pack import pack
from minifer.kernels.cpu.step import CpuStep, LayerWeights, Rows, Weights
from minifer.weights.quantized import QuantizedWeight

SIZES = (16, 2)  # head_dim and query heads a KV head: what most tests share is compiled once


def config(**changes: Any) -> ModelConfig:
    """One layer, two query heads of one KV head."""
    sizes: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 40,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 4096,
    }
    return ModelConfig(**(sizes | changes))


def product_step(
    head: Tensor | QuantizedWeight,
    norm: Tensor,
    dtype: torch.dtype,
    library: ctypes.CDLL | None = None,
    cache: Sequence[Tensor] | None = None,
) -> CpuStep:
    """A model that is its head: the layer before it adds nothing, and its keys and values are 1.

    head [V, D]. norm [D] float32 is multiplied onto what comes in. Vectors of ±1 have a root mean
    square of 1, so they meet the head as ±norm, to the bit.
    """
    V, D = head.shape
    chosen = config(vocab_size=V, hidden_size=D)
    chosen = dataclasses.replace(chosen, rms_norm_eps=0.0)
    H, K, C, hidden = 2, 1, 16, chosen.intermediate_size
    nothing = [
        pack(torch.zeros(shape, dtype=dtype), bias)
        for shape, bias in (
            (((H + 2 * K) * C, D), torch.ones((H + 2 * K) * C)),
            ((D, H * C), None),
            ((96, D), None),
            ((D, hidden), None),
        )
    ]
    one = torch.ones(D)
    layer = LayerWeights(one, one, None, None, *nothing, window=None)
    weights = Weights([layer], norm, pack(head, dense=dtype), torch.ones(C // 2), 1.0)
    if cache is None:
        cache = [torch.zeros(64, 4, K, C, dtype=dtype) for _ in range(2)]
    return CpuStep(library or load(*SIZES), chosen, weights, cache[:1], cache[1:])


def product_rows(tokens: Tensor | Sequence[int], wanted: Sequence[int] | None = None) -> Rows:
    """Vectors [T, D] of ±1, or ids: one token a row, each a request of its own at position 0."""
    rows = range(len(tokens))
    return Rows(
        tokens.clone() if isinstance(tokens, Tensor) else tokens,
        [0] * len(rows),
        [4 * row for row in rows],
        [[row] for row in rows],
        rows if wanted is None else wanted,
    )


def signs(rows: int, columns: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (rows, columns), generator=draw).float() * 2 - 1


def dense_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """query [H, C], keys and values [S, K, C] → [H, C], all float64: the formula as it stands."""
    group = len(query) // keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("hc,shc->hs", query, keys) * query.shape[1] ** -0.5
    return torch.einsum("hs,shc->hc", scores.softmax(-1), values)


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """`torch.set_num_threads` for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
