"""Checkpoints as the authors publish them, made up: names, shapes and fields, not weights.

Written from the public description of the files (https://github.com/sandyresearch/parcae), not from
`Parcae.weight_parts`, which is what they test.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from torch import Tensor

from minifer.text.byte_tokenizer import byte_alphabet

SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>")  # ids 0, 1, 2
SIZES = {  # width, layers of each stack, tensors of a file, parameters
    "parcae-140m": (768, 2, 63, 144_323_136),
    "parcae-370m": (1024, 4, 117, 388_003_328),
    "parcae-770m": (1280, 6, 171, 776_655_680),
    "parcae-1.3b": (1536, 8, 225, 1_338_591_744),
}


def published_config(width: int = 768, layers: int = 2, **changes: Any) -> dict[str, Any]:
    """config.json of a released size, as its dataclass is dumped; `...` takes a key out."""
    raw = {
        "_class_name": "ParcaeConfig",
        "name": "parcae-small-140m",
        "hf_config": {"org": "SandyResearch", "name": "parcae-small-140m"},
        "block_size": 2048,
        "vocab_size": 32768,
        "padded_vocab_size": 32768,
        "padding_multiple": 64,
        "n_embd": width,
        "intermediate_size": 4 * width,
        "num_attention_heads": width // 128,
        "num_key_value_heads": width // 128,
        "bias": False,
        "qk_bias": False,
        "qk_norm": True,
        "clip_qkv": None,
        "logit_softcap": None,
        "tie_embeddings": True,
        "prelude_norm": True,
        "norm_class_name": "RMSNorm",
        "norm_eps": 1e-05,
        "mlp_class_name": "BaseMLP",
        "nonlin_name": "ReLU2",
        "block_class_name": "TransformerPreNormBlock",
        "rope_settings": {"use_rope": True, "rope_condense_ratio": 1, "rope_base": 50000},
        "init_strategy": "scaled-zero",
        "init_orthogonal": True,
        "skip_initialization": False,
        "injection_type": "diagonal",
        "state_init": "like-init",
        "recurrent_embedding_dimension": width,
        "recurrent_intermediation_embedding_dimension": 4 * width,
        "n_layers_in_prelude": layers,
        "n_layers_in_recurrent_block": layers,
        "n_layers_in_coda": layers,
        "mean_recurrence": 8,
        "mean_backprop_depth": 4,
        "sampling_scheme": "poisson-truncated-full",
        "recurrent_iteration_method": "per-sequence",
        "lockstep_n": False,
        "curriculum_target": None,
        "activation_checkpoint_impl": "per-iteration",
        "mup_model_scaling_factor": 1,
        "use_fused_head": "pytorch",
        "attn_impl": "flash",
        "_is_recurrent_block_config": False,
        **changes,
    }
    return {key: value for key, value in raw.items() if value is not ...}


def small_config(layers: tuple[int, int, int] = (2, 2, 2), **changes: Any) -> dict[str, Any]:
    """The same structure, 64 wide, for the byte tokenizer below and 3 loops."""
    P, R, C = layers
    sizes = {
        "block_size": 96,
        "vocab_size": 260,
        "padded_vocab_size": 320,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_layers_in_prelude": P,
        "n_layers_in_recurrent_block": R,
        "n_layers_in_coda": C,
        "mean_recurrence": 3,
        "mean_backprop_depth": 2,
    }
    return published_config(64, **{**sizes, **changes})


def published_shapes(raw: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a published file and its shape."""
    D, F, V = raw["n_embd"], raw["intermediate_size"], raw["padded_vocab_size"]
    K, C = raw["num_key_value_heads"], D // raw["num_attention_heads"]
    stacks = {
        "prelude": raw["n_layers_in_prelude"],
        "core_block": raw["n_layers_in_recurrent_block"],
        "coda": raw["n_layers_in_coda"],
    }
    shapes: dict[str, tuple[int, ...]] = {
        "freqs_cis": (1, raw["block_size"], 1, C // 2, 2),
        "transformer.wte.weight": (V, D),
        "lm_head.weight": (V, D),
        "transformer.adapter.A_log": (D,),
        "transformer.adapter.dt_bias": (D,),
        "transformer.adapter.B": (D, D),
        "transformer.C.weight": (D, D),
        "transformer.ln_prelude.weight": (D,),
        "transformer.ln_f.weight": (D,),
    }
    layer, total = 0, sum(stacks.values())
    for stack, count in stacks.items():
        for i in range(count):
            block = f"transformer.{stack}.{i}"
            shapes |= {f"{block}.norm_{n}.weight": (D,) for n in (1, 2)}
            shapes |= {f"{block}.attn.c_{part}.weight": (D, D) for part in ("q", "proj")}
            shapes |= {f"{block}.attn.c_{part}.weight": (K * C, D) for part in "kv"}
            shapes[f"{block}.mlp.fc.weight"] = (F, D)
            shapes[f"{block}.mlp.proj.weight"] = (D, F)
            if (total - 1 - layer) % 2 == 0:
                shapes[f"{block}.attn.ve_gate.weight"] = (K, 32)
                shapes[f"value_embeds.{layer}.weight"] = (V, K * C)
            layer += 1
    return shapes


def rotary_table(raw: Mapping[str, Any]) -> Tensor:
    """float32 [1, S, 1, C/2, 2]: cos and sin."""
    C, base = raw["n_embd"] // raw["num_attention_heads"], raw["rope_settings"]["rope_base"]
    turns = base ** -(torch.arange(0, C, 2, dtype=torch.float64) / C)
    angles = torch.arange(raw["block_size"], dtype=torch.float64)[:, None] * turns
    return torch.stack([angles.cos(), angles.sin()], dim=-1)[None, :, None].float()


def published_state(raw: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """A state dict with random weights that keep the state in bounds; the head is the embedding."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    for name, shape in published_shapes(raw).items():
        noise = torch.randn(shape, generator=generator)
        if name == "freqs_cis":
            state[name] = rotary_table(raw)
        elif name == "lm_head.weight":
            state[name] = state["transformer.wte.weight"]
        elif name.endswith((".A_log", ".dt_bias")):
            state[name] = 0.7 * noise
        elif len(shape) == 1:
            state[name] = 1 + 0.2 * noise
        elif name == "transformer.wte.weight" or name.startswith("value_embeds."):
            state[name] = noise
        else:
            state[name] = noise / math.sqrt(shape[1])
    return state


def save_published(
    folder: Path,
    raw: Mapping[str, Any],
    state: object = None,
    tokenizer: bool = True,
) -> dict[str, Tensor]:
    """Write config.json, pytorch_model.bin and tokenizer.json; returns the state dict."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    made = published_state(raw) if state is None else state
    torch.save(made, folder / "pytorch_model.bin")
    if tokenizer:
        save_tokenizer(folder)
    return made  # type: ignore[return-value]


def save_tokenizer(folder: Path, special: Sequence[str] = SPECIAL) -> None:
    """tokenizer.json alone, without a post-processor: special tokens, then 256 bytes."""
    vocab = {token: i for i, token in enumerate([*special, *byte_alphabet()])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    backend.save(str(folder / "tokenizer.json"))
