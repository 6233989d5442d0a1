"""What the model tests share: tiny configurations and the paged path, spelled out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minifer.config import ModelConfig
from minifer.execution.backend import TorchBackend
from minifer.execution.forward_batch import ForwardBatch
from minifer.execution.kv_storage import KVStorage
from minifer.models.transformer import Transformer


def tiny_config(**changes: object) -> ModelConfig:
    """Llama with 2 layers, D 32, 4 heads, 2 KV heads, C 8, V 64."""
    values: dict[str, object] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
    return ModelConfig(**(values | changes))  # type: ignore[arg-type]


def tiny_model(seed: int = 0, **changes: object) -> Transformer:
    model = Transformer(tiny_config(**changes))
    model.init_weights(seed, std=0.3)  # large enough that a wrong rope or mask shows
    return model


class PagedRun:
    """Requests whose KV lies in blocks handed out in a scrambled order, run step by step.

    The storage is poisoned: an output that touches an unwritten position becomes NaN.
    """

    def __init__(self, model: Transformer, num_requests: int = 1, block_size: int = 4) -> None:
        config = model.config
        self.model, self.block_size = model, block_size
        blocks = 8  # a request
        self.kv = KVStorage(
            config.num_kv_slots,
            num_requests * blocks,
            block_size,
            config.num_kv_heads,
            config.head_dim,
            model.embed_tokens.weight.dtype,
            debug=True,
        )
        order = torch.randperm(num_requests * blocks, generator=torch.Generator().manual_seed(1))
        self.tables = order.view(num_requests, blocks).tolist()
        self.computed = [0] * num_requests

    def slots(self, request: int, positions: range) -> list[int]:
        P = self.block_size
        return [self.tables[request][p // P] * P + p % P for p in positions]

    @torch.inference_mode()
    def step(self, new: Sequence[tuple[int, Sequence[int]]]) -> list[Tensor]:
        """Run the new tokens of some requests in one batch; their logits [tokens, V] each."""
        tokens: list[int] = []
        positions: list[int] = []
        slot_mapping: list[int] = []
        starts, lens = [0], []
        for request, ids in new:
            span = range(self.computed[request], self.computed[request] + len(ids))
            tokens += ids
            positions += span
            slot_mapping += self.slots(request, span)
            starts.append(len(tokens))
            lens.append(span.stop)
            self.computed[request] = span.stop
        batch = ForwardBatch.build(
            tokens,
            positions,
            slot_mapping,
            starts,
            lens,
            [self.tables[request] for request, _ in new],
            list(range(len(tokens))),
            self.block_size,
        )
        backend = TorchBackend()
        logits = self.model.logits(self.model(batch, self.kv, backend), backend)
        return list(logits.split([len(ids) for _, ids in new]))


def paged_logits(model: Transformer, tokens: Sequence[int], chunks: Sequence[int]) -> Tensor:
    """Logits [T, V] of one sequence prefilled in `chunks`, then decoded token by token."""
    run = PagedRun(model)
    sizes = [*chunks, *[1] * (len(tokens) - sum(chunks))]
    parts, start = [], 0
    for size in sizes:
        parts += run.step([(0, tokens[start : start + size])])
        start += size
    return torch.cat(parts)
