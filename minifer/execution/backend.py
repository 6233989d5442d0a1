"""The operations a model is written in, behind one small protocol.

A model never asks which device or library runs it. `TorchBackend` is the reference that every
other back end is compared with.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from minifer.execution.attention import paged_attention
from minifer.execution.forward_batch import ForwardBatch
from minifer.execution.kv_storage import KVStorage, write_kv
from minifer.execution.quantized_linear import quantized_linear
from minifer.weights.quantized import QuantizedWeight, Weight


class Backend(Protocol):
    """What a model may ask for. Letters: T tokens, D width, H query heads, K KV heads, C head dim.

    The operations are as wide as a kernel can make them: what a norm reads is what the product
    after it reads, so both are one operation here. `TorchBackend` writes each as its parts.
    """

    name: str

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., D] · weight [D] / rms(x), computed in float32, returned in x's dtype."""
        ...

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None = None
    ) -> Tensor:
        """x [T, in] · weight [out, in]ᵀ + bias [out] (+ residual [T, out]) → [T, out].

        A weight may come as codes where the back end can multiply by them.
        """
        ...

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, weight: Weight, bias: Tensor | None
    ) -> Tensor:
        """`linear` of `rms_norm`: x [T, D], norm [D], weight [out, D] → [T, out]."""
        ...

    def norm_gate_up(
        self, x: Tensor, norm: Tensor, eps: float, weight: Weight, bias: Tensor | None
    ) -> Tensor:
        """x [T, D], weight [2 F, D], gate's rows first → silu(gate) · up of the norm [T, F]."""
        ...

    def inject(self, h: Tensor, decay: Tensor, term: Tensor) -> Tensor:
        """h [T, D] · decay [D] + term [T, D], the last two float32, returned in h's dtype."""
        ...

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv: KVStorage | None,
        slot: int,
        batch: ForwardBatch,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Rotate query [T, H, C] and key [T, K, C], write key and value to KV slot `slot`, attend.

        cos, sin [T, C/2] float32 rotate half-split pairs. The write of the whole step comes before
        any read, so requests of one step may share blocks. kv is None for back ends that keep no
        cache. Returns [T, H, C].
        """
        ...


class TorchBackend:
    """Plain torch on any device."""

    name = "torch"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
        return weight * h.to(x.dtype)

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None = None
    ) -> Tensor:
        if isinstance(weight, QuantizedWeight):
            out = quantized_linear(x, weight, bias)
        else:
            out = F.linear(x, weight, bias)
        return out if residual is None else residual + out

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, weight: Weight, bias: Tensor | None
    ) -> Tensor:
        return self.linear(self.rms_norm(x, norm, eps), weight, bias)

    def norm_gate_up(
        self, x: Tensor, norm: Tensor, eps: float, weight: Weight, bias: Tensor | None
    ) -> Tensor:
        return self.silu_mul(self.norm_linear(x, norm, eps, weight, bias))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 F] → silu(first half) · second half [T, F]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def inject(self, h: Tensor, decay: Tensor, term: Tensor) -> Tensor:
        return (h.float() * decay + term).to(h.dtype)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [T, heads, C] by the rows of cos, sin [T, C/2] (half-split pairs)."""
        a, b = x.float().chunk(2, dim=-1)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv: KVStorage | None,
        slot: int,
        batch: ForwardBatch,
        scale: float,
        window: int | None,
    ) -> Tensor:
        query, key = self.rope(query, cos, sin), self.rope(key, cos, sin)
        return self.attend(query, key, value, kv, slot, batch, scale, window)

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
        """`attention` after the rotation."""
        if kv is None:
            raise ValueError(f"the {self.name} back end keeps a KV cache, kv must not be None")
        write_kv(kv.keys[slot], batch.slot_mapping, key)
        write_kv(kv.values[slot], batch.slot_mapping, value)
        return paged_attention(query, kv.keys[slot], kv.values[slot], batch, scale, window)
