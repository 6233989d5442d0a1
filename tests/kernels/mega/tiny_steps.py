"""Decode steps of a tiny Llama for the megakernel in the co-simulator, and what torch makes of
them in float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from fakes import tiny_config, tiny_model
from torch import Tensor

from minifer.config import ModelConfig
from minifer.execution.backend import TorchBackend
from minifer.execution.forward_batch import ForwardBatch
from minifer.execution.kv_storage import KVStorage
from minifer.execution.reference import reference_logits
from minifer.kernels.mega.isa import DecodeShape
from minifer.kernels.mega.launch import Megakernel, MegakernelOptions, Tiles, Weights
from minifer.kernels.mega.schedule import Schedule
from minifer.kernels.mega.shapes import decode_shape
from minifer.models.registry import build_model

CONFIG = tiny_config(
    vocab_size=256, hidden_size=64, intermediate_size=128, head_dim=16, tie_word_embeddings=False
)
NARROW = dataclasses.replace(CONFIG, num_heads=2, num_kv_heads=1)  # fewer instructions
BLOCK_SIZE = 4
PROMPTS = ([5, 17, 3, 200, 31, 8, 77], [9, 41], [250, 1, 1, 66, 12])
# What float32 may leave of a logit's |Δ| against float64. In which order numpy sums a tile
# differs from CPU to CPU: 0.7e-5 to 1.4e-5 were seen on one, less than 1e-5 on another.
ROUNDING = 5e-5
TABLES = ([6, 2, 9], [3, 0, 11], [1, 7, 4])  # blocks of each prompt, room for 12 tokens


def shape(batch: int = 1, splits: int = 1, config: ModelConfig = CONFIG) -> DecodeShape:
    return decode_shape(config, batch, splits)


@functools.cache
def exact_model(config: ModelConfig):
    """The tiny model in float64."""
    model = build_model(config, torch.float64)
    model.load_state_dict(tiny_model(config).state_dict())
    return model


@functools.cache
def logits_after(config: ModelConfig, tokens: tuple[int, ...]) -> Tensor:
    """float64's [V] at the last token, rounded once."""
    return reference_logits(exact_model(config), list(tokens))[-1]


@functools.cache
def _filled_cache(config: ModelConfig) -> KVStorage:
    """The prompts but for their last tokens, in their blocks; NaN elsewhere."""
    sizes = (config.num_layers, 12, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    storage = KVStorage(*sizes, torch.float32)
    storage.poison(range(12))
    model, backend = tiny_model(config), TorchBackend()
    with torch.inference_mode():
        for prompt, table in zip(PROMPTS, TABLES, strict=True):
            T = len(prompt) - 1
            slots = [table[t // BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE for t in range(T)]
            batch = ForwardBatch.build(
                prompt[:-1], list(range(T)), slots, [0, T], [T], [table], [T - 1], BLOCK_SIZE, "cpu"
            )
            model(batch, storage, backend)
    return storage


@dataclass
class TinyStep:
    """A megakernel before its step; `prompts` are the tokens so far, the new one included."""

    config: ModelConfig
    megakernel: Megakernel
    prompts: list[list[int]]

    def expected(self) -> list[Tensor]:
        return [logits_after(self.config, tuple(prompt)) for prompt in self.prompts]

    def set(self) -> None:
        last = [prompt[-1] for prompt in self.prompts]
        positions = [len(prompt) - 1 for prompt in self.prompts]
        self.megakernel.set_step(last, positions, TABLES[: len(last)])

    def error(self) -> float:
        """The largest |Δlogit|; NaN where one is."""
        rows = zip(self.megakernel.logits, self.expected(), strict=False)
        return max(float((got - want).abs().max()) for got, want in rows)

    def tokens_are_right(self) -> bool:
        picked = self.megakernel.tokens.tolist()[: len(self.prompts)]
        return picked == [int(row.argmax()) for row in self.expected()]


def tiny_step(
    schedule: Schedule,
    requests: int | None = None,
    options: MegakernelOptions | None = None,
    stale: bool = False,
    config: ModelConfig = CONFIG,
    tiles: Tiles | None = None,
) -> TinyStep:
    """A step of `requests` prompts (the whole batch) with memory of its own.

    Where nothing was written yet lies NaN; stale: numbers of the size that a step before this one
    might have left, because the interpreter stops at NaN where a GPU goes on.
    """
    model, storage = tiny_model(config), _filled_cache(config)
    batch = schedule.shape.batch
    keys, values = ([t.clone() for t in side] for side in (storage.keys, storage.values))
    rope = torch.cat(model.rotary(torch.arange(config.max_position_embeddings)), 1).contiguous()
    layers = [
        (
            layer.input_layernorm.weight,
            layer.self_attn.qkv_proj.weight,
            layer.self_attn.o_proj.weight,
            layer.post_attention_layernorm.weight,
            layer.mlp.gate_up_proj.weight,
            layer.mlp.down_proj.weight,
        )
        for layer in model.layers
    ]
    weights = Weights(layers, model.embed_tokens.weight, model.norm.weight, model.lm_head.weight)
    megakernel = Megakernel(
        config, _detached(weights), keys, values, rope,
        batch=batch, splits=schedule.shape.splits, max_blocks=3, options=options,
        schedule=schedule, capacity=4, tiles=tiles,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for name, buffer in megakernel.buffers_by_name().items():
        if buffer.dtype.is_floating_point:
            left = torch.randn(buffer.shape, generator=generator) if stale else torch.nan
            is_cache = name[1:].isdigit()
            buffer.copy_(torch.where(buffer.isnan() | (not is_cache), left, buffer))
    step = TinyStep(config, megakernel, [list(p) for p in PROMPTS[: requests or batch]])
    step.set()
    return step


def _detached(weights: Weights) -> Weights:
    layers: Sequence[tuple[Tensor, ...]] = [
        tuple(t.detach() for t in layer) for layer in weights.layers
    ]
    rest = (weights.embedding.detach(), weights.norm.detach(), weights.head.detach())
    return Weights(layers, *rest)
