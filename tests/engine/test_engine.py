"""The engine as its driver sees it: admission, ends, forks, aborts, faults, metrics."""

from __future__ import annotations

import itertools
import re
import threading

import numpy as np
import pytest
import torch
from fakes import check_engine, run_engine, step_checked, tiny_config, tiny_engine, tiny_model

from minifer.events import ListSink
from minifer.execution.reference import reference_generate, reference_logits
from minifer.postprocessing.hooks import HookVerdict
from minifer.request import OutputKind, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def ask(engine, prompt, params, name="x"):
    engine.add_request(name, prompt, params)
    return run_engine(engine)[name]


# -- admission


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_case_045_max_tokens_must_be_a_positive_integer(value):
    with pytest.raises(ValueError, match="max_tokens must be an integer of at least 1"):
        SamplingParams(max_tokens=value)


def test_case_045_and_106_an_empty_prompt_is_refused():
    engine = tiny_engine()
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        engine.add_request("x", [], GREEDY)
    assert not engine.has_unfinished_requests


def test_case_045_the_exact_fit_is_accepted_and_one_more_refused():
    engine = tiny_engine(num_kv_blocks=100)
    params = SamplingParams(temperature=0, max_tokens=28, ignore_eos=True)
    output = ask(engine, [1] * 100, params)
    assert len(output.outputs[0].token_ids) == 28
    with pytest.raises(ValueError, match=r"101 tokens and max_tokens is 28, together 129.* 128"):
        engine.add_request("x", [1] * 101, params)
    with pytest.raises(ValueError, match=r"128 tokens, the limit is 127"):
        engine.add_request("x", [1] * 128, SamplingParams(max_tokens=None))


def test_without_max_tokens_the_models_length_ends_it():
    output = ask(
        tiny_engine(num_kv_blocks=100), [1] * 120, SamplingParams(temperature=0, max_tokens=None)
    )
    assert len(output.outputs[0].token_ids) == 8
    assert output.outputs[0].finish_reason == "length"


def test_case_043_a_prompt_larger_than_the_cache_is_refused_and_serving_goes_on():
    engine = tiny_engine(num_kv_blocks=2)
    engine.add_request("ok", [1, 2, 3], GREEDY.with_(max_tokens=4))
    with pytest.raises(ValueError, match=r"20 tokens, the limit is 8 \(the KV cache"):
        engine.add_request("big", [1] * 20, GREEDY)
    assert len(run_engine(engine)["ok"].outputs[0].token_ids) == 4


def test_a6_a_lone_request_that_fills_the_cache_ends_with_length():
    output = ask(tiny_engine(num_kv_blocks=2), [1, 2, 3], GREEDY.with_(max_tokens=20))
    assert len(output.outputs[0].token_ids) == 6  # 8 positions, and the last needs none
    assert output.outputs[0].finish_reason == "length"


def test_case_046_a_running_id_is_refused():
    engine = tiny_engine()
    engine.add_request("x", [1], GREEDY)
    with pytest.raises(ValueError, match="'x' is still running"):
        engine.add_request("x", [2], GREEDY)
    run_engine(engine)
    ask(engine, [1], GREEDY)  # free again


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([40], {}, r"in \[0, 40\), got 40"),
        ([-1], {}, r"in \[0, 40\), got -1"),
        (["a"], {}, "must be integers, got 'a'"),
        ([1], {"stop_token_ids": [10**9]}, "stop_token_ids must be below 40, got 1000000000"),
        ([1], {"logit_bias": {40: 1.0}}, "logit_bias must be below 40, got 40"),
        ([1], {"allowed_token_ids": [99]}, "allowed_token_ids must be below 40, got 99"),
        ([1], {"allowed_token_ids": []}, "allowed_token_ids must hold at least one"),
        ([1], {"logprobs": 41}, "logprobs must be at most 40, got 41"),
        ([1], {"prompt_logprobs": 41}, "prompt_logprobs must be at most 40, got 41"),
        ([1], {"n": 65}, r"n must be at most max_num_seqs \(64\), got 65"),
        ([1], {"stop": "x"}, "stop strings need a tokenizer"),
        ([1], {"bad_words": "x"}, "bad_words need a tokenizer"),
        ("text", {}, "a text prompt needs a tokenizer"),
    ],
)
def test_case_097_what_the_model_cannot_do_is_refused_at_the_door(prompt, fields, message):
    engine = tiny_engine()
    with pytest.raises(ValueError, match=message):
        engine.add_request("x", prompt, SamplingParams(**fields))
    assert not engine.has_unfinished_requests
    check_engine(engine)


@pytest.mark.parametrize("prompt", [b"ab", None, 5, {"prompt": "a"}, {1, 2}, [[1, 2]], [True]])
def test_a_prompt_that_is_no_list_of_token_ids_is_refused(prompt):
    with pytest.raises(ValueError, match="prompt"):
        tiny_engine().add_request("x", prompt, GREEDY)


def test_a_prompt_may_come_from_numpy():
    engine = tiny_engine()
    engine.add_request("x", np.array([1, 2]), GREEDY)
    output = run_engine(engine)["x"]
    assert output.outputs[0].token_ids == reference_generate(tiny_model(), [1, 2], 8)
    assert [type(token) for token in output.prompt_token_ids] == [int, int]


class Uncopyable:
    """A hook with a lock, which has no copy."""

    def __init__(self):
        self.lock = threading.Lock()

    def on_token(self, token_id, text):
        return HookVerdict(text)

    def on_finish(self, text):
        return text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_id": ""}, "request_id must be a non-empty string of valid Unicode, got ''"),
        ({"request_id": 5}, "request_id must be a non-empty string of valid Unicode, got 5"),
        ({"request_id": "\ud800"}, "request_id must be a non-empty string of valid Unicode"),
        ({"params": {"n": 1}}, "params must be SamplingParams or None, got {'n': 1}"),
        ({"hooks": 5}, "hooks must be objects with on_token and on_finish, got 5"),
        ({"hooks": [int]}, "hooks must be objects with on_token and on_finish, got <class 'int'>"),
        (
            {"hooks": [Uncopyable()], "params": SamplingParams(n=2)},
            "hooks of more than one sequence must be copyable",
        ),
    ],
)
def test_an_argument_of_the_wrong_type_is_refused_and_changes_nothing(fields, message):
    engine = tiny_engine()
    with pytest.raises(ValueError, match=re.escape(message)):
        engine.add_request(**{"request_id": "x", "prompt": [1], "params": GREEDY, **fields})
    assert not engine.has_unfinished_requests
    check_engine(engine)


def test_engine_options_are_checked_by_name():
    with pytest.raises(ValueError, match="block_size must be an integer of at least 1, got 0"):
        tiny_engine(block_size=0)
    with pytest.raises(ValueError, match=r"backend must be one of .*, got 'magic'"):
        tiny_engine(backend="magic")
    for name, value, rule in (
        ("enable_prefix_caching", "no", "True or False"),
        ("float32_logits", 1, "True or False"),
        ("seed", 1.5, "an integer or None"),
        ("seed", True, "an integer or None"),
        ("device", 0, "a string"),
        ("model", None, "a name or a path"),
    ):
        with pytest.raises(ValueError, match=rf"{name} must be {rule}.*, got {value!r}"):
            tiny_engine(**{name: value})
    with pytest.raises(ValueError, match=r"max_model_len must be at most 128.* got 129"):
        tiny_engine(max_model_len=129)
    with pytest.raises(ValueError, match=r"max_model_len must leave room .* got 1"):
        tiny_engine(max_model_len=1)
    with pytest.raises(ValueError, match=r"num_kv_blocks must fit into memory, got 1000000000000"):
        tiny_engine(num_kv_blocks=10**12)
    with pytest.raises(ValueError, match="kv_cache_bytes must hold at least one block"):
        tiny_engine(num_kv_blocks=None, kv_cache_bytes=100)


# -- ends


def test_case_094_end_tokens_wait_for_min_tokens():
    bias = {11: 100.0}
    for params in ({}, {"ignore_eos": True, "stop_token_ids": [11]}):
        engine = tiny_engine(eos=(11, 12))
        output = ask(
            engine, [1, 2], GREEDY.with_(min_tokens=4, max_tokens=20, logit_bias=bias, **params)
        )
        assert len(output.outputs[0].token_ids) == 5
        assert output.outputs[0].token_ids[-1] == 11
        assert output.outputs[0].finish_reason == "stop"


def test_any_token_of_the_eos_list_ends_and_a_stop_id_is_named():
    for eos in (11, 12):
        output = ask(tiny_engine(eos=(11, 12)), [1], GREEDY.with_(logit_bias={eos: 100.0}))
        (answer,) = output.outputs
        assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == ([eos], "stop", None)
    output = ask(tiny_engine(), [1], GREEDY.with_(logit_bias={9: 100.0}, stop_token_ids=[9]))
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", 9)
    output = ask(tiny_engine(eos=(11,)), [1], GREEDY.with_(logit_bias={11: 99.0}, ignore_eos=True))
    assert output.outputs[0].token_ids == [11] * 8
    assert output.outputs[0].finish_reason == "length"


# -- n and fork


def test_case_089_and_090_n_samples_differ_and_repeat():
    params = SamplingParams(temperature=1.0, n=4, seed=5, max_tokens=6)
    first, again = (ask(tiny_engine(), [1, 2, 3], params) for _ in range(2))
    texts = [tuple(answer.token_ids) for answer in first.outputs]
    assert [answer.index for answer in first.outputs] == [0, 1, 2, 3]
    assert len(set(texts)) > 1
    assert texts == [tuple(answer.token_ids) for answer in again.outputs]
    for i in range(4):  # the child's seed is seed + index
        single = ask(tiny_engine(), [1, 2, 3], params.with_(n=1, seed=5 + i))
        assert tuple(single.outputs[0].token_ids) == texts[i]


def test_case_091_the_first_token_is_drawn_for_every_sample():
    engine = tiny_engine(max_num_seqs=16)
    output = ask(engine, [1], SamplingParams(temperature=2, n=16, max_tokens=1, seed=0))
    assert len({answer.token_ids[0] for answer in output.outputs}) > 4


def test_n_samples_compute_the_prompt_once_and_copy_on_write():
    sink = ListSink()
    engine = tiny_engine(sinks=[sink])
    ask(engine, list(range(10)), SamplingParams(temperature=1, n=3, seed=1, max_tokens=4))
    prompt_work = [
        e for e in sink.events if e.name == "request.scheduled" and e.token_range[0] < 10
    ]
    assert [e.token_range for e in prompt_work] == [(0, 10)]
    assert len([e for e in sink.events if e.name == "kv.block_copied"]) == 2


def test_fork_branches_a_running_request():
    engine = tiny_engine()
    params = SamplingParams(temperature=1.5, seed=1, max_tokens=12)
    engine.add_request("trunk", list(range(6)), params)
    for _ in range(4):
        step_checked(engine)
    engine.fork("trunk", "branch", seed=99)
    engine.fork("trunk", "twin", seed=1)
    check_engine(engine)
    last = run_engine(engine)
    trunk, branch, twin = (last[n].outputs[0].token_ids for n in ("trunk", "branch", "twin"))
    assert trunk[:4] == branch[:4] and trunk != branch
    assert twin == trunk
    with pytest.raises(ValueError, match="'nobody'"):
        engine.fork("nobody", "x")


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_a_fork_has_the_prompt_logprobs_of_its_parent(steps):
    engine = tiny_engine(max_num_batched_tokens=5, block_size=3)
    engine.add_request("trunk", [1, 2, 3, 4, 5, 6, 7, 8, 9], GREEDY.with_(prompt_logprobs=1))
    for _ in range(steps):
        step_checked(engine)
    engine.fork("trunk", "branch")
    last = run_engine(engine)
    trunk, branch = last["trunk"].prompt_logprobs, last["branch"].prompt_logprobs
    assert len(trunk) == len(branch) == 9
    for ours, theirs in zip(trunk[1:], branch[1:], strict=True):
        for token in ours:
            assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seed": 1.5}, "seed must be a 64-bit integer or None, got 1.5"),
        ({"new_request_id": "trunk"}, "new_request_id must be new, 'trunk' is still running"),
        ({"new_request_id": None}, "new_request_id must be a non-empty string"),
        ({}, "hooks of more than one sequence must be copyable"),
    ],
)
def test_a_refused_fork_changes_nothing(fields, message):
    engine = tiny_engine()
    engine.add_request("trunk", [1, 2], GREEDY, hooks=[] if fields else [Uncopyable()])
    step_checked(engine)
    with pytest.raises(ValueError, match=message):
        engine.fork("trunk", **{"new_request_id": "branch", **fields})
    last = run_engine(engine)
    assert list(last) == ["trunk"]
    assert last["trunk"].outputs[0].token_ids == reference_generate(tiny_model(), [1, 2], 8)


def test_fork_of_a_waiting_request_waits_too():
    engine = tiny_engine(max_num_seqs=1)
    engine.add_request("first", [1], GREEDY)
    engine.add_request("second", [2, 3], GREEDY)
    step_checked(engine)
    engine.fork("second", "third")
    engine.fork("first", "fourth")  # running, but there is no seat
    last = run_engine(engine)
    assert last["third"].outputs[0].token_ids == last["second"].outputs[0].token_ids
    assert last["fourth"].outputs[0].token_ids == last["first"].outputs[0].token_ids


# -- aborts and faults


def test_case_047_abort_is_always_safe():
    engine = tiny_engine()
    assert engine.abort("unknown") is None
    engine.add_request("x", [1, 2], GREEDY)
    output = engine.abort("x")  # while waiting, before any block
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert engine.abort("x") is None
    check_engine(engine)


def test_case_051_abort_after_finish_frees_nothing_twice():
    engine = tiny_engine()
    engine.add_request("x", [1, 2], GREEDY.with_(max_tokens=1))
    (output,) = step_checked(engine)
    assert output.finished
    assert engine.abort("x") is None
    check_engine(engine)


@pytest.mark.parametrize("steps", range(6))
def test_abort_in_every_state_of_a_request_with_n(steps):
    engine = tiny_engine(max_num_batched_tokens=4)
    engine.add_request("x", [1] * 9, SamplingParams(n=3, max_tokens=9, seed=0))
    engine.add_request("y", [2] * 5, GREEDY)
    for _ in range(steps):
        step_checked(engine)
    output = engine.abort("x")
    check_engine(engine)
    assert output.finished and {a.finish_reason for a in output.outputs} == {"abort"}
    assert run_engine(engine)["y"].outputs[0].token_ids == reference_generate(
        tiny_model(), [2] * 5, 8
    )


class BrokenRunner:
    """A runner whose logits are replaced for one call, or that raises."""

    def __init__(self, engine, spoil):
        self.inner, self.spoil, self.calls = engine.runner, spoil, 0
        engine.runner = self

    def forward(self, step):
        self.calls += 1
        return self.spoil(self.calls, step, self.inner.forward(step).clone())


def test_case_082_a_nan_row_fails_its_own_request_only():
    engine = tiny_engine()

    def spoil(call, step, logits):
        for entry, row in step.sampled:
            if call == 2 and entry.request.request_id == "bad":
                logits[row] = float("nan")
        return logits

    BrokenRunner(engine, spoil)
    engine.add_request("bad", [1, 2, 3, 4, 5], GREEDY)
    engine.add_request("good", [3, 4], GREEDY)
    last = run_engine(engine)
    assert last["bad"].outputs[0].finish_reason == "error"
    assert "NaN" in last["bad"].outputs[0].stop_reason
    assert last["good"].outputs[0].token_ids == reference_generate(tiny_model(), [3, 4], 8)
    # What it computed is not to be trusted: the same prompt does not hit.
    assert ask(engine, [1, 2, 3, 4, 5], GREEDY).num_cached_tokens == 0


def test_a_request_that_failed_before_its_first_token_has_no_time_to_first_token():
    engine = tiny_engine()
    BrokenRunner(engine, lambda call, step, logits: logits * float("nan"))
    metrics = ask(engine, [1], GREEDY).metrics
    assert (metrics.ttft, metrics.num_output_tokens) == (None, 0)
    assert metrics.finished_time is not None


def test_case_083_everything_masked_fails_its_own_request_only():
    engine = tiny_engine()

    def spoil(call, step, logits):
        logits[0, :] = float("-inf")
        return logits

    BrokenRunner(engine, spoil)
    engine.add_request("bad", [1], GREEDY)
    engine.add_request("good", [3, 4], GREEDY.with_(max_tokens=1))
    last = run_engine(engine)
    assert last["bad"].outputs[0].finish_reason == "error"
    assert last["good"].outputs[0].finish_reason == "length"


def test_a_fault_of_the_forward_pass_ends_its_step_and_not_the_engine():
    engine = tiny_engine(max_num_seqs=2)

    def spoil(call, step, logits):
        if call == 2:
            raise MemoryError("out of memory")
        return logits

    BrokenRunner(engine, spoil)
    prompt = [1, 2, 3, 4, 5, 6, 7]
    engine.add_request("a", prompt, GREEDY)
    engine.add_request("b", [5], SamplingParams(max_tokens=4, seed=0))
    engine.add_request("c", prompt, GREEDY)
    last = run_engine(engine)
    for name in "ab":
        assert last[name].outputs[0].finish_reason == "error"
        assert last[name].outputs[0].stop_reason == "MemoryError: out of memory"
    assert last["c"].outputs[0].token_ids == reference_generate(tiny_model(), prompt, 8)


def test_blocks_of_a_step_that_failed_are_not_found():
    engine = tiny_engine()

    def spoil(call, step, logits):
        if call == 1:
            raise RuntimeError("boom")
        return logits

    BrokenRunner(engine, spoil)
    prompt = list(range(12))
    assert ask(engine, prompt, GREEDY).outputs[0].finish_reason == "error"
    output = ask(engine, prompt, GREEDY)
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == reference_generate(tiny_model(), prompt, 8)


class Interrupted:
    """Ctrl-C before the model has computed anything."""

    def forward(self, step):
        raise KeyboardInterrupt


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_interrupted_step_is_undone(steps):
    engine, prompt = tiny_engine(), list(range(12))
    engine.add_request("x", prompt, GREEDY)
    for _ in range(steps):
        step_checked(engine)
    engine.add_request("y", prompt[::-1], GREEDY)
    runner, engine.runner = engine.runner, Interrupted()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    check_engine(engine)
    engine.runner = runner
    engine.add_request("z", prompt[::-1], GREEDY)  # must not hit what was never computed
    last = run_engine(engine)
    for name, ids in {"x": prompt, "y": prompt[::-1], "z": prompt[::-1]}.items():
        assert last[name].outputs[0].token_ids == reference_generate(tiny_model(), ids, 8)


class FullDisk:
    """A sink that fails at the n-th event."""

    def __init__(self, n):
        self.n = n

    def write(self, event):
        self.n -= 1
        if self.n == 0:
            raise OSError("No space left on device")


@pytest.mark.parametrize("n", range(1, 30))
def test_a_sink_that_fails_is_dropped_and_the_requests_go_on(n):
    kept = ListSink()
    engine = tiny_engine(sinks=[FullDisk(n), kept])
    with pytest.warns(UserWarning, match="FullDisk.*is dropped: .*No space left"):
        output = ask(engine, list(range(9)), GREEDY.with_(max_tokens=3))
    assert output.outputs[0].token_ids == reference_generate(tiny_model(), list(range(9)), 3)
    assert engine.events.sinks == [kept] and len(kept.events) >= 30


class Ender:
    """Ends its sequence after k tokens, or raises."""

    def __init__(self, k, error=None):
        self.k, self.error = k, error

    def on_token(self, token_id, text):
        self.k -= 1
        if self.k == 0 and self.error:
            raise self.error
        return HookVerdict(text, "stop" if self.k == 0 else None, "enough" if self.k == 0 else None)

    def on_finish(self, text):
        return text


def test_a_hook_ends_a_request_and_a_broken_hook_ends_only_its_own():
    engine = tiny_engine()
    engine.add_request("short", [1], GREEDY, hooks=[Ender(3)])
    engine.add_request("broken", [1], GREEDY, hooks=[Ender(2, KeyError("oops"))])
    engine.add_request("plain", [1], GREEDY)
    last = run_engine(engine)
    assert len(last["short"].outputs[0].token_ids) == 3
    assert last["short"].outputs[0].stop_reason == "enough"
    assert last["broken"].outputs[0].finish_reason == "error"
    assert "oops" in last["broken"].outputs[0].stop_reason
    assert len(last["plain"].outputs[0].token_ids) == 8


def test_every_sample_has_its_own_hooks():
    engine = tiny_engine()
    params = SamplingParams(n=3, max_tokens=9, seed=0)
    engine.add_request("x", [1], params, hooks=[Ender(4)])
    assert [len(a.token_ids) for a in run_engine(engine)["x"].outputs] == [4, 4, 4]


# -- log-probabilities


def test_case_099_prompt_logprobs_against_the_reference():
    prompt = [5, 9, 2]
    output = ask(tiny_engine(), prompt, GREEDY.with_(prompt_logprobs=2, max_tokens=1))
    scored = output.prompt_logprobs
    assert len(scored) == 3 and scored[0] is None
    truth = torch.log_softmax(reference_logits(tiny_model(), prompt), -1)
    for position in (1, 2):
        token = prompt[position]
        row = truth[position - 1]
        assert scored[position][token].logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert scored[position][token].rank == int((row > row[token]).sum()) + 1
        assert {int(t) for t in row.topk(2).indices} <= set(scored[position])


def test_case_101_prompt_logprobs_do_not_read_the_cache():
    engine = tiny_engine()
    prompt = list(range(12))
    ask(engine, prompt, GREEDY)
    output = ask(engine, prompt, GREEDY.with_(prompt_logprobs=0))
    assert output.num_cached_tokens == 0
    assert len(output.prompt_logprobs) == 12 and None not in output.prompt_logprobs[1:]


@pytest.mark.parametrize("length", [3, 4, 5, 9])
@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_case_102_and_105_logprobs_do_not_depend_on_blocks_or_chunks(length, chunk):
    prompt = [(7 * i) % 40 for i in range(length)]
    params = GREEDY.with_(prompt_logprobs=0, logprobs=1, max_tokens=3)
    output = ask(tiny_engine(max_prefill_chunk=chunk), prompt, params)
    tokens = prompt + output.outputs[0].token_ids
    truth = torch.log_softmax(reference_logits(tiny_model(), tokens), -1)
    scored = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    assert len(scored) == length + 2
    for position, entry in enumerate(scored, start=1):
        token = tokens[position]
        assert entry[token].logprob == pytest.approx(truth[position - 1, token].item(), abs=1e-4)
    total = sum(e[t].logprob for e, t in zip(scored[-3:], tokens[-3:], strict=True))
    assert output.outputs[0].cumulative_logprob == pytest.approx(total)


def test_prompt_logprobs_survive_a_preemption_in_the_middle():
    prompt = [(3 * i) % 40 for i in range(14)]
    params = GREEDY.with_(prompt_logprobs=0)
    engine = tiny_engine(max_num_batched_tokens=5)
    engine.add_request("x", prompt, params)
    for _ in range(2):
        step_checked(engine)
    (request,) = engine.scheduler.running
    engine.scheduler._preempt(request, engine.scheduler.schedule())
    assert request.num_computed_tokens == 0 and request.num_scored_tokens == 11
    scored = run_engine(engine)["x"].prompt_logprobs
    whole = ask(tiny_engine(), prompt, params).prompt_logprobs
    assert len(scored) == 14
    for got, expected in zip(scored[1:], whole[1:], strict=True):
        (token,) = expected
        assert got[token].logprob == pytest.approx(expected[token].logprob, abs=1e-4)


def test_case_103_a_masked_token_has_a_finite_logprob_or_minus_infinity():
    params = GREEDY.with_(logit_bias=dict.fromkeys(range(39), -1e30), logprobs=-1, max_tokens=1)
    (answer,) = ask(tiny_engine(), [1], params).outputs
    assert answer.token_ids == [39]
    assert len(answer.logprobs[0]) == 40
    assert all(isinstance(entry.logprob, float) for entry in answer.logprobs[0].values())


# -- outputs


def test_case_069_deltas_join_and_each_sample_ends_once():

    params = SamplingParams(n=2, max_tokens=5, seed=3, output_kind=OutputKind.DELTA)
    engine = tiny_engine(eos=(3, 4, 5, 6, 7))
    engine.add_request("x", [1, 2], params)
    pieces, ends = {0: [], 1: []}, []
    while engine.has_unfinished_requests:
        for output in step_checked(engine):
            for answer in output.outputs:
                pieces[answer.index] += answer.token_ids
                ends += [answer.index] if answer.finished else []
    engine = tiny_engine(eos=(3, 4, 5, 6, 7))
    whole = ask(engine, [1, 2], params.with_(output_kind=OutputKind.CUMULATIVE))
    assert [pieces[0], pieces[1]] == [answer.token_ids for answer in whole.outputs]
    assert sorted(ends) == [0, 1]


def test_metrics_on_a_clock_that_ticks():
    ticks = itertools.count()
    from types import SimpleNamespace

    from minifer.config import EngineConfig
    from minifer.engine import Engine

    loaded = SimpleNamespace(
        model=tiny_model(),
        config=tiny_config(),
        tokenizer=None,
        eos_token_ids=(),
        generation_defaults={},
    )
    config = EngineConfig(block_size=4, num_kv_blocks=8)
    engine = Engine.from_loaded(loaded, config, clock=lambda: float(next(ticks)))
    metrics = ask(engine, [1, 2], GREEDY.with_(max_tokens=3)).metrics
    assert 0 < metrics.queue_time <= metrics.ttft
    assert metrics.tpot == (metrics.last_token_time - metrics.first_token_time) / 2
    assert metrics.finished_time >= metrics.last_token_time
    assert metrics.num_output_tokens == 3


def test_num_cached_tokens_is_the_hit_of_the_first_admission():
    engine = tiny_engine()
    assert ask(engine, list(range(12)), GREEDY).num_cached_tokens == 0
    assert ask(engine, list(range(12)), GREEDY).num_cached_tokens == 8


def test_a_request_without_a_seed_takes_one_from_the_engine():
    params = SamplingParams(temperature=1.5, max_tokens=8)
    runs = []
    for seed in (0, 0, 1):
        engine = tiny_engine(seed=seed)
        first, second = ask(engine, [1], params, "a"), ask(engine, [1], params, "b")
        runs.append((first.outputs[0].token_ids, second.outputs[0].token_ids))
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]


def test_events_tell_the_life_of_a_request():
    sink = ListSink()
    engine = tiny_engine(sinks=[sink])
    ask(engine, list(range(6)), GREEDY.with_(max_tokens=2))
    names = [event.name for event in sink.of("x")]
    assert names[0] == "request.admitted"
    assert names[-2:] == ["request.finished", "kv.block_freed"]
    for expected in ("kv.block_allocated", "request.scheduled", "token.sampled"):
        assert expected in names
    stages = [e.name for e in sink.events if e.name.startswith("step.")]
    assert stages[:6] == [
        "step.started",
        "step.scheduled",
        "step.prepared",
        "step.forward",
        "step.sampled",
        "step.postprocessed",
    ]
    assert all(a.time <= b.time for a, b in itertools.pairwise(sink.events))


def test_close_aborts_what_is_left():
    with tiny_engine() as engine:
        engine.add_request("x", [1], GREEDY)
        step_checked(engine)
    check_engine(engine)
    assert not engine.has_unfinished_requests
