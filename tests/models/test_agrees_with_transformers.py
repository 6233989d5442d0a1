"""The same files, the same tokens: minifer's logits against transformers'.

Every family and every flag is saved by transformers itself and read back by `load_hf`. All weights
are random, biases and norms included (transformers starts them at 0 and 1, where a forgotten bias
would not show).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import paged_logits
from torch import Tensor

from minifer.execution.reference import DenseBackend, reference_logits, sequence_batch
from minifer.weights.hf import load_hf, save_hf

TOKENS = torch.randint(0, 96, (20,), generator=torch.Generator().manual_seed(3)).tolist()
CHUNKS = (7, 5)  # two prefill steps, then decodes

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


@pytest.fixture(scope="module")
def transformers() -> Any:
    """Imported once for the module: it takes four seconds."""
    import transformers

    return transformers


def build_oracle(transformers: Any, case: str) -> Any:
    """transformers' own model of a case, with random weights everywhere."""
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
    config = getattr(transformers, f"{family}Config")(**(values | changes))
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


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_at_every_position(
    transformers: Any, tmp_path: Path, case: str
) -> None:
    oracle = build_oracle(transformers, case)
    oracle.save_pretrained(tmp_path)
    truth = oracle_logits(oracle, TOKENS)
    model, _ = load_hf(tmp_path, torch.float32)
    assert model.num_parameters == oracle.num_parameters()
    torch.testing.assert_close(reference_logits(model, TOKENS), truth, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(paged_logits(model, TOKENS, CHUNKS), truth, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_what_save_hf_writes_is_what_transformers_reads(
    transformers: Any, tmp_path: Path, case: str
) -> None:
    oracle = build_oracle(transformers, case)
    oracle.save_pretrained(tmp_path / "theirs")
    model, config = load_hf(tmp_path / "theirs")
    save_hf(tmp_path / "ours", model, config)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    )
    assert type(again) is type(oracle)
    torch.testing.assert_close(
        oracle_logits(again, TOKENS), oracle_logits(oracle, TOKENS), atol=1e-5, rtol=1e-5
    )
    assert load_hf(tmp_path / "ours")[1] == config


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("case", ["llama_rope_linear", "llama_rope_llama3", "llama_rope_yarn"])
def test_case_126_type_and_rope_type_in_both_spellings_of_the_file(
    transformers: Any, tmp_path: Path, case: str, key: str, name: str
) -> None:
    oracle = build_oracle(transformers, case)
    oracle.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    rope = raw.pop("rope_parameters")
    rope[key] = rope.pop("rope_type")
    if name == "rope_scaling":  # transformers 4 kept the base outside
        raw["rope_theta"] = rope.pop("rope_theta")
    raw[name] = rope
    file.write_text(json.dumps(raw))
    model, _ = load_hf(tmp_path, torch.float32)
    truth = oracle_logits(oracle, TOKENS)
    torch.testing.assert_close(paged_logits(model, TOKENS, CHUNKS), truth, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case", ["llama", "qwen2_sliding_from_layer_1", "qwen3", "llama_rope_yarn"]
)
def test_half_precision_is_no_further_from_float32_than_transformers(
    transformers: Any, tmp_path: Path, case: str, dtype: torch.dtype
) -> None:
    oracle = build_oracle(transformers, case).to(dtype)
    oracle.save_pretrained(tmp_path)
    theirs = oracle_logits(oracle, TOKENS)
    truth = oracle_logits(oracle.float(), TOKENS)  # the rounded weights, exact arithmetic
    model, config = load_hf(tmp_path)
    assert config.dtype == str(dtype).removeprefix("torch.")
    assert model.embed_tokens.weight.dtype == dtype
    ours = paged_logits(model, TOKENS, CHUNKS)
    assert ours.dtype == torch.float32
    error, their_error = (ours - truth).abs().mean(), (theirs - truth).abs().mean()
    assert error <= 1.5 * their_error


@pytest.mark.parametrize("case", ["llama_tied", "qwen2", "qwen3_sliding_layer_types"])
def test_gradients_equal_transformers(transformers: Any, tmp_path: Path, case: str) -> None:
    """Training runs through the same model: the loss's gradient reaches every parameter."""
    oracle = build_oracle(transformers, case)
    oracle.save_pretrained(tmp_path)
    ids = torch.tensor([TOKENS])
    oracle(ids, labels=ids).loss.backward()
    model, _ = load_hf(tmp_path, torch.float32)
    backend = DenseBackend()
    logits = model.logits(model(sequence_batch(TOKENS), None, backend), backend)
    torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:]).backward()
    theirs = dict(oracle.named_parameters())
    for part in model.weight_parts():
        grad = model.get_parameter(part.parameter).grad[part.start : part.stop]
        torch.testing.assert_close(grad, theirs[part.name].grad, atol=1e-4, rtol=1e-3)


def test_a_checkpoint_in_shards_loads_like_one_file(transformers: Any, tmp_path: Path) -> None:
    oracle = build_oracle(transformers, "qwen3")
    oracle.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model, _ = load_hf(tmp_path, torch.float32)
    truth = oracle_logits(oracle, TOKENS)
    torch.testing.assert_close(reference_logits(model, TOKENS), truth, atol=1e-4, rtol=1e-4)
