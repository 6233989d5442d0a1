"""Ctrl-C at any moment of a step: nothing wrong is kept, nobody waits for ever, replies stay."""

from __future__ import annotations

import pytest
from fakes import check_engine, step_checked, tiny_engine, tiny_model

from minifer.execution.reference import reference_generate
from minifer.postprocessing.hooks import HookVerdict
from minifer.request import SamplingParams

GREEDY = SamplingParams(max_tokens=8, temperature=0)

POINTS = [
    ("kv.allocate", 1),
    ("kv.allocate", 3),
    ("kv.count_lookup", 1),
    ("kv.pool.allocate", 1),
    ("scheduler.schedule", 1),
    ("kv.prepare", 1),
    ("runner.forward", 1),
    ("scheduler.advance", 1),
    ("kv.store", 1),
]


def interrupt_after(monkeypatch, engine, point, call):
    """Ctrl-C when a method of a part of the engine has done its work for the n-th time."""
    *parts, name = point.split(".")
    part = engine
    for attribute in parts:
        part = getattr(part, attribute)
    method, calls = getattr(part, name), 0

    def interrupted(*args, **kwargs):
        nonlocal calls
        result = method(*args, **kwargs)
        calls += 1
        if calls == call:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(part, name, interrupted)


@pytest.mark.parametrize("index", ["hash", "radix"])
@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize(("point", "call"), POINTS)
def test_a_step_can_be_interrupted_anywhere(monkeypatch, point, call, steps, index):
    engine = tiny_engine(prefix_index=index, num_kv_blocks=10, debug=False)
    prompts = {"x": list(range(12)), "y": list(range(12))[::-1]}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, GREEDY)
    for _ in range(steps):
        step_checked(engine)
    prompts["w"] = [5, *range(20)]
    engine.add_request("w", prompts["w"], GREEDY)
    interrupt_after(monkeypatch, engine, point, call)
    interrupted = False
    last = {}
    while engine.has_unfinished_requests:
        try:
            last.update((output.request_id, output) for output in engine.step())
        except KeyboardInterrupt:
            interrupted = True
            monkeypatch.undo()
            check_engine(engine)
            prompts["z"] = prompts["y"]  # must not hit what was never computed
            engine.add_request("z", prompts["z"], GREEDY)
            engine.abort("y")
            del prompts["y"]
        check_engine(engine)
    assert interrupted
    for name, ids in prompts.items():
        assert last[name].outputs[0].token_ids == reference_generate(tiny_model(), ids, 8)


class CtrlC:
    """Interrupted while it judges the n-th token."""

    def __init__(self, n):
        self.n = n

    def on_token(self, token_id, text):
        self.n -= 1
        if self.n == 0:
            raise KeyboardInterrupt
        return HookVerdict(text)

    def on_finish(self, text):
        return text


@pytest.mark.parametrize("n", [1, 3, 8])
def test_a_reply_that_is_interrupted_ends_and_no_other(n):
    """The second of three, in the middle of its token: the one after it has not got its own yet."""
    engine = tiny_engine()
    prompts = {name: [i, *range(9)] for i, name in enumerate("abc")}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, GREEDY, hooks=[CtrlC(n)] if name == "b" else [])
    last = {}
    interrupted = 0
    while engine.has_unfinished_requests:
        try:
            last.update((output.request_id, output) for output in step_checked(engine))
        except KeyboardInterrupt:
            interrupted += 1
            check_engine(engine)
    assert interrupted == 1
    assert last["b"].outputs[0].finish_reason == "error"
    assert last["b"].outputs[0].stop_reason == "KeyboardInterrupt"
    for name in "ac":
        expected = reference_generate(tiny_model(), prompts[name], 8)
        assert last[name].outputs[0].token_ids == expected
        assert last[name].outputs[0].finish_reason == "length"


def test_what_an_interrupted_step_had_to_say_is_said_later(monkeypatch):
    """Ctrl-C after the replies were written: they come with the next step, or end with `abort`."""
    engine = tiny_engine()
    for name in "ab":
        engine.add_request(name, [3, 1, 4], GREEDY.with_(max_tokens=1))
    interrupt_after(monkeypatch, engine, "kv.store", 1)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.has_unfinished_requests
    with pytest.raises(ValueError, match="request_id must be new"):
        engine.add_request("a", [3, 1, 4], GREEDY)
    assert engine.abort("b") is None  # it was done
    (output,) = step_checked(engine)
    assert (output.request_id, output.finished) == ("a", True)
    assert not engine.has_unfinished_requests
    engine.add_request("b", [3, 1, 4], GREEDY)


@pytest.mark.parametrize("point", ["allocate", "store"])
def test_a_fault_that_leaves_a_step_leaves_the_books_in_order(monkeypatch, point):
    engine, prompt = tiny_engine(), list(range(12))
    engine.add_request("x", prompt, GREEDY)
    part = engine.kv
    method = getattr(part, point)

    def broken(*args, **kwargs):
        method(*args, **kwargs)
        raise MemoryError

    monkeypatch.setattr(part, point, broken)
    with pytest.raises(MemoryError):
        engine.step()
    monkeypatch.undo()
    check_engine(engine)
    last = {o.request_id: o for _ in range(12) for o in step_checked(engine)}
    assert last["x"].outputs[0].token_ids == reference_generate(tiny_model(), prompt, 8)


def test_wishes_that_leave_no_token_cost_nobody_the_prefix():
    """It is the caller's mistake: the blocks it shares hold sound numbers."""
    engine, prompt = tiny_engine(), list(range(12))
    engine.add_request("x", prompt, GREEDY)
    while engine.has_unfinished_requests:
        engine.step()
    impossible = {"allowed_token_ids": [5], "min_tokens": 2, "stop_token_ids": [5]}
    engine.add_request("y", prompt, GREEDY.with_(**impossible))
    (output,) = step_checked(engine)
    assert output.outputs[0].finish_reason == "error"
    engine.add_request("z", prompt, GREEDY)
    (output,) = step_checked(engine)
    assert output.num_cached_tokens == 8


class CopiedOnce:
    """A hook that can be copied while the request is admitted, and not later."""

    locked = False

    def __deepcopy__(self, memo):
        if self.locked:
            raise RuntimeError("in use")
        return self

    def on_token(self, token_id, text):
        return HookVerdict(text)

    def on_finish(self, text):
        return text


def test_hooks_of_n_sequences_are_copied_at_the_door():
    engine, hook = tiny_engine(), CopiedOnce()
    engine.add_request("x", [1, 2], SamplingParams(n=3, max_tokens=2, seed=0), hooks=[hook])
    hook.locked = True
    last = {o.request_id: o for _ in range(3) for o in step_checked(engine)}
    assert [c.finish_reason for c in last["x"].outputs] == ["length"] * 3
