"""Rotary position embeddings (RoPE, Su et al. 2021, https://arxiv.org/abs/2104.09864).

Pair i of a head (dimension i and i + C/2) turns by the angle position · inv_freq[i]. Each way of
stretching a model to longer contexts is another inv_freq:

- `default`: theta^(−2i/C).
- `linear`: all of them divided by `factor` (position interpolation, https://arxiv.org/abs/2306.15595).
- `llama3`: slow pairs divided by `factor`, fast ones kept, a smooth ramp between (Llama 3.1).
- `yarn`: the same idea with a linear ramp over the pairs, and cos and sin scaled up so that
  attention keeps its temperature (https://arxiv.org/abs/2309.00071).

The arithmetic is float32 in the order of transformers' `modeling_rope_utils.py`, so that the
frequencies are the same to the bit: at position 100,000 an error of one ulp is 0.006 rad.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from minifer.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """float32 [C/2]: radians a position, of each pair of a head.

    Raises `ValueError` when a field that the kind needs is missing.
    """
    pair = torch.arange(0, head_dim, 2, dtype=torch.float32)
    wavelengths = rope.theta ** (pair / head_dim)  # positions a radian
    if rope.kind == "default":
        inv_freq = 1.0 / wavelengths
    elif rope.kind == "linear":
        inv_freq = 1.0 / wavelengths / rope.factor
    elif rope.kind == "llama3":
        inv_freq = _llama3(1.0 / wavelengths, rope)
    elif rope.kind == "yarn":
        inv_freq = _yarn(wavelengths, rope, head_dim)
    else:
        raise ValueError(f"rope kind must be default, linear, llama3 or yarn, got {rope.kind!r}")
    if rope.freq_factors is not None:
        if len(rope.freq_factors) != head_dim // 2:
            raise ValueError(
                f"freq_factors needs head_dim / 2 = {head_dim // 2} entries, "
                f"got {len(rope.freq_factors)}"
            )
        inv_freq = inv_freq / torch.tensor(rope.freq_factors, dtype=torch.float32)
    return inv_freq


def _original_context(rope: RopeConfig) -> int:
    if rope.original_max_position_embeddings is None:
        raise ValueError(
            f"rope kind {rope.kind!r} needs original_max_position_embeddings, the context length "
            "the model was first trained for"
        )
    return rope.original_max_position_embeddings


def _llama3(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Divide by factor where fewer than low_freq_factor turns fit into the original context."""
    context = _original_context(rope)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / inv_freq  # in positions
    slow, fast = wavelength > context / low, wavelength < context / high
    smooth = (context / wavelength - low) / (high - low)
    between = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    return torch.where(slow, inv_freq / rope.factor, torch.where(fast, inv_freq, between))


def _yarn(wavelengths: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Keep pairs that turn more than beta_fast times in the original context, divide slow ones."""
    context = _original_context(rope)

    def pair_of(turns: float) -> float:
        """The (fractional) pair that turns this often within the original context."""
        ratio = math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        return head_dim * ratio

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by 0
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    keep = 1 - torch.clamp(ramp, 0, 1)
    return 1.0 / (rope.factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep


def attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: 0.1 · ln(factor) + 1 for yarn, 1 for every other kind."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


class RotaryEmbedding(nn.Module):
    """cos and sin of the positions of one step.

    Computed from the positions each step, not looked up: a table for 131,072 positions of a
    128-wide head is 67 MB, the cosines of a step's few tokens are microseconds.
    """

    inv_freq: Tensor

    def __init__(
        self, rope: RopeConfig, head_dim: int, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.rope, self.head_dim = rope, head_dim
        self.scaling = attention_factor(rope)
        inv_freq = inverse_frequencies(rope, head_dim).to(device)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        """Follow `model.to(device)`, but stay float32 when `model.to(dtype)` rounds the rest."""
        super()._apply(fn, recurse)
        device = self.inv_freq.device
        self.inv_freq = inverse_frequencies(self.rope, self.head_dim).to(device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int64 [T] → cos, sin float32 [T, C/2]."""
        angles = positions[:, None].float() * self.inv_freq
        return angles.cos() * self.scaling, angles.sin() * self.scaling
