"""A loop model that forwards in microseconds, an engine on it, and its slow twins."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor

from minifer.config import EngineConfig, ModelConfig
from minifer.engine import Engine
from minifer.execution.attention import dense_attention
from minifer.execution.backend import TorchBackend
from minifer.execution.forward_batch import ForwardBatch
from minifer.execution.reference import DenseBackend, sequence_batch
from minifer.loops import LoopConfig, LoopKVPolicy
from minifer.parcae.model import Parcae


def loop_model_config(**changes) -> ModelConfig:
    """Two core layers between one of each side; with value embeddings, for 8 loops."""
    sizes = {
        "architecture": "ParcaeForCausalLM",
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 4,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "loop": LoopConfig(prelude=1, core=2, coda=1, mean_recurrence=8),
    }
    return ModelConfig(**{**sizes, **changes})


@functools.cache
def loop_model(config: ModelConfig | None = None, seed: int = 0) -> Parcae:
    """Random weights, strong enough that every depth up to 8 says something else."""
    model = Parcae(config or loop_model_config())
    model.init_weights(seed, zero_out=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and not name.startswith(("adapter.", "value_embeds.")):
                parameter.mul_(2.0)
    return model


def loop_engine(*, config: ModelConfig | None = None, sinks=(), tokenizer=None, eos=(), **options):
    """An `Engine` on `loop_model` in debug mode, whose steps suspend requests."""
    config = config or loop_model_config()
    loaded = SimpleNamespace(
        model=loop_model(config),
        config=config,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(eos),
        generation_defaults={},
    )
    suspending = {"loop_batching": "patient", "debug": True}
    options = {"block_size": 4, "num_kv_blocks": 64, **suspending, **options}
    return Engine.from_loaded(loaded, EngineConfig(**options), sinks=sinks)


# -- slow twins: one request, no blocks, greedy


@functools.cache
def twin_model(policy: str) -> Parcae:
    """`loop_model` with the KV slots of a policy; the weights are the same tensors."""
    config = loop_model_config()
    assert config.loop is not None
    model = Parcae(replace(config, loop=replace(config.loop, kv_policy=policy)))
    model.load_state_dict(loop_model().state_dict(), assign=True)
    return model


def twin_tokens(
    prompt: Sequence[int], depth: int, max_tokens: int, policy: str = "full"
) -> list[int]:
    """The answer to one prompt, every token at one depth, under a KV policy."""
    if LoopKVPolicy(policy).overwrites:
        return _overwriting_tokens(prompt, depth, max_tokens, policy)
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(twin_logits(tokens, depth, policy)[-1].argmax()))
    return tokens[len(prompt) :]


@torch.inference_mode()
def twin_logits(tokens: Sequence[int], depth: int, policy: str = "full") -> Tensor:
    """float32 [T, V]: a whole sequence from scratch. policy: full or first-m."""
    model = twin_model(policy)
    backend = DenseBackend() if policy == "full" else FirstSlots()
    return model.logits(model(sequence_batch(tokens), None, backend, depth), backend)


@torch.inference_mode()
def _overwriting_tokens(
    prompt: Sequence[int], depth: int, max_tokens: int, policy: str
) -> list[int]:
    """The prompt in one pass, then token by token."""
    model, backend = twin_model(policy), OverwrittenSlots()
    tokens, new = list(prompt), list(prompt)
    for _ in range(max_tokens):
        T, S = len(new), len(tokens)
        backend.start = S - T
        positions = list(range(S - T, S))
        batch = ForwardBatch.build(new, positions, [-1] * T, [0, T], [S], [[0]], [T - 1], 1)
        hidden = model(batch, None, backend, depth)
        new = [int(model.logits(hidden[-1:], backend).argmax())]
        tokens += new
    return tokens[len(prompt) :]


class FirstSlots(DenseBackend):
    """first-m over one whole sequence: a KV slot keeps what was put into it first."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, query, key, value, kv, slot, batch, scale, window):
        key, value = self.kept.setdefault(slot, (key, value))
        return super().attend(query, key, value, kv, slot, batch, scale, window)


class OverwrittenSlots(TorchBackend):
    """terminal and cyclic-m: a contiguous cache in which whoever comes last wins.

    start: position of the pass's first token.
    """

    name = "contiguous"

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.start = 0

    def attend(self, query, key, value, kv, slot, batch, scale, window):
        keys, values = self.kept.get(slot, (key[:0], value[:0]))
        keys = torch.cat((keys[: self.start], key))
        values = torch.cat((values[: self.start], value))
        self.kept[slot] = keys, values
        return dense_attention(query, keys, values, scale, window)
