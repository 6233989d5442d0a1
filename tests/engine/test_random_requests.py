"""200 random requests through `Engine.step()`: invariants at every step, every answer right."""

from __future__ import annotations

import random

import pytest
from fakes import run_engine, step_checked, tiny_config, tiny_engine

from minifer.request import SamplingParams

NUM_REQUESTS = 200


def random_request(rng: random.Random) -> tuple[list[int], SamplingParams]:
    """Mixed lengths and parameters; a third of the prompts begin alike."""
    prompt = [rng.randrange(40) for _ in range(rng.choice([1, 2, 4, 7, 8, 12, 15, 25]))]
    if rng.random() < 0.3:
        prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, *prompt[:6]]
    wishes = {
        "temperature": rng.choice([0, 0, 0.7, 1.3]),
        "top_k": rng.choice([0, 5]),
        "top_p": rng.choice([1.0, 0.8]),
        "min_p": rng.choice([0.0, 0.05]),
        "repetition_penalty": rng.choice([1.0, 1.2]),
        "presence_penalty": rng.choice([0.0, 0.5]),
        "frequency_penalty": rng.choice([0.0, -0.3]),
        "logit_bias": rng.choice([None, {3: 2.0, 4: -5.0}]),
        "allowed_token_ids": rng.choice([None, None, list(range(20))]),
        "stop_token_ids": rng.choice([(), (7,)]),
        "min_tokens": rng.choice([0, 3]),
        "max_tokens": rng.choice([1, 3, 8, 14]),
        "ignore_eos": rng.random() < 0.3,
        "logprobs": rng.choice([None, None, 0, 2]),
        "prompt_logprobs": rng.choice([None, None, None, 1]),
        "seed": rng.randrange(2**40),
        "priority": rng.randrange(3),
        "tenant": rng.choice(["", "a", "b"]),
        "cache_salt": rng.choice([None, None, "a"]),
    }
    wishes["min_tokens"] = min(wishes["min_tokens"], wishes["max_tokens"])
    if wishes["temperature"] > 0 and rng.random() < 0.2:
        wishes["n"] = rng.choice([2, 3])
    return prompt, SamplingParams(**wishes)


def alone(prompt, params, seed_options):
    engine = tiny_engine(**seed_options)
    engine.add_request("x", prompt, params)
    return run_engine(engine)["x"]


@pytest.mark.parametrize(
    ("policy", "index", "backend"),
    [
        ("fcfs", "hash", "torch"),
        ("priority", "radix", "torch"),
        ("lpm", "hash", "torch"),
        pytest.param("sjf", "hash", "torch", marks=pytest.mark.slow),
        pytest.param("srpt", "radix", "torch", marks=pytest.mark.slow),
        pytest.param("mlfq", "hash", "torch", marks=pytest.mark.slow),
        pytest.param("vtc", "radix", "torch", marks=pytest.mark.slow),
        ("fcfs", "radix", "compiled"),
    ],
)
def test_200_random_requests(policy, index, backend):
    """Alone, a request is computed in torch."""
    rng = random.Random(f"{policy} {index}")
    options = {"eos": (11, 30), "num_kv_blocks": 14, "max_num_seqs": 6, "prefix_index": index}
    if backend == "compiled":
        options["config"] = tiny_config(head_dim=16)
    engine = tiny_engine(
        **options,
        backend=backend,
        scheduling_policy=policy,
        mlfq_quantum=8,
        max_num_batched_tokens=16,
        max_prefill_chunk=9,
    )
    asked, answers, aborted = {}, {}, set()
    while len(answers) < NUM_REQUESTS:
        if len(asked) < NUM_REQUESTS and rng.random() < 0.6:
            name = str(len(asked))
            asked[name] = random_request(rng)
            engine.add_request(name, *asked[name])
        if engine.has_unfinished_requests and rng.random() < 0.03:
            name = rng.choice(list(engine._requests))
            answers[name] = engine.abort(name)
            aborted.add(name)
        for output in step_checked(engine):
            if output.finished:
                answers[output.request_id] = output
    assert not engine.has_unfinished_requests
    assert engine.kv.pool.num_free == engine.kv.pool.num_blocks
    assert engine.scheduler.num_preemptions > 10, "this cache was meant to be too small"
    assert len(aborted) >= 5
    assert engine.kv.stats.num_hits > 0
    for name, (prompt, params) in asked.items():
        truth = alone(prompt, params, {**options, "num_kv_blocks": 64})
        check_same(answers[name], truth, cut=name in aborted)


def check_same(got, truth, cut: bool):
    """Equal answers; of an aborted request, the beginning of the answer."""
    for output in got.outputs:
        expected = truth.outputs[output.index]
        if cut and output.finish_reason == "abort":
            assert output.token_ids == expected.token_ids[: len(output.token_ids)]
            continue
        assert output.token_ids == expected.token_ids
        assert (output.finish_reason, output.stop_reason) == (
            expected.finish_reason,
            expected.stop_reason,
        )
        assert_logprobs(output.logprobs, expected.logprobs)
    if not cut:
        assert len(got.outputs) == len(truth.outputs)
        assert_logprobs(got.prompt_logprobs, truth.prompt_logprobs)


def assert_logprobs(got, expected):
    assert (got is None) == (expected is None)
    for a, b in zip(got or (), expected or (), strict=True):
        assert (a is None) == (b is None)
        for token in a or ():
            assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-4)
