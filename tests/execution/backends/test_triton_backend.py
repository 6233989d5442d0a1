"""The engine on our kernels, in Triton's interpreter, against the torch back end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from fakes import run_engine, tiny_config, tiny_engine
from scattered import scattered

from minifer import LLM, SamplingParams
from minifer.execution.attention import paged_attention
from minifer.execution.backends.triton_backend import TritonBackend
from minifer.kernels.rope_append import rope_append_reference

WINDOW = {"sliding_windows": (3, None)}
BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
NORMS = {"qk_norm": True}
ODD = {"num_heads": 3, "num_kv_heads": 1, "head_dim": 6}  # head dims that are no power of two
slow = pytest.mark.slow


def tokens_of(backend: str, prompts, max_tokens: int = 3, **options) -> list[list[int]]:
    """Greedy, two prompts at once and a third that shares their beginning."""
    engine = tiny_engine(backend=backend, **options)
    for i, prompt in enumerate(prompts):
        engine.add_request(f"r{i}", prompt, SamplingParams(temperature=0, max_tokens=max_tokens))
    outputs = run_engine(engine)
    return [outputs[f"r{i}"].outputs[0].token_ids for i in range(len(prompts))]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain", marks=slow),
        pytest.param(WINDOW, id="sliding window", marks=slow),
        pytest.param(BIASES, id="biases", marks=slow),
        pytest.param(NORMS, id="q and k normed", marks=slow),
        pytest.param(ODD, id="three heads of six", marks=slow),
        pytest.param(WINDOW | BIASES | NORMS | ODD, id="all of it"),
    ],
)
def test_greedy_tokens_equal_torch_in_every_kind_of_step(settings) -> None:
    """Chunks of 4 with 6 tokens a step mix prefill and decode; blocks of 4; NaN elsewhere."""
    shared = [5, 9, 2, 31, 7, 7, 1, 12]
    prompts = [[*shared, 3], [11, 4], [*shared, 8, 8]]
    options = {"config": tiny_config(**settings), "max_prefill_chunk": 4}
    options |= {"max_num_batched_tokens": 6, "max_num_seqs": 2}
    assert tokens_of("triton", prompts, **options) == tokens_of("torch", prompts, **options)


@pytest.mark.parametrize("float32_logits", [False, pytest.param(True, marks=slow)])
def test_a_step_that_asks_for_no_logits(float32_logits) -> None:
    """Chunks of a prompt that end before it does."""
    options = {"config": tiny_config(num_layers=1), "max_prefill_chunk": 3}
    options |= {"float32_logits": float32_logits}
    prompts = [[5, 9, 2, 31, 7, 7, 1]]
    assert tokens_of("triton", prompts, **options) == tokens_of("torch", prompts, **options)


@slow
def test_preemption_and_a_head_in_float32() -> None:
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 8, 9, 7, 9]]
    options = {"num_kv_blocks": 5, "block_size": 3, "float32_logits": True}
    assert tokens_of("triton", prompts, **options) == tokens_of("torch", prompts, **options)


def test_greedy_text_of_the_bundled_model_equals_torch() -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    texts = {}
    for backend in ("torch", "triton"):
        with LLM("minifer-tiny", backend=backend, num_kv_blocks=16) as llm:
            outputs = llm.generate(["The for statement", "A list"], params)
            texts[backend] = [(o.outputs[0].token_ids, o.outputs[0].text) for o in outputs]
    assert texts["triton"] == texts["torch"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mixed_batch_stays_near_float64(dtype: torch.dtype) -> None:
    query, kv, batch, keys, values = scattered(
        [9, 1, 6, 13], [3, 1, 1, 2], block_size=3, heads=6, kv_heads=2, dtype=dtype
    )
    T, C = batch.num_tokens, query.shape[-1]
    angles = torch.arange(T)[:, None] + torch.arange(C // 2) / 3
    new = [
        torch.cat([x[len(x) - n :] for x, n in zip(rows, (3, 1, 1, 2), strict=True)]).to(dtype)
        for rows in (keys, values)
    ]
    fine = [cache[0].double() for cache in (kv.keys, kv.values)]
    turn = (angles.cos(), angles.sin())
    rotated = rope_append_reference(
        query.double(), *(x.double() for x in new), *(x.double() for x in turn),
        *fine, batch.slot_mapping,
    )  # fmt: skip
    truth = paged_attention(rotated, *fine, batch, C**-0.5, 4)
    before = query.clone()
    out = TritonBackend("cpu").attention(query, *new, *turn, kv, 0, batch, C**-0.5, 4)
    assert out.dtype == dtype and torch.equal(query, before)
    kv.check_guard_bands()
    scale = {torch.float32: 1e-6, torch.bfloat16: 0.03, torch.float16: 4e-3}[dtype]
    assert (out - truth).abs().max() < scale


def test_the_parts_of_a_batch_are_found_once_a_step() -> None:
    """The longest chunk and the longest context stand at the end of both parts."""
    lengths, new = [9, 4, 6, 30, 7, 13], [2, 1, 6, 1, 1, 4]
    backend = TritonBackend("cpu")
    for order in (range(6), range(5, -1, -1)):
        chosen = [[values[i] for i in order] for values in (lengths, new)]
        *_, batch, _, _ = scattered(*chosen, block_size=3, heads=2, kv_heads=1)
        decode, prefill = backend._parts(batch)
        assert (decode.max_query, decode.max_context) == (1, 30)
        assert (prefill.max_query, prefill.max_context) == (6, 13)
        assert decode.seq_lens.tolist() == [s for s, n in zip(*chosen, strict=True) if n == 1]
        assert prefill.query_start.diff().tolist() == [n for n in chosen[1] if n > 1]
        assert backend._parts(batch)[0] is decode


def fresh(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, without TRITON_INTERPRET unless it is given."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**inherited, **environment},
    )


def test_the_first_engine_of_a_process_switches_the_interpreter_on() -> None:
    done = fresh(
        "from minifer.engine import Engine\n"
        "engine = Engine.from_pretrained('minifer-tiny', backend='triton', device='cpu')\n"
        "from minifer.kernels.compat import INTERPRETED\n"
        "print(engine.runner.backend.name, INTERPRETED.value)"
    )
    assert done.stdout.split() == ["triton", "True"], done.stderr


@pytest.mark.parametrize(
    "what",
    ["LLM('no such model'", pytest.param("Engine.from_pretrained('no such model'", marks=slow)],
)
def test_chosen_too_late_it_names_the_remedy_before_it_loads(what: str) -> None:
    done = fresh(
        "import triton\nfrom minifer import LLM\nfrom minifer.engine import Engine\n"
        f"{what}, backend='triton', device='cpu')"
    )
    assert "triton was imported without it: set TRITON_INTERPRET=1 in the environment" in (
        done.stderr
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "environment", [{}, pytest.param({"TRITON_INTERPRET": "1"}, marks=slow)], ids=str
)
def test_a_gpu_that_is_not_there_is_what_the_error_is_about(environment) -> None:
    done = fresh(
        "from minifer import LLM\nLLM('minifer-tiny', backend='triton', device='cuda')",
        **environment,
    )
    assert "one that torch finds here, got 'cuda'" in done.stderr


def test_a_torch_engine_never_imports_triton() -> None:
    done = fresh(
        "import sys\nfrom minifer import LLM, SamplingParams\nllm = LLM('minifer-tiny')\n"
        "llm.generate('A', SamplingParams(max_tokens=2))\nprint('triton' in sys.modules)"
    )
    assert done.stdout.split() == ["False"], done.stderr


def test_without_a_cache_it_says_so() -> None:
    query, _, batch, *_ = scattered([4], [1], block_size=4, heads=2, kv_heads=2)
    angles = torch.zeros(1, query.shape[-1] // 2)
    with pytest.raises(ValueError, match="triton back end keeps a KV cache"):
        TritonBackend("cpu").attention(
            query, query, query, angles, angles, None, 0, batch, 1.0, None
        )
