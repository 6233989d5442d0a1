"""Perplexity against transformers, KL against a plain sum, weight errors against a hand's."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from fakes import tiny_config

from minifer import EngineConfig
from minifer.execution.reference import reference_logits
from minifer.execution.runner import make_runner
from minifer.perf import quality as module
from minifer.perf.quality import (
    WINDOW,
    decode_logits,
    fixed_text,
    quality,
    runner_logits,
    storage,
    table,
    weight_errors,
)
from minifer.weights.quantized import weight_bytes
from minifer.weights.resolve import load_model


@pytest.fixture(scope="module")
def reference(text_model):
    return load_model(text_model, dtype="float32")


@pytest.fixture(scope="module")
def int8(text_model):
    return load_model(text_model, quantize="int8", dtype="float32")


def test_the_text_is_a_fixed_one():
    """Numbers of one release are compared with another's: the text may not change unnoticed."""
    text = fixed_text()
    assert len(text.split()) == 1190 and text.isascii()
    assert text.startswith("The ferry at Halmer") and text.endswith("where it rests.\n")


def test_perplexity_is_transformers(text_model, reference):
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(text_model, dtype="float32")
    text = fixed_text()[: 2 * WINDOW + 40]
    tokens = reference.tokenizer.encode(text)
    losses = []
    for start in range(0, len(tokens), WINDOW):
        ids = torch.tensor([tokens[start : start + WINDOW]])
        with torch.inference_mode():
            losses += [float(oracle(ids, labels=ids).loss)] * (ids.shape[1] - 1)
    found = quality(reference, reference, text=text)
    assert found.tokens == len(losses)
    expected = math.exp(sum(losses) / len(losses))
    assert math.isclose(found.perplexity, expected, rel_tol=1e-5)
    assert found.perplexity == found.reference_perplexity


def test_a_model_agrees_with_itself(reference):
    found = quality(reference, reference, text=fixed_text()[:200])
    assert (found.kl, found.top1_agreement) == (0.0, 1.0)
    assert all(error.codes_rms == error.multiplied_greatest == 0 for error in found.weights)


def test_kl_and_agreement_are_those_of_the_definition(reference, int8):
    text = fixed_text()[:90]
    tokens = reference.tokenizer.encode(text)
    truth = reference_logits(reference.model, tokens).double().softmax(-1)
    other = reference_logits(int8.model, tokens).double().softmax(-1)
    each = [
        sum(p * math.log(p / q) for p, q in zip(a, b, strict=True))
        for a, b in zip(truth[:-1].tolist(), other[:-1].tolist(), strict=True)
    ]
    found = quality(int8, reference, text=text)
    assert found.tokens == len(each) == len(tokens) - 1
    assert math.isclose(found.kl, sum(each) / len(each), rel_tol=1e-3) and found.kl > 0
    same = (truth.argmax(-1) == other.argmax(-1))[:-1].double().mean()
    assert found.top1_agreement == float(same)


def test_another_back_ends_logits_are_compared(reference):
    """Doubled logits: a sharper distribution, the same greedy tokens."""
    found = quality(
        reference,
        reference,
        text=fixed_text()[:90],
        logits=lambda model, tokens: 2 * decode_logits(model, tokens),
    )
    assert found.top1_agreement == 1.0 and found.kl > 0.01
    assert found.perplexity != found.reference_perplexity


def test_products_are_those_of_decode_steps(reference, text_model, monkeypatch):
    """The packed kernels, a few tokens at a time: not the way a long prompt takes."""
    import minifer.execution.quantized_linear as products

    loaded = load_model(text_model, quantize="int8")
    seen = []
    packed = products.packed_linear
    monkeypatch.setattr(
        products, "packed_linear", lambda x, w: seen.append(x.shape[0]) or packed(x, w)
    )
    tokens = reference.tokenizer.encode(fixed_text()[:120])
    with torch.inference_mode():
        logits = decode_logits(loaded.model, tokens)
    assert logits.shape == (len(tokens), 288) and logits.dtype == torch.float32
    assert seen and max(seen) <= 32 and sum(seen) == len(tokens) * (4 * 2 + 1)


def test_weight_errors_are_those_of_the_definition(reference, int8):
    names = {"down_proj": "layers.{}.mlp.down_proj.weight", "embed_tokens": "embed_tokens.weight"}
    errors = {error.kind: error for error in weight_errors(int8.model, reference.model)}
    assert set(errors) == {"embed_tokens", "qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    for kind, pattern in names.items():
        truth, held = [], []
        for name in sorted({pattern.format(i) for i in range(2)}):
            truth.append(reference.model.get_parameter(name).detach().double().flatten())
            held.append(int8.model.get_submodule(name).dequantize(torch.float64).flatten())
        w, e = torch.cat(truth), torch.cat(held) - torch.cat(truth)
        found = errors[kind]
        assert found.stored == "8 bits, a scale a row"
        assert math.isclose(found.codes_rms, float(e.norm() / w.norm()), rel_tol=1e-4)
        assert math.isclose(
            found.codes_greatest, float(e.abs().max() / w.abs().max()), rel_tol=1e-4
        )
        assert found.multiplied_rms == found.codes_rms  # float32 packs nothing


def test_rows_are_measured_in_slices(reference, text_model, monkeypatch):
    loaded = load_model(text_model, quantize="int8")
    whole = list(weight_errors(loaded.model, reference.model))
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", 16)
    for sliced, once in zip(weight_errors(loaded.model, reference.model), whole, strict=True):
        assert math.isclose(sliced.multiplied_rms, once.multiplied_rms, rel_tol=1e-6)
        assert sliced.multiplied_rms > sliced.codes_rms  # a scale in bfloat16


def test_bytes_and_names_say_what_is_held(reference, int8, text_model):
    dense = load_model(text_model, dtype="bfloat16")
    assert weight_bytes(reference.model) == 2 * weight_bytes(dense.model)
    assert storage(reference.model) == "float32" and storage(dense.model) == "bfloat16"
    assert storage(int8.model) == "8 bits, float32"
    matrices = sum(p.numel() for p in reference.model.parameters() if p.dim() == 2)
    rows = sum(p.shape[0] for p in reference.model.parameters() if p.dim() == 2)
    vectors = sum(p.numel() for p in reference.model.parameters() if p.dim() == 1)
    assert weight_bytes(int8.model) == matrices + 2 * rows + 4 * vectors


def test_the_table_names_every_way_once(reference, int8, text_model):
    dense = load_model(text_model, dtype="bfloat16")
    text = fixed_text()[:120]
    rows = [quality(m, reference, label=name, text=text) for name, m in (("a", int8), ("b", dense))]
    lines = table(rows).splitlines()
    assert "float32's perplexity is" in lines[0]
    assert [line.split()[0] for line in lines[3:5]] == ["a", "b"]
    assert sum("8 bits, a scale a row" in line for line in lines) == 5
    assert not any(line.endswith(" ") for line in lines)


def test_what_cannot_be_compared_is_refused(reference, int8, text_model):
    half = load_model(text_model, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"reference must be in float32, got torch\.bfloat16"):
        quality(int8, half)
    other = replace(reference, config=tiny_config(vocab_size=288, num_layers=3))
    with pytest.raises(ValueError, match="got two configurations"):
        quality(int8, other)
    with pytest.raises(ValueError, match="text must have at least 2 tokens, got 1"):
        quality(int8, reference, text="a")


def test_a_runner_scores_like_the_model_it_was_made_of(int8):
    """Blocks, chunks and a KV cache in place of one dense pass."""
    tokens = int8.tokenizer.encode(fixed_text()[:WINDOW])
    config = EngineConfig(block_size=8)
    runner = make_runner(int8.model, int8.config, config, -(-len(tokens) // 8))
    found = runner_logits(runner, 8)(int8.model, tokens)
    expected = reference_logits(int8.model, tokens)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
