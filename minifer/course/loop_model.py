"""A loop model in pieces: everything but memory and plan, for those who write an engine around it.

`LoopModel.hidden` runs the model over the rows of one step. Wherever a layer needs the past it
calls `attend`, which the engine brings: it keeps keys and values and decides who sees whose. The
weights, the layers and the loop are those of `minifer.parcae`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from minifer.config import ModelConfig
from minifer.execution.attention import chunk_attention
from minifer.execution.backend import TorchBackend
from minifer.execution.forward_batch import ForwardBatch
from minifer.parcae.layers import Group, Pass
from minifer.parcae.model import Parcae


@dataclass(frozen=True)
class Place:
    """Where in the model attention is asked for. stage: "prelude", "core" or "coda". layer: in its
    stage, from 0. iteration: of the core, from 0; 0 in the other stages."""

    stage: str
    layer: int
    iteration: int


Attend = Callable[[Place, list[int], Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Parts:
    """What an engine is put together from. slot(stage, layer, iteration): number of a KV slot. kv:
    paged storage. cache: blocks and their names. plan: who computes how much."""

    slot: Callable[[str, int, int], int]
    kv: Any
    cache: Any
    plan: Callable[..., Any]


def attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of the last n of S positions.

    query [n, H, C], keys and values [S, K, C] → [n, H, C]; H / K query heads share a KV head.
    Raises `ValueError` when there are more queries than keys.
    """
    if query.shape[0] > keys.shape[0]:
        raise ValueError(f"query must be the last of {keys.shape[0]} keys, got {query.shape[0]}")
    return chunk_attention(query, keys, values, query.shape[-1] ** -0.5)


class LoopModel:
    """A loop model without a memory.

    layers: (prelude, core, coda). loops: its default depth. kv_heads, head_dim: of the keys and
    values of one token in one KV slot.
    """

    def __init__(self, model: Parcae) -> None:
        self._model = model
        loop = model.loop
        self.layers = (loop.prelude, loop.core, loop.coda)
        self.loops = loop.mean_recurrence
        self.kv_heads, self.head_dim = model.config.num_kv_heads, model.config.head_dim

    @torch.inference_mode()
    def hidden(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        loops: Sequence[int],
        attend: Attend,
    ) -> Tensor:
        """One pass over T rows, a token each → [T, D].

        loops: of each row; in iteration t of the core only rows with more than t loops take part.
        attend(place, rows, query, keys, values): rows are the numbers of those that take part, in
        order; query [n, H, C], keys and values [n, K, C] are theirs, turned to their positions;
        it returns [n, H, C]. Raises `ValueError` for lists of unequal length, none, or no loop.
        """
        if not len(token_ids) == len(positions) == len(loops) > 0 or min(loops) < 1:
            raise ValueError(
                "token_ids, positions and loops must be lists of one length, of loops of at least "
                f"1, got {len(token_ids)}, {len(positions)} and {list(loops)}"
            )
        model, everyone = self._model, list(range(len(token_ids)))
        ids = torch.tensor(token_ids)
        cos, sin = model.rotary(torch.tensor(positions))

        def at(stage: str, iteration: int, rows: list[int]) -> Pass:
            backend = _Attending(attend, stage, iteration, rows)
            group = Group(None, cast(ForwardBatch, None), 0)
            return Pass(ids[rows], cos[rows], sin[rows], (group,), None, backend)

        e = model.prelude_pass(model.embed(ids), at("prelude", 0, everyone))
        term, h = model.input_term(e), model.initial_state(e)
        for t in range(max(loops)):
            rows = [row for row in everyone if loops[row] > t]
            h[rows] = model.step(h[rows], term[rows], at("core", t, rows))
        return model.finish(h, at("coda", 0, everyone))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, D] → [R, V]."""
        return self._model.logits(hidden, TorchBackend())


class _Attending(TorchBackend):
    """Hands attention to a function. It is told the layer as a KV slot: passes begin at 0."""

    def __init__(self, attend: Attend, stage: str, iteration: int, rows: list[int]) -> None:
        self._attend, self._place, self._rows = attend, Place(stage, 0, iteration), rows

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv: Any,
        slot: int,
        batch: ForwardBatch,
        scale: float,
        window: int | None,
    ) -> Tensor:
        place = replace(self._place, layer=slot)
        return self._attend(place, list(self._rows), query, key, value)


@cache
def tiny_loop_model() -> LoopModel:
    """parcae-tiny in float32: a core of one layer and nothing else, 8 loops, bytes as tokens."""
    from minifer.weights.resolve import load_model

    return LoopModel(load_model("parcae-tiny", dtype="float32").model)


@torch.no_grad()
def random_parcae(layers: tuple[int, int, int], loops: int, seed: int) -> Parcae:
    """A small model of 29 tokens with random weights, whose depth matters: what it says is noise.

    layers: (prelude, core, coda). loops: its default depth.
    """
    from minifer.config import RopeConfig
    from minifer.loops import LoopConfig

    config = ModelConfig(
        architecture="ParcaeForCausalLM",
        vocab_size=29,
        hidden_size=36,
        intermediate_size=52,
        num_layers=sum(layers),
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=50_000.0),
        tie_word_embeddings=True,
        loop=LoopConfig(*layers, mean_recurrence=loops),
    )
    model = Parcae(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        table = name == "wte.weight" or name.startswith("value_embeds.")
        if name in ("adapter.A_log", "adapter.dt_bias"):
            parameter.copy_(0.7 * noise)
        elif parameter.dim() == 1:
            parameter.copy_((0.2 if name == "ln_f.weight" else 1.0) * (1 + 0.2 * noise))
        else:
            parameter.copy_(noise if table else noise / math.sqrt(parameter.shape[1]))
    return model
