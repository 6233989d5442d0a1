"""The published sizes, and one that a CPU trains in minutes.

Source: https://arxiv.org/abs/2604.12946, tables 18 and 20.
"""

from __future__ import annotations

import torch

from minifer.config import ModelConfig, RopeConfig
from minifer.loops import LoopConfig
from minifer.parcae.model import Parcae
from minifer.weights.published import preset_called


def _published(width: int, layers: int) -> ModelConfig:
    """layers: of each of the three stacks. Heads are 128 wide, the vocabulary holds 32,768."""
    return ModelConfig(
        architecture="ParcaeForCausalLM",
        vocab_size=32768,
        hidden_size=width,
        intermediate_size=4 * width,
        num_layers=3 * layers,
        num_heads=width // 128,
        num_kv_heads=width // 128,
        head_dim=128,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=50000.0),
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_ids=(1,),
        loop=LoopConfig(prelude=layers, core=layers, coda=layers),
    )


def _tiny() -> ModelConfig:
    """A pure loop: one layer, and nothing before or after it, so that depth decides the loss.

    Text of single characters needs little depth: with a layer before and one behind the core, one
    loop is as good as eight. The byte vocabulary is minifer-tiny's.
    """
    return ModelConfig(
        architecture="ParcaeForCausalLM",
        vocab_size=288,
        hidden_size=192,
        intermediate_size=768,
        num_layers=1,
        num_heads=6,
        num_kv_heads=6,
        head_dim=32,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=50000.0),
        tie_word_embeddings=True,
        dtype="bfloat16",
        bos_token_id=256,
        eos_token_ids=(257, 259),
        loop=LoopConfig(prelude=0, core=1, coda=0),
    )


PRESETS: dict[str, ModelConfig] = {
    "parcae-tiny": _tiny(),
    "parcae-140m": _published(768, 2),
    "parcae-370m": _published(1024, 4),
    "parcae-770m": _published(1280, 6),
    "parcae-1.3b": _published(1536, 8),
}


def create_model(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int | None = 0,
) -> Parcae:
    """A model of a preset, initialised from a seed (None, or on the meta device: not at all).

    Raises `ValueError` for a name that is no preset.
    """
    if not isinstance(name, str) or name not in PRESETS:
        preset = preset_called(name) if isinstance(name, str) else None
        hint = f"; that is the authors' name of {preset}" if preset else ""
        raise ValueError(f"name must be one of {', '.join(PRESETS)}, got {name!r}{hint}")
    model = Parcae(PRESETS[name], dtype, device)
    if seed is not None and torch.device(device).type != "meta":
        model.init_weights(seed)
    return model
