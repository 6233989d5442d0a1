"""Small random loop models whose depth matters, and the ways to run them."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import torch
from parcae_float64 import Float64Parcae
from torch import Tensor

from minifer.config import EngineConfig, ModelConfig, RopeConfig
from minifer.engine import Engine
from minifer.execution.backend import TorchBackend
from minifer.execution.forward_batch import ForwardBatch
from minifer.execution.kv_storage import KVStorage
from minifer.execution.reference import DenseBackend
from minifer.loops import LoopConfig
from minifer.parcae.model import Parcae

VOCAB = 29


def loop_config(layers=(2, 2, 2), **loop) -> ModelConfig:
    """Wider than the 32 channels a gate reads, two query heads a KV head, heads of 8."""
    prelude, core, coda = layers
    return ModelConfig(
        architecture="ParcaeForCausalLM",
        vocab_size=VOCAB,
        hidden_size=36,
        intermediate_size=52,
        num_layers=sum(layers),
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=50_000.0),
        tie_word_embeddings=True,
        loop=LoopConfig(prelude, core, coda, **{"mean_recurrence": 4, **loop}),
    )


@torch.no_grad()
def loop_model(layers=(2, 2, 2), seed=0, *, dtype=torch.float32, **loop) -> Parcae:
    """Every tensor random, none at what training starts from. The decays lie around 0.5, free
    matrices below radius 1; blocks move the state by about its own length."""
    model = Parcae(loop_config(layers, **loop), dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name in ("adapter.A_log", "adapter.dt_bias"):
            parameter.copy_(0.7 * noise)
        elif parameter.dim() == 1:
            gain = 0.2 if name == "ln_f.weight" else 1.0  # logits of about 4
            parameter.copy_(gain * (1 + 0.2 * noise))
        elif name == "wte.weight" or name.startswith("value_embeds."):
            parameter.copy_(noise)
        else:
            gain = 0.5 if name == "adapter.W" else 1.0
            parameter.copy_(gain * noise / math.sqrt(parameter.shape[1]))
    return model


def published_weights(model: Parcae) -> dict[str, np.ndarray]:
    """By the names of a published checkpoint."""
    own = dict(model.named_parameters())
    return {
        part.name: own[part.parameter][part.start : part.stop].detach().double().numpy()
        for part in model.weight_parts()
    }


def float64(model: Parcae) -> Float64Parcae:
    return Float64Parcae(
        published_weights(model), (model.config.num_heads, model.config.num_kv_heads)
    )


def some_tokens(count: int, seed=0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=generator).tolist()


def dense_batch(*sequences: list[int]) -> ForwardBatch:
    """Whole sequences, one after the other, for a back end without a cache."""
    lengths = [len(s) for s in sequences]
    ends = np.cumsum(lengths).tolist()
    total = ends[-1]
    return ForwardBatch.build(
        token_ids=[token for s in sequences for token in s],
        positions=[p for n in lengths for p in range(n)],
        slot_mapping=[-1] * total,
        query_start=[0, *ends],
        seq_lens=lengths,
        block_tables=[[0]] * len(lengths),
        logits_rows=list(range(total)),
        block_size=1,
    )


@torch.no_grad()
def dense_logits(model: Parcae, *sequences: list[int], num_loops=None, h0=None) -> Tensor:
    """Logits [T, V] of whole sequences, without a cache."""
    backend = DenseBackend()
    return model.logits(model(dense_batch(*sequences), None, backend, num_loops, h0=h0), backend)


class Cached:
    """One sequence through `Parcae.forward` with a KV cache, a chunk a call. Unwritten KV is NaN,
    and its blocks do not lie in order."""

    def __init__(self, model: Parcae, num_blocks=8, block_size=4) -> None:
        config = model.config
        slots, heads = config.num_kv_slots, config.num_kv_heads
        self.kv = KVStorage(
            slots, num_blocks, block_size, heads, config.head_dim, torch.float32, debug=True
        )
        self.model, self.length = model, 0
        self.table = list(reversed(range(num_blocks)))

    @torch.no_grad()
    def run(self, tokens: list[int], num_loops=None, h0=None) -> Tensor:
        """Logits [n, V] of the next tokens."""
        size, start, end = self.kv.block_size, self.length, self.length + len(tokens)
        batch = ForwardBatch.build(
            token_ids=tokens,
            positions=list(range(start, end)),
            slot_mapping=[self.table[p // size] * size + p % size for p in range(start, end)],
            query_start=[0, len(tokens)],
            seq_lens=[end],
            block_tables=[self.table],
            logits_rows=list(range(len(tokens))),
            block_size=size,
        )
        self.length = end
        backend = TorchBackend()
        hidden = self.model(batch, self.kv, backend, num_loops, h0=h0)
        self.kv.check_guard_bands()
        return self.model.logits(hidden, backend)


def loop_engine(model: Parcae, **options) -> Engine:
    """A real engine around a model, in debug mode (unwritten KV is NaN), that suspends requests."""
    loaded = SimpleNamespace(
        model=model,
        config=model.config,
        tokenizer=None,
        eos_token_ids=frozenset(),
        generation_defaults={},
    )
    suspending = {"loop_batching": "patient", "debug": True}
    options = {"block_size": 4, "num_kv_blocks": 64, **suspending, **options}
    return Engine.from_loaded(loaded, EngineConfig(**options))
