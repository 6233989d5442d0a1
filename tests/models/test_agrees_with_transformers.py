"""The same files, the same tokens: minifer's logits against transformers'.

Every family and every flag is saved by transformers itself and read back by `load_hf`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import CASES, TOKENS, build_oracle, oracle_logits
from tiny_models import paged_logits

from minifer.execution.reference import DenseBackend, reference_logits, sequence_batch
from minifer.weights.hf import load_hf, save_hf

CHUNKS = (7, 5)  # two prefill steps, then decodes


@pytest.fixture(scope="module")
def transformers() -> Any:
    """Imported once for the module: it takes four seconds."""
    import transformers

    return transformers


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
