"""Requests of every kind, with drafts that are right, wrong, or impossible: the replies are those
of an engine that does not draft, to the log-probability.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from fakes import run_engine, tiny_config, tiny_engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from speculating import half_right, use, with_draft_model

from minifer.config import POLICIES
from minifer.engine import Engine
from minifer.outputs import RequestOutput
from minifer.postprocessing.guards.safety import SafetyHook, WordListCheck
from minifer.request import SamplingParams
from minifer.sampling_params import RepetitionDetection
from minifer.structured_output import StructuredOutput
from minifer.text.byte_tokenizer import byte_tokenizer

pytest.importorskip("llguidance")

EOS = 257
CONFIG = tiny_config(vocab_size=288, max_position_embeddings=128)
TOKENIZER = byte_tokenizer()
STEMS = ["", "the quick brown ", "the quick brown fox jumps ", "abcabcabcabcabc"]
STRUCTURES = [
    StructuredOutput(regex="[a-f]{3,30}"),
    StructuredOutput(choice=["alpha", "alphabet soup", "beta"]),
    StructuredOutput(json_object=True),
]
METHODS = ["ngram", "itself", "another", "heart"]
Wish = tuple[list[int], SamplingParams, bool]


def wish(rng: random.Random) -> Wish:
    """A prompt, parameters, and is the text checked?"""
    tail = "".join(rng.choice("abcd xyz") for _ in range(rng.randint(1, 20)))
    fields: dict[str, Any] = {
        "temperature": rng.choice([0, 0.8, 1.3]),
        "top_p": rng.choice([1.0, 0.9]),
        "top_k": rng.choice([0, 0, 12]),
        "min_p": rng.choice([0.0, 0.05]),
        "repetition_penalty": rng.choice([1.0, 1.2]),
        "frequency_penalty": rng.choice([0.0, 0.5]),
        "logit_bias": rng.choice([None, {97: 2.0, EOS: 3.0}]),
        "bad_words": rng.choice([(), ("ab", "q")]),
        "stop": rng.choice([(), ("a", "zz"), ("e f",)]),
        "stop_token_ids": rng.choice([(), (98, 120)]),
        "include_stop_str_in_output": rng.random() < 0.3,
        "max_tokens": rng.choice([1, 2, 9, 20, None]),
        "min_tokens": rng.choice([0, 0, 1]),
        "ignore_eos": rng.random() < 0.2,
        "logprobs": rng.choice([None, None, 0, 3]),
        "prompt_logprobs": rng.choice([None, None, None, 1]),
        "seed": rng.randrange(2**40),
        "cache_salt": rng.choice([None, None, "a"]),
        "structured": rng.choice([None, None, *STRUCTURES]),
        "repetition_detection": rng.choice([None, RepetitionDetection(6, 3)]),
    }
    if fields["temperature"]:
        fields["n"] = rng.choice([1, 1, 2, 3])
    prompt = TOKENIZER.encode(rng.choice(STEMS) + tail)
    return prompt, SamplingParams(**fields), rng.random() < 0.3


def answers(engine: Engine, wishes: list[Wish]) -> dict[str, RequestOutput]:
    for i, (prompt, params, checked) in enumerate(wishes):
        hooks = [SafetyHook([WordListCheck(["b", "dd"], whole_word=False)])] if checked else []
        engine.add_request(str(i), prompt, params, hooks=hooks)
    return run_engine(engine)


def engine_of(**options) -> Engine:
    return tiny_engine(config=CONFIG, tokenizer=TOKENIZER, eos=(EOS,), **options)


def check(seed: int, method: str, **options) -> Engine:
    rng = random.Random(seed)
    wishes = [wish(rng) for _ in range(14)]
    plain = answers(engine_of(), wishes)
    if method == "ngram":
        engine = engine_of(speculative_method="ngram", prompt_lookup_min=1, **options)
    elif method == "heart":
        replies = {(k, o.index): o.token_ids for k, v in plain.items() for o in v.outputs}
        engine = use(engine_of(**options), half_right(replies, rng, 288))
    else:
        engine = with_draft_model(engine_of(**options), int(method == "another"), CONFIG)
    for name, output in answers(engine, wishes).items():
        for got, expected in zip(output.outputs, plain[name].outputs, strict=True):
            assert (got.token_ids, got.text) == (expected.token_ids, expected.text)
            assert got.finish_reason == expected.finish_reason
            assert got.stop_reason == expected.stop_reason
            assert (got.logprobs is None) == (expected.logprobs is None)
            for a, b in zip(got.logprobs or (), expected.logprobs or (), strict=True):
                assert list(a) == list(b)
                assert [e.logprob for e in a.values()] == pytest.approx(
                    [e.logprob for e in b.values()], abs=1e-4
                )
    return engine


@pytest.mark.parametrize("method", METHODS)
def test_replies_are_the_same_with_drafts(method):
    stats = [check(seed, method).speculation_stats for seed in range(3)]
    assert sum(s.num_accepted_tokens for s in stats) > 0
    if method != "itself":
        assert any(s.num_accepted_tokens < s.num_draft_tokens for s in stats)


SETTINGS = {
    "block_size": st.sampled_from([1, 2, 3, 4, 16]),
    "num_speculative_tokens": st.integers(1, 7),
    "max_num_batched_tokens": st.sampled_from([3, 8, 17, 2048]),
    "max_prefill_chunk": st.sampled_from([None, 1, 5]),
    "max_num_seqs": st.sampled_from([3, 5, 64]),
    "prefix_index": st.sampled_from(["hash", "radix"]),
    "enable_prefix_caching": st.sampled_from([True, True, False]),
    "scheduling_policy": st.sampled_from(POLICIES),
    "blocks": st.sampled_from([130, 170, 600]),  # tokens; one request may have 128
}


def check_drawn(seed: int, method: str, settings: dict[str, Any]) -> None:
    settings = dict(settings)
    settings["num_kv_blocks"] = -(-settings.pop("blocks") // settings["block_size"])
    check(seed, method, **settings)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**30), st.sampled_from(METHODS), st.fixed_dictionaries(SETTINGS))
def test_whatever_the_engine_has_to_work_with(seed, method, settings):
    check_drawn(seed, method, settings)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**30), st.sampled_from(METHODS), st.fixed_dictionaries(SETTINGS))
def test_whatever_the_engine_has_to_work_with_at_length(seed, method, settings):
    check_drawn(seed, method, settings)
