"""The engine's runner against `parcae_float64`: every logit of every generated token, under every
KV policy, at several depths and exit thresholds, whatever shares the step.

An early exit is a comparison, so float32 and float64 may disagree about a state that turns by just
the threshold; no case here comes closer to it than `MARGIN`.
"""

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from fakes import check_engine
from loop_models import float64, loop_engine, loop_model, some_tokens
from parcae_float64 import Float64Decode

from minifer.request import SamplingParams

TOLERANCE = 1e-5
MARGIN = 1e-5
POLICIES = ["full", "first-1", "first-2", "terminal", "cyclic-2", "cyclic-3"]
OVERWRITE = ("terminal", "cyclic")
THRESHOLDS = (0.02, 0.03, 0.04, 0.06)


@dataclass
class Trace:
    """What the engine computed for a request."""

    prompt: list[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    loops: dict[int, int] = field(default_factory=dict)
    logits: dict[int, np.ndarray] = field(default_factory=dict)  # by output index
    preemptions: int = 0


def run(model, requests, late=(), **options):
    """Requests {id: (prompt, params)} to their end; late ones join after three steps. A Trace of
    each, and the engine."""
    if str(options.get("loop_kv_policy")).startswith(OVERWRITE):
        options["enable_prefix_caching"] = False
    engine = loop_engine(model, **options)
    traces = {name: Trace(prompt, params) for name, (prompt, params) in requests.items()}
    alive = {}
    compute = engine.runner.forward

    def forward(step):
        logits = compute(step)
        assert len(logits) == len(step.logits_rows)
        for entry, row in step.sampled:
            request, trace = entry.request, traces[entry.request.request_id]
            trace.logits[request.num_output_tokens] = logits[row].numpy()
            alive[request.request_id] = request
        return logits

    engine.runner.forward = forward
    waiting = [name for name in requests if name in late]
    for name, (prompt, params) in requests.items():
        if name not in waiting:
            engine.add_request(name, prompt, params)
    for number in itertools.count():
        if number == 3:
            for name in waiting:
                engine.add_request(name, *requests[name])
        if number >= 3 and not engine.has_unfinished_requests:
            break
        assert number < 3000
        for output in engine.step():
            completion = output.outputs[0]
            assert completion.finish_reason in (None, "length"), completion.stop_reason
            traces[output.request_id].tokens = list(completion.token_ids)
        check_engine(engine)
    for name, request in alive.items():
        traces[name].loops, traces[name].preemptions = request.loops_run, request.num_preemptions
    return traces, engine


def check(model, trace, depth, policy="full"):
    """Every logit that a token was drawn from, and how many loops each token ran."""
    decode = Float64Decode(float64(model), depth, policy)
    threshold = trace.params.exit_threshold or 0.0
    rows = [decode.run(trace.prompt)[-1]]
    rows += [decode.run([token], threshold)[-1] for token in trace.tokens[:-1]]
    generated = decode.changes[len(trace.prompt) :]
    gap = min((abs(c - threshold) for changes in generated for c in changes[:-1]), default=1)
    assert not threshold or gap > MARGIN, "an unlucky case: choose another seed or threshold"
    ours = np.stack([trace.logits[i] for i in range(len(trace.tokens))])
    np.testing.assert_allclose(ours, np.stack(rows), rtol=0, atol=TOLERANCE)
    positions = range(len(trace.prompt) - 1, len(decode.loops))
    assert [trace.loops[p] for p in positions] == decode.loops[len(trace.prompt) - 1 :]
    return decode.loops[len(trace.prompt) :]


def params(max_tokens=9, **loop):
    """Drawn hot, so that tokens differ."""
    return SamplingParams(max_tokens=max_tokens, temperature=1.5, seed=1, ignore_eos=True, **loop)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layers", [(2, 2, 2), (0, 1, 0)], ids=str)
def test_decode_at_full_depth(layers, policy):
    model = loop_model(layers)
    traces, engine = run(model, {"a": (some_tokens(7), params())}, loop_kv_policy=policy)
    assert check(model, traces["a"], 4, policy) == [4] * 8
    assert engine.runner.stats.token_loops == 4 * (7 + 8)
    assert engine.runner.stats.core_applications == 4 * 9


@pytest.mark.parametrize(("seed", "threshold"), [(1, 0.02), (7, 0.03), (1, 0.04), (7, 0.06)])
@pytest.mark.parametrize("policy", POLICIES)
def test_decode_with_early_exit(policy, seed, threshold):
    """Exited tokens' slots hold the keys and values of their last iteration: later tokens, which
    go deeper, attend to them."""
    model = loop_model((1, 2, 1), seed, mean_recurrence=6)
    asked = params(14, exit_threshold=threshold)
    traces, engine = run(model, {"a": (some_tokens(7), asked)}, loop_kv_policy=policy)
    loops = check(model, traces["a"], 6, policy)
    assert engine.runner.stats.token_loops == 6 * 7 + sum(loops)


def test_these_thresholds_make_tokens_leave_at_many_depths():
    """So that what they leave behind is read: a later token of more loops than an earlier one."""
    model = loop_model((1, 2, 1), seed=1, mean_recurrence=6)
    seen, deeper_later = set(), 0
    for threshold in THRESHOLDS:
        asked = params(14, exit_threshold=threshold)
        traces, _ = run(model, {"a": (some_tokens(7), asked)})
        loops = check(model, traces["a"], 6)
        seen |= set(loops)
        deeper_later += any(b > a for a, b in itertools.combinations(loops, 2))
    assert seen >= {2, 3, 4, 5}
    assert deeper_later == len(THRESHOLDS)


@pytest.mark.parametrize("policy", POLICIES)
def test_threshold_0_is_full_depth(policy):
    """Also where the state stands still, and float32's cosine of it with itself is above 1."""
    model = loop_model((1, 2, 1), mean_recurrence=6)
    with torch.no_grad():
        for block in model.core:
            block.attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
        model.adapter.A_log.fill_(5.0)  # decays below 1e-9: h₁ = h₂ = …
    asked = {
        "a": (some_tokens(7), params(14, exit_threshold=0.0)),
        "b": (some_tokens(7), params(14)),
    }
    traces, _ = run(model, asked, loop_kv_policy=policy)
    assert check(model, traces["a"], 6, policy) == [6] * 13
    assert traces["a"].tokens == traces["b"].tokens
    for i, logits in traces["b"].logits.items():
        np.testing.assert_allclose(traces["a"].logits[i], logits, rtol=0, atol=1e-5)


def mixed_requests():
    """Depths 1 to 6, with and without early exit, prompts of 1 to 19 tokens."""
    return {
        "shallow": (some_tokens(5, 1), params(12, num_loops=1)),
        "default": (some_tokens(19, 2), params(7)),
        "exits": (some_tokens(9, 3), params(10, exit_threshold=0.02)),
        "deep": (some_tokens(1, 4), params(6, num_loops=6)),
        "deep exits": (some_tokens(11, 5), params(10, num_loops=6, exit_threshold=0.03)),
        "three": (some_tokens(3, 6), params(8, num_loops=3, exit_threshold=0.1)),
    }


SCHEDULES = {
    "continuous": {"loop_batching": "continuous"},
    "lockstep": {"loop_batching": "lockstep"},
    "small budget": {"max_num_batched_tokens": 20, "max_num_seqs": 3},
    "little memory": {"num_kv_blocks": 14},
}
FAST = (("cyclic-2", "little memory"), ("first-2", "small budget"))


def combinations():
    """Every policy and every schedule is in the fast tier, all of both are in the slow one."""
    for policy, schedule in itertools.product(POLICIES, SCHEDULES):
        fast = "continuous" in schedule or policy == "full" or (policy, schedule) in FAST
        yield pytest.param(policy, schedule, marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize(("policy", "schedule"), list(combinations()))
def test_requests_of_every_depth_share_steps(policy, schedule):
    model = loop_model((1, 2, 1), seed=1)
    options = {"max_num_loops": 6, "loop_kv_policy": policy, **SCHEDULES[schedule]}
    traces, _ = run(model, mixed_requests(), late=("deep", "three"), **options)
    for name, trace in traces.items():
        assert len(trace.tokens) == trace.params.max_tokens, name
        depth = trace.params.num_loops or 4
        loops = check(model, trace, depth, policy)
        assert (min(loops) < depth) == (trace.params.exit_threshold is not None), name
    assert (sum(t.preemptions for t in traces.values()) > 0) == (schedule == "little memory")


@pytest.mark.parametrize(("policy", "chunk"), [("full", 3), ("first-2", 1)])
def test_prompts_in_chunks(policy, chunk):
    model = loop_model((1, 2, 1), seed=1)
    options = {"max_num_loops": 6, "loop_kv_policy": policy, "max_prefill_chunk": chunk}
    traces, _ = run(model, mixed_requests(), late=("exits",), **options)
    for trace in traces.values():
        check(model, trace, trace.params.num_loops or 4, policy)
