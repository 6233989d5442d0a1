"""The model that ships with minifer: the file is the stated one, and its training repeats."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import minifer
from minifer.execution.backends.dense import row_batch
from minifer.execution.reference import reference_generate, reference_logits
from minifer.models.transformer import Transformer
from minifer.perf.costs import num_parameters
from minifer.text.help_topics import sections, split, token_stream
from minifer.text.tokenizer import Tokenizer
from minifer.weights.hf import load_hf

ASSETS = Path(minifer.__file__).parent / "assets"
FOLDER = ASSETS / "minifer-tiny"
PROMPT = "The import statement "


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model() -> Transformer:
    return load_hf(FOLDER, torch.float32)[0]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(FOLDER)


@pytest.fixture(scope="module")
def train_tiny() -> ModuleType:
    """The training script as a module; it is not part of the package."""
    spec = importlib.util.spec_from_file_location("train_tiny", ASSETS / "train_tiny.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_tiny"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_weights_are_the_stated_ones(report: dict[str, Any]) -> None:
    weights = (FOLDER / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == report["sha256"]
    assert len(weights) < 3_000_000  # it ships in the wheel


def test_the_shapes_are_those_of_the_design(report: dict[str, Any], model: Transformer) -> None:
    config = model.config
    assert (config.hidden_size, config.num_heads, config.num_kv_heads) == (192, 12, 6)
    assert (config.head_dim, config.intermediate_size, config.num_layers) == (16, 384, 4)
    assert (config.vocab_size, config.tie_word_embeddings) == (288, True)
    assert config.dtype == "bfloat16"
    assert model.num_parameters == num_parameters(config) == report["parameters"]


def test_text_goes_in_and_comes_out(tokenizer: Tokenizer, model: Transformer) -> None:
    assert tokenizer.encode("A é") == [65, 32, 0xC3, 0xA9]  # ids are bytes
    assert tokenizer.vocab_size == model.config.vocab_size
    ends = [tokenizer.token_to_id(token) for token in ("<|eos|>", "<|im_end|>")]
    assert list(model.config.eos_token_ids) == ends
    assert tokenizer.bos_token_id == model.config.bos_token_id


def test_it_has_learnt_its_text(model: Transformer, train_tiny: ModuleType) -> None:
    """Less than half of what a model that knows only how common each byte is needs.

    The text of the running Python may differ from the one that was learnt, so no loss is exact.
    """
    stream = token_stream(sections())
    counts = torch.bincount(stream, minlength=288).double()
    frequency = counts[counts > 0] / counts.sum()
    entropy = float(-(frequency * frequency.log2()).sum())
    assert train_tiny.held_out_loss(model, stream[: 8 * 256 + 1], 256) < entropy / 2


def test_greedy_tokens_do_not_depend_on_chunks_or_the_path(
    model: Transformer, tokenizer: Tokenizer
) -> None:
    """In float32: the whole engine's slow twin, against its prompt fed in pieces."""
    prompt = tokenizer.encode(PROMPT)
    expected = reference_generate(model, prompt, 6)
    assert greedy_in_chunks(model, prompt, 6, chunk=len(prompt)) == expected
    for chunk in (1, 2, 7, 16):
        assert greedy_in_chunks(model, prompt, 6, chunk) == expected, chunk


def greedy_in_chunks(model: Transformer, prompt: list[int], count: int, chunk: int) -> list[int]:
    from minifer.execution.backend import TorchBackend
    from minifer.execution.forward_batch import ForwardBatch
    from minifer.execution.kv_storage import KVStorage

    config, backend, tokens, done = model.config, TorchBackend(), list(prompt), 0
    kv = KVStorage(config.num_kv_slots, 8, 8, config.num_kv_heads, config.head_dim, torch.float32)
    with torch.inference_mode():
        while len(tokens) < len(prompt) + count:
            end = min(done + chunk, len(tokens))
            at = list(range(done, end))
            batch = ForwardBatch.build(
                tokens[done:end], at, at, [0, len(at)], [end], [list(range(8))], [len(at) - 1], 8
            )
            logits = model.logits(model(batch, kv, backend)[-1:], backend)
            done = end
            if done == len(tokens):
                tokens.append(int(logits[0].argmax()))
    return tokens[len(prompt) :]


def test_transformers_reads_the_folder_and_computes_the_same(
    model: Transformer, tokenizer: Tokenizer
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(FOLDER)(PROMPT)["input_ids"]
    assert ids == tokenizer.encode(PROMPT)
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(reference_logits(model, ids), expected, atol=1e-4, rtol=1e-4)


def test_training_twice_gives_the_same_file(train_tiny: ModuleType, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    recipe = train_tiny.Recipe(steps=3, tokens=128, short=32, long=64, threads=1, long_after=0.6)
    stream = token_stream(sections()[:4])
    try:
        digests = [
            train_tiny.save(tmp_path / str(run), train_tiny.train(recipe, stream))
            for run in range(2)
        ]
        other = train_tiny.train(replace(recipe, seed=1), stream)
    finally:
        torch.set_num_threads(threads)
    assert digests[0] == digests[1]
    assert digests[0] != train_tiny.save(tmp_path / "other", other)


def test_the_training_back_end_computes_what_the_engine_computes(
    model: Transformer, train_tiny: ModuleType
) -> None:
    """Rows side by side, bfloat16 products: the same loss as one row at a time in float32."""
    tokens = token_stream(sections()[:1])[:50].view(2, 25)
    with torch.inference_mode():
        together = train_tiny.loss_of(model, row_batch(2, 24), tokens)
    rows = [reference_logits(model, row[:-1].tolist()) for row in tokens]
    alone = torch.nn.functional.cross_entropy(torch.cat(rows), tokens[:, 1:].flatten())
    assert float(together) == pytest.approx(float(alone), rel=0.02)


def test_held_out_sections_are_not_trained_on() -> None:
    texts = sections()
    training, held_out = split(texts)
    assert len(training) + len(held_out) == len(token_stream(texts))
    text = bytes(t for t in training.tolist() if t < 256).decode()
    for title, body in texts[7::16]:
        assert f"{title}\n{'*' * len(title)}\n\n{body}" not in text


def test_sections_end_and_chats_end() -> None:
    stream = token_stream([("Title", "One.\n\n" + "x" * 500)]).tolist()
    assert stream[0] == 256 and stream.count(257) == 1
    chat = bytes(t for t in stream[stream.index(257) + 1 :] if t < 256).decode()
    assert chat == "user\nTitle\nassistant\nOne.\n"
    assert stream.count(259) == 2  # the question and the answer
