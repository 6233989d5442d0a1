"""The decode step that `torch_compile_peer` compiles: a Llama in the form that Inductor likes best.

T tokens, B requests, D width, H query heads, K KV heads, C head dim, S length of KV.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

_INT4_GROUPS = (32, 64, 128, 256)  # what the packed kernel takes
_INT4_ROWS = 16
FEW = 4  # requests


def read_config(folder: Path) -> dict[str, Any]:
    """Its config.json, with what may be left out. Raises `ValueError` for anything but a Llama."""
    config = json.loads((folder / "config.json").read_text())
    kind = config.get("model_type")
    wanted: dict[str, Any] = {
        "model_type": "llama",
        "hidden_act": "silu",
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
    }
    for name, value in wanted.items():
        if config.get(name, value) != value:
            raise ValueError(
                f"the step is a plain Llama's: {name} must be {value!r}, "
                f"got {config[name]!r} ({kind})"
            )
    H = config["num_attention_heads"]
    config.setdefault("num_key_value_heads", H)
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // H
    config.setdefault("rope_theta", 10000.0)
    return config


def read_weights(folder: Path, quantize: str) -> dict[str, Tensor]:
    """All tensors of a folder; with quantize "file" the codes that minifer keeps there, too."""
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights.update(load_file(file))
    if quantize == "file":
        codes = folder / "quantized" / "model.safetensors"
        if not codes.is_file():
            raise ValueError(f"quantize file needs codes, there is no {codes}: minifer pull")
        weights.update(load_file(codes))
    elif quantize != "none":
        raise ValueError(f"quantize must be none or file, got {quantize!r}")
    return weights


def _kept(tensor: Tensor) -> nn.Parameter:
    """A parameter: what is not one will not be frozen."""
    return nn.Parameter(tensor.contiguous(), requires_grad=False)


class Product(nn.Module):
    """x [T, in] → [T, out], by matrices one below the other: as they are, or by their codes."""

    def __init__(self, weights: Mapping[str, Tensor], dtype: torch.dtype, *names: str) -> None:
        super().__init__()
        self.kind = "plain"
        if not any(name + ".codes" in weights for name in names):
            self.weight = _kept(torch.cat([weights[name] for name in names]).to(dtype))
            return
        if dtype != torch.bfloat16:
            raise ValueError(f"torch multiplies by codes in bfloat16, got {dtype}")
        parts = [_codes(weights, name) for name in names]
        kinds = {(codes.dtype, group) for codes, _, _, group in parts}
        if len(kinds) > 1:
            raise ValueError(f"{', '.join(names)} must have codes of one kind")
        codes, scale, zero = (torch.cat(column) for column in list(zip(*parts, strict=True))[:3])
        ((kind, self.group),) = kinds
        packed = (
            _int4(codes, scale, zero, self.group) if kind == torch.uint8 else _int8(codes, scale)
        )
        self.kind = "int4" if kind == torch.uint8 else "int8"
        self.codes, self.numbers = map(_kept, packed)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "plain":
            return F.linear(x, self.weight)
        if self.kind == "int8":
            return torch.ops.aten._weight_int8pack_mm(x, self.codes, self.numbers)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.codes, self.group, self.numbers)


def _codes(weights: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor, Tensor, int]:
    """codes [N, in], 0 … 15 (uint8) or int8; float32 scale and zero [N, in / group]; group."""
    if name + ".codes" not in weights:
        raise ValueError(f"quantize file needs codes of all matrices that are one, {name} has none")
    codes, scale = weights[name + ".codes"], weights[name + ".scale"].float()
    zero = weights.get(name + ".zero", torch.zeros(())).float().expand_as(scale)
    if codes.dtype == torch.uint8:  # even columns in the low nibble
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    return codes, scale, zero, codes.shape[1] // scale.shape[1]


def _int4(codes: Tensor, scale: Tensor, zero: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """In the kernel's order; bfloat16 [in / group, N, 2]: scale, and what a code of 8 means."""
    if group not in _INT4_GROUPS or len(codes) % _INT4_ROWS:
        raise ValueError(
            f"4 bits must be of groups of {_INT4_GROUPS} and of rows that {_INT4_ROWS} divides, "
            f"got groups of {group} and {len(codes)} rows"
        )
    numbers = torch.stack((scale, zero + 8 * scale), -1).transpose(0, 1).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    return packed, numbers.bfloat16()


def _int8(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantised again, for the kernel has one scale a row: int8 [N, in], bfloat16 [N]."""
    weight = (codes.unflatten(1, (scale.shape[1], -1)).float() * scale[..., None]).flatten(1)
    row = (weight.abs().amax(-1) / 127).clamp(min=1e-12).bfloat16()
    again = (weight / row[:, None].float()).round().clamp(-127, 127)
    return again.to(torch.int8), row


class Layer(nn.Module):
    def __init__(
        self, weights: Mapping[str, Tensor], dtype: torch.dtype, config: dict[str, Any], i: int
    ) -> None:
        super().__init__()
        self.H, self.K = config["num_attention_heads"], config["num_key_value_heads"]
        self.C, self.epsilon = config["head_dim"], config["rms_norm_eps"]
        name = f"model.layers.{i}."
        attention, mlp = name + "self_attn.{}_proj.weight", name + "mlp.{}_proj.weight"
        self.norm1 = _kept(weights[name + "input_layernorm.weight"].to(dtype))
        self.norm2 = _kept(weights[name + "post_attention_layernorm.weight"].to(dtype))
        self.qkv = Product(weights, dtype, *(attention.format(part) for part in "qkv"))
        self.o = Product(weights, dtype, attention.format("o"))
        self.gate_up = Product(weights, dtype, mlp.format("gate"), mlp.format("up"))
        self.down = Product(weights, dtype, mlp.format("down"))

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, D]; cos, sin [T or 1, 1, C/2] → rotated q [T, H, C], k [T, K, C]; v [T, K, C]."""
        H, K, C = self.H, self.K, self.C
        rows = self.qkv(norm(x, self.norm1, self.epsilon))
        q, k, v = rows.split([H * C, K * C, K * C], -1)
        return rope(q.view(-1, H, C), cos, sin), rope(k.view(-1, K, C), cos, sin), v.view(-1, K, C)

    def rest(self, x: Tensor, mixed: Tensor) -> Tensor:
        """What follows attention: x, mixed [T, D]."""
        x = x + self.o(mixed)
        gate, up = self.gate_up(norm(x, self.norm2, self.epsilon)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """One step of B requests that are equally long. Raises `ValueError` for other models."""

    layers: Iterable[Layer]
    cos: Tensor
    sin: Tensor

    def __init__(self, folder: Path, dtype: torch.dtype, quantize: str = "none") -> None:
        super().__init__()
        config, weights = read_config(folder), read_weights(folder, quantize)
        self.dtype, self.epsilon = dtype, config["rms_norm_eps"]
        self.H, self.K = config["num_attention_heads"], config["num_key_value_heads"]
        self.C, self.max_length = config["head_dim"], config["max_position_embeddings"]
        table = "model.embed_tokens.weight"
        tied = config.get("tie_word_embeddings", False)
        self.table = _kept(weights[table].to(dtype))
        self.layers = nn.ModuleList(  # type: ignore[assignment]
            Layer(weights, dtype, config, i) for i in range(config["num_hidden_layers"])
        )
        self.norm = _kept(weights["model.norm.weight"].to(dtype))
        self.head = Product(weights, dtype, table if tied else "lm_head.weight")
        if tied and self.head.kind == "plain":
            self.head.weight = self.table
        steps = torch.arange(0, self.C, 2).float() / self.C
        angle = torch.arange(self.max_length)[:, None] * (1.0 / config["rope_theta"] ** steps)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def cache(self, B: int, S: int) -> list[Tensor]:
        """K, or V, of S positions: [B, K, S, C] a layer."""
        return [torch.zeros(B, self.K, S, self.C, dtype=self.dtype) for _ in self.layers]

    def forward(
        self, token: Tensor, position: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> Tensor:
        """token [B], position [1]: where all of them stand; keys, values: `cache`, written there.
        → the greedy next token [B]."""
        B, S = token.shape[0], keys[0].shape[2]
        x = F.embedding(token, self.table)
        cos, sin = (t.index_select(0, position)[:, None] for t in (self.cos, self.sin))
        seen = torch.arange(S) <= position
        for layer, past_keys, past_values in zip(self.layers, keys, values, strict=True):
            q, k, v = layer.heads(x, cos, sin)
            past_keys.index_copy_(2, position, k[:, :, None])
            past_values.index_copy_(2, position, v[:, :, None])
            mixed = attend(q.view(B, self.K, -1, self.C), past_keys, past_values, seen)
            x = layer.rest(x, mixed.reshape(B, -1))
        return self.head(norm(x, self.norm, self.epsilon)).float().argmax(-1)

    def prompts(self, ids: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """ids [B, T] → the greedy first token of each [B]; keys, values: `cache`, begun anew."""
        B, T = ids.shape
        x = F.embedding(ids, self.table).flatten(0, 1)
        cos, sin = (t[:T].repeat(B, 1)[:, None] for t in (self.cos, self.sin))
        for layer, past_keys, past_values in zip(self.layers, keys, values, strict=True):
            q, k, v = (t.unflatten(0, (B, T)).transpose(1, 2) for t in layer.heads(x, cos, sin))
            past_keys[:, :, :T], past_values[:, :, :T] = k, v
            k, v = (t.repeat_interleave(self.H // self.K, 1) for t in (k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = layer.rest(x, mixed.transpose(1, 2).reshape(B * T, -1))
        last = x.unflatten(0, (B, T))[:, -1]
        return self.head(norm(last, self.norm, self.epsilon)).float().argmax(-1)


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm of rows."""
    f = x.float()
    return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype) * weight


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, C] turned by angles of its positions."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def attend(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """q [B, K, H/K, C], keys and values [B, K, S, C], seen [S] → [B, K, H/K, C].

    Of a few requests sums of products: Inductor makes loops of them that read bfloat16. Of many,
    matrix products of float32 copies. Tried at batch 1 and 16 on a CPU with AVX-512: each is the
    faster one on its side, and PyTorch's fused attention lies between them on both.
    """
    few, scale, past = len(q) <= FEW, q.shape[-1] ** -0.5, values.float()
    if few:
        score = (q[:, :, :, None].float() * keys[:, :, None].float()).sum(-1) * scale
    else:
        score = q.float() @ keys.float().transpose(2, 3) * scale
    weight = torch.softmax(score.masked_fill(~seen, float("-inf")), -1)
    mixed = (weight[..., None] * past[:, :, None]).sum(-2) if few else weight @ past
    return mixed.to(q.dtype)
