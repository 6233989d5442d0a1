"""A model's logits in float64, written once more from the formulas: the book's truth.

Nothing of the engine's arithmetic is used, only its weights and its configuration: no cache, no
batch, every product and every angle in float64. It is the model with which float32 results are
compared when the question is how far rounding took them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minifer.config import ModelConfig


@torch.inference_mode()
def exact_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """Logits float64 [T, V] at every position of one sequence, on the CPU.

    model: a plain Llama (`minifer.models.transformer.Transformer` without biases, q and k norms,
    windows or stretched RoPE). Raises `ValueError` for any other and for an empty sequence.
    """
    config: ModelConfig = model.config
    _check(config, token_ids)
    weights = {name: w.detach().cpu().double() for name, w in model.state_dict().items()}
    T, H, K, C = len(token_ids), config.num_heads, config.num_kv_heads, config.head_dim
    turn = _rotation(T, C, config.rope.theta)
    hidden_keys = torch.ones(T, T, dtype=torch.bool).triu(1)  # those that come later
    x = weights["embed_tokens.weight"][list(token_ids)]
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}"
        h = _norm(x, weights[f"{prefix}.input_layernorm.weight"], config.rms_norm_eps)
        qkv = h @ weights[f"{prefix}.self_attn.qkv_proj.weight"].T
        q, k, v = qkv.view(T, H + 2 * K, C).transpose(0, 1).split((H, K, K))  # [heads, T, C]
        q, k = _turned(q, turn), _turned(k, turn).repeat_interleave(H // K, 0)
        scores = (q @ k.mT / C**0.5).masked_fill(hidden_keys, -torch.inf)
        mixed = scores.softmax(-1) @ v.repeat_interleave(H // K, 0)
        x = x + mixed.transpose(0, 1).flatten(1) @ weights[f"{prefix}.self_attn.o_proj.weight"].T
        h = _norm(x, weights[f"{prefix}.post_attention_layernorm.weight"], config.rms_norm_eps)
        gate, up = (h @ weights[f"{prefix}.mlp.gate_up_proj.weight"].T).chunk(2, -1)
        x = x + (gate * gate.sigmoid() * up) @ weights[f"{prefix}.mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["embed_tokens.weight"])
    return _norm(x, weights["norm.weight"], config.rms_norm_eps) @ head.T


def _check(config: ModelConfig, token_ids: Sequence[int]) -> None:
    if not len(token_ids):
        raise ValueError("token_ids must hold at least one token, got none")
    windows = [config.window(layer) for layer in range(config.num_layers)]
    biases = config.qkv_bias or config.output_bias or config.mlp_bias
    plain = config.loop is None and config.rope.kind == "default" and not config.qk_norm
    if not plain or biases or any(w is not None for w in windows) or config.rope.freq_factors:
        raise ValueError(
            "model must be a plain Llama: no biases, q and k norms, windows, loops or stretched "
            f"RoPE; got {config.architecture}"
        )


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def _rotation(T: int, C: int, theta: float) -> Tensor:
    """complex128 [T, C/2]: the turn of each pair at each position."""
    pair = torch.arange(C // 2, dtype=torch.float64)
    angles = torch.arange(T, dtype=torch.float64)[:, None] * theta ** (-2 * pair / C)
    return torch.polar(torch.ones_like(angles), angles)


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    """Pairs (i, i + C/2) of x [heads, T, C] as complex numbers, times their turn."""
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat((z.real, z.imag), -1)
