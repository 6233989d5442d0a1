"""What the door lets through of a loop model: depths, and prompts that must be computed at once."""

from __future__ import annotations

import pytest

from minifer.loops import LoopConfig
from minifer.request import Request, SamplingParams
from minifer.scheduling.admission import Limits, admit


def limits(budget: int | None = 8, **loop: object) -> Limits:
    sizes = {"prelude": 1, "core": 1, "coda": 1, "mean_recurrence": 4, **loop}
    return Limits(40, 64, 64, 4, budget, LoopConfig(**sizes))  # type: ignore[arg-type]


def ask(limits: Limits, num_tokens: int = 3, **wishes: object) -> Request:
    params = SamplingParams(max_tokens=2, **wishes)  # type: ignore[arg-type]
    return admit("a", None, [1] * num_tokens, params, limits, seed=0)


@pytest.mark.parametrize(
    ("deepest", "depth"),
    [(0, 4), (9, 4), (4, 4), (3, 3)],
    ids=["not set", "deeper", "the mean", "shallower"],
)
def test_who_asks_for_no_depth_gets_the_mean_if_there_is_kv_for_it(deepest: int, depth: int):
    assert ask(limits(max_num_loops=deepest)).num_loops == depth


@pytest.mark.parametrize("deepest", [3, 9])
def test_every_depth_up_to_the_deepest_is_let_through_and_no_other(deepest: int):
    for depth in (1, deepest):
        assert ask(limits(max_num_loops=deepest), num_loops=depth).num_loops == depth
    message = rf"num_loops must be at most max_num_loops \({deepest}\), got {deepest + 1}"
    with pytest.raises(ValueError, match=message):
        ask(limits(max_num_loops=deepest), num_loops=deepest + 1)


@pytest.mark.parametrize("policy", ["terminal", "cyclic-2"])
def test_a_prompt_fits_into_one_step_where_kv_is_overwritten(policy: str):
    assert ask(limits(kv_policy=policy), 8).loop_kv_policy == policy
    with pytest.raises(ValueError, match=rf"the prompt has 9 tokens; with loop_kv_policy={policy}"):
        ask(limits(kv_policy=policy), 9)
    assert ask(limits(None, kv_policy=policy), 60).num_prompt_tokens == 60


@pytest.mark.parametrize("policy", ["full", "first-2"])
def test_other_prompts_may_be_cut(policy: str):
    assert ask(limits(kv_policy=policy), 60).loop_kv_policy == policy


def test_a_model_that_does_not_loop_has_no_depth():
    plain = Limits(40, 64, 64, 4)
    assert ask(plain).num_loops is None
    for name, value in {"num_loops": 1, "exit_threshold": 0.0}.items():
        with pytest.raises(ValueError, match=rf"{name} needs a loop model.*got {value}"):
            ask(plain, **{name: value})
