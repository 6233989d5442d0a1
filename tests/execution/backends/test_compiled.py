"""backend="compiled" in the engine: who takes which path, and what goes wrong."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from compiled_steps import scattered_table, step_of
from fakes import run_engine, tiny_config, tiny_engine, tiny_model

from minifer.config import EngineConfig
from minifer.debug import DebugError
from minifer.engine import Engine
from minifer.execution.backends import compiled
from minifer.execution.backends.compiled import CompiledRunner
from minifer.execution.reference import reference_generate
from minifer.execution.runner import ModelRunner, make_runner
from minifer.execution.sampler import Picked
from minifer.llm import LLM
from minifer.models.registry import build_model
from minifer.request import SamplingParams

CONFIG = tiny_config(head_dim=16, max_position_embeddings=512)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
PROMPTS = {"a": [5, 1, 33, 8, 21, 2, 9], "b": [7], "c": list(range(20)), "d": [3, 3], "e": [39] * 5}


def runner(backend: str = "compiled", config=CONFIG, **options) -> ModelRunner:
    engine = EngineConfig(backend=backend, block_size=4, debug=True, **options)
    return make_runner(tiny_model(config), config, engine, 128)


def replies(backend: str, prompts, params, **options) -> dict[str, list]:
    """What each request gets, in debug mode: poison, guard bands, shadow KV, all invariants."""
    engine = tiny_engine(config=CONFIG, backend=backend, **{"num_kv_blocks": 300, **options})
    assert isinstance(engine.runner, CompiledRunner) == (backend == "compiled")
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params[name] if isinstance(params, dict) else params)
    return {
        name: [(reply.token_ids, reply.finish_reason) for reply in output.outputs]
        for name, output in run_engine(engine).items()
    }


# -- who takes which path


def test_long_steps_go_through_torch_and_come_back(monkeypatch) -> None:
    """A prompt of 200 tokens is more than 128 rows; beside it others decode."""
    monkeypatch.setattr(compiled, "MAX_ROWS", 128)
    calls: list[tuple[str, int]] = []
    for kind, name in ((ModelRunner, "torch"), (CompiledRunner, "compiled")):
        method = kind._logits

        def spy(self, step, name=name, method=method):
            calls.append((name, len(step.token_ids)))
            return method(self, step)

        monkeypatch.setattr(kind, "_logits", spy)
    prompts = {**PROMPTS, "long": [(7 * i) % 40 for i in range(200)]}
    got = replies("compiled", prompts, GREEDY)
    by_path = {name: [n for path, n in calls if path == name] for name in ("torch", "compiled")}
    assert by_path["torch"] == [sum(map(len, prompts.values()))]
    assert len(by_path["compiled"]) > 5 and max(by_path["compiled"][1:]) <= compiled.MAX_ROWS
    for name, prompt in prompts.items():
        assert got[name][0][0] == reference_generate(tiny_model(CONFIG), prompt, 8)


def test_a_greedy_step_returns_no_logits_and_picks_the_same() -> None:
    made = runner()
    table = scattered_table(9, 128)
    step = step_of([(PROMPTS["a"], 0, table), ([3, 3], 0, [100])])
    logits = made.forward(step)
    step.greedy = True
    picked = made.forward(step)
    assert isinstance(picked, Picked) and isinstance(logits, torch.Tensor)
    assert picked.tokens.tolist() == logits.argmax(-1).tolist()
    assert torch.equal(picked.logits, logits.amax(-1))


@pytest.mark.parametrize(
    "wish",
    [
        {"temperature": 0.9, "seed": 4, "n": 3},
        {"temperature": 0.8, "seed": 1, "top_k": 5, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 0, "logit_bias": {3: 4.0}, "bad_words": ()},
        {"temperature": 0, "allowed_token_ids": [1, 2, 3, 4]},
        {"temperature": 0, "min_tokens": 4, "stop_token_ids": [7, 21, 30]},
        {"temperature": 0, "logprobs": 3},
        {"temperature": 0, "prompt_logprobs": 2},
    ],
    ids=lambda wish: ",".join(wish),
)
def test_who_asks_for_more_gets_it_beside_those_who_do_not(wish) -> None:
    params = dict.fromkeys(PROMPTS, GREEDY)
    params["c"] = SamplingParams(max_tokens=8, **wish)
    assert replies("compiled", PROMPTS, params) == replies("torch", PROMPTS, params)


def test_logprobs_are_torchs() -> None:
    found = []
    for backend in ("compiled", "torch"):
        engine = tiny_engine(config=CONFIG, backend=backend)
        params = GREEDY.with_(logprobs=2, prompt_logprobs=1)
        engine.add_request("a", PROMPTS["c"], params)
        (output,) = run_engine(engine).values()
        entries = [*output.outputs[0].logprobs, *output.prompt_logprobs[1:]]
        found.append([[(token, e.logprob) for token, e in x.items()] for x in entries])
    for ours, theirs in zip(*found, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert [p for _, p in ours] == pytest.approx([p for _, p in theirs], abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_dram_bytes": 1 << 16, "num_kv_blocks": 12},
        {"num_kv_blocks": 9, "max_num_batched_tokens": 6},
        {"float32_logits": True},
        {"max_num_seqs": 2, "prefix_index": "radix"},
    ],
    ids=lambda options: ",".join(options),
)
def test_whatever_moves_its_blocks(options) -> None:
    prompts = {**PROMPTS, "c2": [*PROMPTS["c"], 1], "c3": [*PROMPTS["c"][:12], 7]}
    assert replies("compiled", prompts, GREEDY, **options) == replies("torch", prompts, GREEDY)


def test_a_text_with_a_stop_string_and_a_grammar() -> None:
    """minifer-tiny's own words: text, structure and seeds are torch's."""
    params = [
        SamplingParams(temperature=0, max_tokens=12, stop=[" a"]),
        SamplingParams(temperature=0.8, seed=3, max_tokens=12),
        SamplingParams(temperature=0, max_tokens=12, structured={"regex": "[a-c]{4}"}),
    ]
    texts = []
    for backend in ("torch", "compiled"):
        with LLM("minifer-tiny", backend=backend, num_kv_blocks=64, debug=True) as llm:
            outputs = llm.generate(["The with statement"] * 3, params)
        texts.append([(o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs])
    assert texts[0] == texts[1]
    assert texts[0][0][1] == texts[0][2][1] == "stop"


# -- numbers that are none


def broken_model(config):
    """Token 13 has an embedding of NaN; everything else is sound."""
    model = build_model(dataclasses.replace(config, tie_word_embeddings=False), torch.float32)
    model.init_weights(0, 0.3)
    model.embed_tokens.weight.data[13] = math.nan
    return model


@pytest.mark.parametrize("params", [GREEDY, GREEDY.with_(temperature=0.7, seed=1)])
def test_nan_fails_its_own_request_alone(params) -> None:
    config = dataclasses.replace(CONFIG, tie_word_embeddings=False)
    loaded = SimpleNamespace(
        model=broken_model(CONFIG), config=config, tokenizer=None,
        eos_token_ids=frozenset(), generation_defaults={},
    )  # fmt: skip
    found = {}
    for backend in ("compiled", "torch"):
        options = EngineConfig(backend=backend, block_size=4, num_kv_blocks=64)
        engine = Engine.from_loaded(loaded, options)
        for name, prompt in {**PROMPTS, "sick": [4, 13, 2], "c2": PROMPTS["c"]}.items():
            engine.add_request(
                name, [t if t != 13 or name == "sick" else 12 for t in prompt], params
            )
        outputs = run_engine(engine)
        assert outputs["sick"].outputs[0].finish_reason == "error"
        assert "logits hold NaN" in outputs["sick"].outputs[0].stop_reason
        found[backend] = {
            name: output.outputs[0].token_ids for name, output in outputs.items() if name != "sick"
        }
        assert all(found[backend].values())
    assert found["compiled"] == found["torch"]


def test_a_write_beside_the_pool_is_noticed() -> None:
    """The guard bands lie where the C++ writes: a slot too many is found by the same step."""
    made = runner()
    step = step_of([([5], 0, [3])])
    step.slot_mapping = [128 * 4]
    with pytest.raises(DebugError, match="something wrote after the keys of KV slot 0"):
        made.forward(step)


def test_a_step_without_memory_ends_its_requests_and_nothing_else() -> None:
    engine = tiny_engine(config=CONFIG, backend="compiled")
    engine.add_request("a", PROMPTS["a"], GREEDY)
    real = engine.runner._step._library

    class OutOfMemory:
        minifer_step = staticmethod(lambda model, step: 1)

    engine.runner._step._library = OutOfMemory
    (output,) = engine.step()
    assert output.outputs[0].finish_reason == "error"
    assert "no memory for a step of 7 rows" in output.outputs[0].stop_reason
    engine.runner._step._library = real
    engine.add_request("b", PROMPTS["a"], GREEDY)
    (output,) = run_engine(engine).values()
    assert output.outputs[0].token_ids == reference_generate(tiny_model(CONFIG), PROMPTS["a"], 8)
