"""backend="compiled" against transformers: every family and flag, at every position.

Sizes divide nothing on purpose: width 48 and vocabulary 101 end within a panel.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_steps import logits_in_chunks
from oracles import CASES, TOKENS, build_oracle, oracle_logits
from torch import Tensor

from minifer.config import EngineConfig
from minifer.execution.backends.compiled import CompiledRunner
from minifer.execution.runner import ModelRunner, make_runner
from minifer.llm import LLM
from minifer.request import SamplingParams
from minifer.weights.hf import load_hf, load_hf_quantized
from minifer.weights.quantized import QuantizedWeight

GROUP_OF_ONE = "llama_one_kv_head_a_query_head"


@pytest.fixture(scope="module")
def transformers() -> Any:
    """Imported once for the module: it takes four seconds."""
    import transformers

    return transformers


def oracle_of(transformers: Any, case: str, **more: Any) -> Any:
    return build_oracle(transformers, case, **{"head_dim": 16, "vocab_size": 101, **more})


def runner_of(model: Any, config: Any, backend: str = "compiled") -> ModelRunner:
    """In debug mode: a cache of NaN between guard bands."""
    engine = EngineConfig(backend=backend, block_size=4, debug=True)
    made = make_runner(model, config, engine, 8)
    assert isinstance(made, CompiledRunner) == (backend == "compiled")
    return made


def check(transformers: Any, folder: Path, case: str, **more: Any) -> None:
    oracle = oracle_of(transformers, case, **more)
    oracle.save_pretrained(folder)
    truth = oracle_logits(oracle, TOKENS)
    model, config = load_hf(folder, torch.float32)
    for chunks in ((20,), (7, 5), ()):  # at once, in pieces, one by one
        runner = runner_of(model, config)
        got = logits_in_chunks(runner, TOKENS, chunks)
        torch.testing.assert_close(got, truth, atol=1e-4, rtol=1e-4)
        if not chunks:
            follows_torch(runner, model, config)


def follows_torch(runner: ModelRunner, model: Any, config: Any) -> None:
    """Both leave the same KV behind, so a request may go from one to the other."""
    torchs = runner_of(model, config, "torch")
    logits_in_chunks(torchs, TOKENS, (20,))
    pairs = zip(
        (*runner.kv.keys, *runner.kv.values), (*torchs.kv.keys, *torchs.kv.values), strict=True
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("case", [case for case in CASES if case != GROUP_OF_ONE])
def test_logits_equal_transformers_at_every_position(
    transformers: Any, tmp_path: Path, case: str
) -> None:
    check(transformers, tmp_path, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(3, 3, 16), (3, 1, 64), (4, 1, 32), (8, 1, 128), (6, 2, 80), (14, 2, 64), (5, 1, 48)],
)
@pytest.mark.parametrize("case", ["llama_rope_yarn", "qwen2", "qwen3"])
def test_other_heads(
    transformers: Any, tmp_path: Path, case: str, heads: int, kv_heads: int, head_dim: int
) -> None:
    """Each pair of sizes is compiled by itself."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    sizes["hidden_size"] = -(-48 // heads) * heads  # which transformers asks for
    check(transformers, tmp_path, case, **sizes)


def divergence(logits: Tensor, truth: Tensor) -> float:
    """Mean KL(truth ‖ logits) of a position, nats."""
    p, q = truth.double().log_softmax(-1), logits.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize(
    "case", ["llama", "qwen2_sliding_from_layer_1", "qwen3", "llama_rope_yarn", "llama_mlp_bias"]
)
def test_bfloat16_is_nearer_to_float32_than_torchs(
    transformers: Any, tmp_path: Path, case: str
) -> None:
    """The residual stream, queries, scores and logits are not rounded here, in torch they are."""
    oracle = oracle_of(transformers, case).to(torch.bfloat16)
    oracle.save_pretrained(tmp_path)
    truth = oracle_logits(oracle.float(), TOKENS)  # the rounded weights, exact arithmetic
    model, config = load_hf(tmp_path)
    ours, torchs = (
        logits_in_chunks(runner_of(copy.deepcopy(model), config, name), TOKENS, (7, 5))
        for name in ("compiled", "torch")
    )
    assert divergence(ours, truth) < 0.7 * divergence(torchs, truth)
    assert (ours - truth).abs().mean() < 0.8 * (torchs - truth).abs().mean()


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunks", [(20,), ()], ids=["at once", "one by one"])
def test_codes_are_multiplied_as_what_they_stand_for(
    transformers: Any, tmp_path: Path, bits: str, dtype: torch.dtype, chunks: tuple[int, ...]
) -> None:
    """Truth: the same model with each code replaced by its weight, in float32."""
    oracle = oracle_of(transformers, "qwen2_tied", hidden_size=64, intermediate_size=96)
    oracle.save_pretrained(tmp_path)
    model, config, _ = load_hf_quantized(tmp_path, bits, dtype)
    exact = load_hf(tmp_path, dtype)[0].float()
    num_codes = 0
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, QuantizedWeight):
            exact.get_submodule(path).weight.data = weight.dequantize()
            num_codes += 1
    assert num_codes == 13, "four matrices a layer, and the embedding"
    truth = logits_in_chunks(runner_of(exact, config, "torch"), TOKENS, (20,))
    got = logits_in_chunks(runner_of(model, config), TOKENS, chunks)
    if dtype == torch.float32:
        torch.testing.assert_close(got, truth, atol=2e-4, rtol=1e-4)
    else:
        torchs = logits_in_chunks(runner_of(model, config, "torch"), TOKENS, chunks)
        assert (got - truth).abs().mean() < 1.1 * (torchs - truth).abs().mean()


SMOLLM2_PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Water boils at",
    "Once upon a time there was a little " * 30,  # longer than some stretches of attention
]


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["none", "file"])
def test_smollm2_says_the_same(pulled_model: Path, quantize: str) -> None:
    """Float32: 30 layers, 49,152 tokens, and the codes of its own file."""
    params = SamplingParams(temperature=0, max_tokens=32)
    replies = []
    for backend in ("torch", "compiled"):
        options = {"dtype": "float32", "quantize": quantize, "backend": backend}
        with LLM(str(pulled_model), num_kv_blocks=256, **options) as llm:
            outputs = llm.generate(SMOLLM2_PROMPTS, params)
        replies.append([output.outputs[0].token_ids for output in outputs])
    assert replies[0] == replies[1]
