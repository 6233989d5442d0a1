"""What every rung of a cell decodes: weights, KV cache, tokens, and the float32 truth about them.

A cell is one token for each of B requests whose contexts hold S tokens with it. Weights and cache
are random: what they hold changes no time, and a model of this size needs no download. Block tables
count up, so that the same memory is also one dense cache [B, S', K, C]: the torch rungs read it
without a gather, as the fastest torch decoders do, and the others through their block tables.

What lies behind the context, and the slot that the step itself has to fill, holds NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from minifer.config import ModelConfig
from minifer.execution.backend import Backend, TorchBackend
from minifer.execution.forward_batch import ForwardBatch
from minifer.execution.kv_storage import KVStorage
from minifer.kernels.mega.shapes import MODELS
from minifer.models.transformer import Transformer
from minifer.perf.costs import OpCost, decode_cost

BLOCK_SIZE = 16
STEPS_PER_SAMPLE = 32  # at most; a step that moves on needs room for as many tokens


@dataclass(frozen=True)
class Cell:
    """model: a name in `kernels.mega.shapes.MODELS`. layers: only the first so many, None for all.
    Raises `ValueError` for sizes out of range."""

    model: str
    batch: int
    context: int
    layers: int | None = None

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"model must be one of {', '.join(MODELS)}, got {self.model!r}")
        longest = MODELS[self.model].max_position_embeddings - STEPS_PER_SAMPLE
        if not 1 <= self.context <= longest:
            raise ValueError(f"context must be 1 to {longest} for {self.model}, got {self.context}")
        if self.batch < 1:
            raise ValueError(f"batch must be at least 1, got {self.batch}")
        most = MODELS[self.model].num_layers
        if self.layers is not None and not 1 <= self.layers <= most:
            raise ValueError(f"layers must be 1 to {most} for {self.model}, got {self.layers}")

    @property
    def config(self) -> ModelConfig:
        whole = MODELS[self.model]
        return whole if self.layers is None else replace(whole, num_layers=self.layers)

    def cost(self) -> OpCost:
        """FLOPs and bytes of a step, bfloat16; its weight and KV bytes are the floor."""
        return decode_cost(self.config, self.batch, self.context).total()

    def __str__(self) -> str:
        plural = "" if self.layers == 1 else "s"
        depth = "" if self.layers is None else f", {self.layers} layer{plural} only"
        return f"{self.model}, batch {self.batch}, context {self.context}{depth}"


def cells_by_value(
    models: Iterable[str],
    batches: Iterable[int],
    contexts: Iterable[int],
    layers: int | None = None,
) -> list[Cell]:
    """All combinations that a model allows, in the order in which a short run should take them:
    one by one away from the first of each list, so the first of all comes first."""
    ranked = [
        (m + b + c, m, b, c, (model, batch, context))
        for m, model in enumerate(models)
        for b, batch in enumerate(batches)
        for c, context in enumerate(contexts)
    ]
    cells = []
    for *_, (model, batch, context) in sorted(ranked):
        if model not in MODELS or context <= _longest(model):
            cells.append(Cell(model, batch, context, layers))
    return cells


def _longest(model: str) -> int:
    return MODELS[model].max_position_embeddings - STEPS_PER_SAMPLE


class DenseBackend(TorchBackend):
    """Torch's own operations, without a read by the host: any step of it can be captured."""

    name = "torch, dense cache"

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
        """query [B, H, C] over the caches [N, P, K, C] seen as [B, S', K, C]; equal contexts."""
        if kv is None or window is not None:
            raise ValueError("a decode cell has a KV cache and no sliding window")
        B, S = batch.num_requests, batch.seq_lens_host[0]
        dense = []
        for cache, new in ((kv.keys[slot], key), (kv.values[slot], value)):
            cache.flatten(0, 1)[batch.slot_mapping] = new
            dense.append(cache.view(B, -1, *cache.shape[2:])[:, :S].transpose(1, 2))
        out = F.scaled_dot_product_attention(
            query[:, :, None], dense[0], dense[1], scale=scale, enable_gqa=True
        )
        return out[:, :, 0]


@dataclass(frozen=True)
class DecodeCase:
    """A cell in memory. probes: int64 [n, B], the tokens of n steps that are compared; every one
    stands at the same position."""

    cell: Cell
    model: Transformer
    kv: KVStorage
    batch: ForwardBatch
    probes: Tensor

    @property
    def device(self) -> torch.device:
        return self.batch.token_ids.device

    def forget(self) -> None:
        """NaN where the step writes and behind it: nothing of an earlier step is left."""
        B, last = self.cell.batch, self.cell.context - 1
        for cache in (*self.kv.keys, *self.kv.values):
            cache.view(B, -1, *cache.shape[2:])[:, last:] = math.nan

    def step(self, backend: Backend) -> tuple[Tensor, Tensor]:
        """Logits float32 [B, V] and the likeliest tokens int64 [B], for `batch.token_ids`."""
        hidden = self.model(self.batch, self.kv, backend)
        logits = self.model.logits(hidden, backend)
        return logits, logits.argmax(-1)


@torch.no_grad()
def build_case(cell: Cell, device: torch.device, seed: int = 0, num_probes: int = 8) -> DecodeCase:
    """Random bfloat16 weights and KV, drawn on the device."""
    config = cell.config
    generator = torch.Generator(device).manual_seed(seed)
    model = Transformer(config, torch.bfloat16, device).requires_grad_(False)
    for parameter in model.parameters():
        mean, std = (0.0, 0.02) if parameter.dim() == 2 else (1.0, 0.1)
        parameter.normal_(mean, std, generator=generator)
    width = -(-(cell.context + STEPS_PER_SAMPLE) // BLOCK_SIZE)
    tables = [list(range(b * width, (b + 1) * width)) for b in range(cell.batch)]
    heads, C = config.num_kv_heads, config.head_dim
    shape = (config.num_kv_slots, cell.batch * width, BLOCK_SIZE, heads, C)
    kv = KVStorage(*shape, torch.bfloat16, device)
    for cache in (*kv.keys, *kv.values):
        cache.normal_(generator=generator)
    last = cell.context - 1
    batch = ForwardBatch.build(
        token_ids=[0] * cell.batch,
        positions=[last] * cell.batch,
        slot_mapping=[b * width * BLOCK_SIZE + last for b in range(cell.batch)],
        query_start=range(cell.batch + 1),
        seq_lens=[cell.context] * cell.batch,
        block_tables=tables,
        logits_rows=range(cell.batch),
        block_size=BLOCK_SIZE,
        device=device,
    )
    probes = torch.randint(
        config.vocab_size, (num_probes, cell.batch), generator=generator, device=device
    )
    case = DecodeCase(cell, model, kv, batch, probes)
    case.forget()
    return case


@torch.no_grad()
def float32_logits(case: DecodeCase) -> Tensor:
    """The truth [n, B, V]: the same numbers, all arithmetic in float32."""
    config, kv = case.cell.config, case.kv
    model = Transformer(config, torch.float32, case.device)
    for target, source in zip(model.parameters(), case.model.parameters(), strict=True):
        target.copy_(source)
    blocks, P, K, C = kv.keys[0].shape
    wide = KVStorage(len(kv.keys), blocks, P, K, C, torch.float32, case.device)
    for target_cache, cache in zip((*wide.keys, *wide.values), (*kv.keys, *kv.values), strict=True):
        target_cache.copy_(cache)
    truth = DecodeCase(case.cell, model, wide, case.batch, case.probes)
    backend, logits = DenseBackend(), []
    for tokens in case.probes:
        case.batch.token_ids.copy_(tokens)
        logits.append(truth.step(backend)[0].clone())
    return torch.stack(logits)
