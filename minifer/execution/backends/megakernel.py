"""Decode in one launch: the runner of backend="megakernel".

A step in which up to 16 requests have one query each is one launch of `minifer.kernels.mega`;
every other step (prefill, or prefill and decode mixed) takes the ordinary path through the model
in torch. Both write the same KV storage, so a request goes from one to the other and back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minifer.config import EngineConfig, ModelConfig
from minifer.execution.runner import ModelRunner
from minifer.execution.sampler import Picked
from minifer.kernels import mode
from minifer.kv.step_input import StepInput
from minifer.models.transformer import Transformer

MAX_BATCH = 16  # rows of a tensor core's tile


def batch_bucket(num_requests: int) -> int:
    """1, 2, 4, 8 or 16: a kernel is compiled for each of them, not for every number."""
    return 1 << (num_requests - 1).bit_length()


class MegakernelRunner(ModelRunner):
    """Prefill by the ordinary path, decode of up to 16 requests by the megakernel.

    A kernel is made, and on a GPU compiled, when the first step needs it: one for each pair of
    batch and number of splits. They share the model's weights. Logits are float32 sums that are
    never rounded to bfloat16, so `float32_logits` changes nothing in such a step.

    Raises `ValueError` for a model that the megakernel has no instructions for, and where kernels
    cannot run.
    """

    def __init__(
        self, model: Any, config: ModelConfig, engine: EngineConfig, num_blocks: int
    ) -> None:
        mode.prepare(str(next(model.parameters()).device))
        from minifer.kernels.mega.launch import (  # imports triton: after `prepare`
            Megakernel,
            resident_programs,
        )

        if not isinstance(model, Transformer):
            raise ValueError(
                f"the megakernel runs plain transformers, got {type(model).__name__}: use "
                'backend="torch"'
            )
        self.config = config
        self._tile = tile_of(config)
        super().__init__(model, config, engine, num_blocks)
        length = engine.max_model_len or config.max_position_embeddings
        length = min(length, num_blocks * engine.block_size)
        self._max_blocks = -(-length // engine.block_size)
        positions = torch.arange(length, device=self.device)
        self._rope = torch.cat(model.rotary(positions), dim=1)
        self._weights = weights_of(model)
        self._programs = resident_programs(self.device)
        self._kernels: dict[tuple[int, int], Megakernel] = {}

    def _logits(self, step: StepInput) -> Tensor | Picked:
        count = len(step.seq_lens)
        if count > MAX_BATCH or len(step.token_ids) > count:
            return super()._logits(step)
        batch = batch_bucket(count)
        kernel = self._kernel(batch, self._splits(max(step.seq_lens), batch))
        kernel.set_step(step.token_ids, step.positions, step.block_tables)
        kernel.launch()
        kernel.check()
        return kernel.logits[step.logits_rows]  # a copy; a row of the step is a request

    def _splits(self, context: int, batch: int) -> int:
        from minifer.kernels.mega.shapes import kv_splits

        return kv_splits(context, batch, self.config.num_kv_heads, self._programs)

    def _kernel(self, batch: int, splits: int) -> Any:
        from minifer.kernels.mega.launch import Megakernel

        if (batch, splits) not in self._kernels:
            self._kernels[batch, splits] = Megakernel(
                self.config,
                self._weights,
                self.kv.keys,
                self.kv.values,
                self._rope,
                batch=batch,
                splits=splits,
                max_blocks=self._max_blocks,
                tile=self._tile,
            )
        return self._kernels[batch, splits]


def tile_of(config: ModelConfig) -> int:
    """Rows of a weight tile: 16, or 8 for sizes that 16 does not divide. Raises `ValueError` for
    a model that the megakernel cannot run."""
    from minifer.kernels.mega.shapes import decode_shape

    try:
        return decode_shape(config, tile=16).tile
    except ValueError:
        return decode_shape(config, tile=8).tile


def weights_of(model: Transformer) -> Any:
    """The model's own tensors, in the kernel's order."""
    from minifer.kernels.mega.launch import Weights

    layers = []
    decoders: list[Any] = list(model.layers)
    for layer in decoders:
        attention, mlp = layer.self_attn, layer.mlp
        tensors = (
            layer.input_layernorm.weight,
            attention.qkv_proj.weight,
            attention.o_proj.weight,
            layer.post_attention_layernorm.weight,
            mlp.gate_up_proj.weight,
            mlp.down_proj.weight,
        )
        layers.append(tuple(tensor.detach() for tensor in tensors))
    embedding = model.embed_tokens.weight.detach()
    own_head: Any = model.lm_head
    head = embedding if own_head is None else own_head.weight.detach()
    return Weights(layers, embedding, model.norm.weight.detach(), head)
