"""transformers' models of every family and every flag, tiny, with random weights everywhere.

Biases and norms are random too: transformers starts them at 0 and 1, where a forgotten one would
not show.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TOKENS = torch.randint(0, 96, (20,), generator=torch.Generator().manual_seed(3)).tolist()

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}

# name: (family, what differs from the tiny default)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_head_dim_not_d_over_h": ("Llama", {"head_dim": 16}),
    "llama_attention_bias": ("Llama", {"attention_bias": True}),
    "llama_mlp_bias": ("Llama", {"mlp_bias": True}),
    "llama_one_kv_head_a_query_head": ("Llama", {"num_key_value_heads": None}),
    "llama_rope_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.5}}),
    "llama_rope_llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama_rope_yarn": ("Llama", {"rope_parameters": YARN}),
    "qwen2": ("Qwen2", {}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_sliding_from_layer_1": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    ),
    "qwen2_sliding_window_not_used": ("Qwen2", {"sliding_window": 3, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_attention_bias_tied": ("Qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3_sliding_layer_types": (
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mistral_sliding": ("Mistral", {"sliding_window": 3}),
    "mistral_full": ("Mistral", {"sliding_window": None}),
    "mistral_head_dim": ("Mistral", {"head_dim": 16, "sliding_window": 5}),
}


def build_oracle(transformers: Any, case: str, **more: Any) -> Any:
    """transformers' own model of a case, with random weights everywhere. more: other sizes."""
    family, changes = CASES[case]
    values = {
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "head_dim": 12,
    }
    config = getattr(transformers, f"{family}Config")(**(values | changes | more))
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(1 + noise if "norm" in name else noise)
    return model


def oracle_logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()
