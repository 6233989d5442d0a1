"""The block that prelude, core and coda are made of.

    x ─┬─ norm ─ q, k, v (+ value embedding) ─ rope ─ q, k norm ─ attention ─ o ─ + ─┬─ norm ─ MLP +
       └──────────────────────────────────────────────────────────────────────────┘ └────────────┘

Differences from the transformer of `minifer.models`: RoPE turns neighbouring dimensions (2i,
2i + 1); q and k are divided by their root mean square, without weights; every second layer adds a
*value embedding*, a row of a table looked up by the token's id and gated by x, to v; the MLP is
down(½ relu(up(x))²). (https://arxiv.org/abs/2604.12946, table 18; the gate's range and the ½ are
those of the released code, https://github.com/sandyresearch/parcae.)

A rotation keeps lengths, so the norm of q and k is the same before and after it. A permutation of
their dimensions, the same for both, keeps every score, so neighbouring pairs may be laid out as
half-split ones. Both are done here, in this order, and what is left is what every back end does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minifer.config import ModelConfig
from minifer.models.transformer import Linear, RMSNorm

if TYPE_CHECKING:
    from minifer.execution.backend import Backend
    from minifer.execution.forward_batch import ForwardBatch
    from minifer.execution.kv_storage import KVStorage

GATE_CHANNELS = 32  # of the normed input, which a value embedding's gate reads


@dataclass(frozen=True)
class Group:
    """Rows that attend through one KV slot: all that are at the same iteration.

    rows: int64, which rows of the pass; None: all of them, in order. batch: of these rows alone.
    slot: KV slot of the stack's first layer.
    """

    rows: Tensor | None
    batch: ForwardBatch
    slot: int


@dataclass(frozen=True)
class StandIns:
    """Rows that make no keys and values in an iteration: those they used last stand in.

    rows: bool [T]. last: by layer, (k, v) [T, K, C] of the iteration before, which this one
    replaces; the same dictionary goes through all iterations.
    """

    rows: Tensor
    last: dict[int, tuple[Tensor, Tensor]]

    def apply(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.last:
            stands = self.rows[:, None, None]
            old_k, old_v = self.last[layer]
            k, v = torch.where(stands, old_k, k), torch.where(stands, old_v, v)
        self.last[layer] = k, v
        return k, v


@dataclass(frozen=True)
class Pass:
    """What the blocks of one stack share beside x [T, D] when they run once.

    token_ids: int64 [T]. cos, sin: [T, C/2]. groups: cover every row once. kv: None for back ends
    that keep no cache. stand_ins: None when every row makes its own keys and values.
    """

    token_ids: Tensor
    cos: Tensor
    sin: Tensor
    groups: Sequence[Group]
    kv: KVStorage | None
    backend: Backend
    stand_ins: StandIns | None = None


class Attention(nn.Module):
    """Causal attention with value embeddings. layer: 0 … P + R + C − 1; offset: in its stack."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        offset: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        assert config.loop is not None  # it is a loop model's
        D, H, K, C = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.heads = (H, K, K)
        self.head_dim = C
        self.scale = C**-0.5
        self.layer, self.offset = layer, offset
        self.qkv_proj = Linear(D, (H + 2 * K) * C, False, dtype, device)
        self.o_proj = Linear(H * C, D, False, dtype, device)
        gated = config.loop.has_value_embedding(layer)
        self.ve_gate = Linear(GATE_CHANNELS, K, False, dtype, device) if gated else None

    def forward(self, x: Tensor, norm: RMSNorm, table: nn.Embedding | None, p: Pass) -> Tensor:
        """x [T, D] → x + attention(norm(x)) [T, D]. table: the value embedding [V, K · C]."""
        normed = norm(x, p.backend)
        qkv = self.qkv_proj(normed, p.backend).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split(self.heads, dim=1)
        q, k = _unit_rms(_half_split(q)), _unit_rms(_half_split(k))
        if self.ve_gate is not None and table is not None:
            gate = 2 * torch.sigmoid(self.ve_gate(normed[:, :GATE_CHANNELS], p.backend))  # [T, K]
            v = v + gate[:, :, None] * F.embedding(p.token_ids, table.weight).view_as(v)
        if p.stand_ins is not None:
            k, v = p.stand_ins.apply(self.layer, k, v)
        return self.o_proj(self._attend(q, k, v, p).flatten(1), p.backend, residual=x)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, p: Pass) -> Tensor:
        """q [T, H, C], k and v [T, K, C] → [T, H, C], each group through its own KV slot."""
        out: Tensor | None = None
        for group in p.groups:
            rows, slot = group.rows, group.slot + self.offset
            if rows is None:
                args = (q, k, v, p.cos, p.sin)
            else:
                args = (q[rows], k[rows], v[rows], p.cos[rows], p.sin[rows])
            part = p.backend.attention(*args, p.kv, slot, group.batch, self.scale, None)
            if rows is None:
                return part
            out = torch.empty_like(q) if out is None else out
            out[rows] = part
        assert out is not None  # a pass has rows
        return out


class MLP(nn.Module):
    """down(½ relu(up(x))²)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        D, hidden = config.hidden_size, config.intermediate_size
        self.up_proj = Linear(D, hidden, False, dtype, device)
        self.down_proj = Linear(hidden, D, False, dtype, device)

    def forward(self, x: Tensor, norm: RMSNorm, backend: Backend) -> Tensor:
        """x [T, D] → x + MLP(norm(x)) [T, D]."""
        up = backend.norm_linear(x, norm.weight, norm.eps, self.up_proj.weight, None)
        return self.down_proj(0.5 * F.relu(up).square(), backend, residual=x)


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to what flows past it."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        offset: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.norm_1 = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.attn = Attention(config, layer, offset, dtype, device)
        self.norm_2 = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.mlp = MLP(config, dtype, device)

    def forward(self, x: Tensor, table: nn.Embedding | None, p: Pass) -> Tensor:
        """x [T, D] → [T, D]."""
        x = self.attn(x, self.norm_1, table, p)
        return self.mlp(x, self.norm_2, p.backend)


def _half_split(x: Tensor) -> Tensor:
    """x [T, heads, C]: pairs (2i, 2i + 1) → pairs (i, i + C/2)."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _unit_rms(x: Tensor) -> Tensor:
    """x [T, heads, C] / rms(x), in float32."""
    return F.rms_norm(x.float(), (x.shape[-1],)).to(x.dtype)
