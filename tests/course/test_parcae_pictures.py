"""What the pictures of Parcae say, against counts by hand, closed forms and the slow twin."""

from __future__ import annotations

import math

import pytest
import torch

from minifer.course.microscope import life_of_token
from minifer.course.pictures import parcae_layers as layers
from minifer.course.pictures import parcae_serving as serving
from minifer.course.pictures import parcae_state as states
from minifer.loops import LoopConfig

SMALL = LoopConfig(prelude=1, core=2, coda=1)


def columns(policy: str) -> list[list[tuple[int, bool] | None]]:
    loop = LoopConfig(prelude=1, core=2, coda=1, kv_policy=policy)
    return layers.slot_table(loop, 3)


# -- layers and slots


def test_a_token_passes_prelude_the_core_again_and_again_and_coda() -> None:
    assert layers.runs(SMALL, 2) == [(0, None), (1, 0), (2, 0), (1, 1), (2, 1), (3, None)]
    assert len(layers.runs(LoopConfig(2, 2, 2), 8)) == 20


def test_the_slots_of_a_small_model_are_those_written_out_by_hand() -> None:
    once, last = [(0, True), None, None], [None, None, (7, True)]
    full = [[(1, True), (3, True), (5, True)], [(2, True), (4, True), (6, True)]]
    assert columns("full") == [once, *full, last]
    first = [[(1, True), (3, True), (3, False)], [(2, True), (4, True), (4, False)]]
    assert columns("first-2") == [once, *first, [None, None, (5, True)]]
    cyclic = [[(1, True), (3, True), (1, True)], [(2, True), (4, True), (2, True)]]
    assert columns("cyclic-2") == [once, *cyclic, [None, None, (5, True)]]
    terminal = [[(1, True)] * 3, [(2, True)] * 3]
    assert columns("terminal") == [once, *terminal, [None, None, (3, True)]]


# -- the state


def test_a_forced_radius_is_the_growth_in_the_end() -> None:
    found = states.forced_traces((0.5, 1.2), 40)
    assert found[0.5].growth() == pytest.approx(1, abs=1e-3)
    assert found[1.2].growth() == pytest.approx(1.2, abs=5e-3)


def test_injections_have_the_matrices_they_were_given() -> None:
    free = states.free_injection(torch.tensor([[0.5, 4.0], [0.0, 0.5]]))
    assert free.spectral_radius() == pytest.approx(0.5)
    assert free.retention().tolist() == [[0.5, 4.0], [0.0, 0.5]]
    kept, added = states.diagonal_injection([0.0, 1.0], [0.0, 0.0]).discretise()
    two = math.log(2)
    assert kept.tolist() == pytest.approx([0.5, math.exp(-two * math.e)])
    assert added.diag().tolist() == pytest.approx([two, two])


@pytest.mark.parametrize("push", [0, 2])
def test_a_push_moves_only_the_free_radius_above_1(push: float) -> None:
    found = states.pushed_states(push, 4)
    assert {kind: len(pushed.norms) for kind, pushed in found.items()} == dict.fromkeys(found, 5)
    assert found["diagonal"].rho < 1 == found["add"].rho
    assert (found["concat"].rho > 1) == (push > 0)


def test_the_norm_of_the_input_hides_how_long_it_is() -> None:
    small, large = (states.state_with_input(x, norm=True) for x in (1, 100))
    assert large == pytest.approx(small, rel=1e-3)
    small, large = (states.state_with_input(x, norm=False) for x in (1, 100))
    assert large > 5 * small


def test_the_gradient_at_the_start_dies_out_below_1_and_explodes_above() -> None:
    diagonal, concat = (states.start_gradient(k, 2, 16) for k in ("diagonal", "concat"))
    assert diagonal[1] and concat[1]
    assert concat[0] > 100 * diagonal[0]


# -- in the engine


def test_replies_of_mixed_depths_are_those_of_the_slow_twin() -> None:
    asks = {name: serving.Ask("Ab c", 3, depth) for name, depth in serving.DEPTHS.items()}
    served = serving.serve(asks)
    for name, ask in asks.items():
        answer = served.run.outputs[name].outputs[0]
        assert answer.token_ids == serving.greedy_alone(ask)
        assert answer.num_loops == [ask.num_loops] * 3


def test_applications_are_counted_as_by_hand() -> None:
    """A: two tokens of two loops. B: three tokens of one loop."""
    asks = {"A": serving.Ask("a", 2, 2), "B": serving.Ask("b", 3, 1)}
    lockstep = serving.serve(asks, loop_batching="lockstep")
    assert [(a.step, dict(a.loops)) for a in lockstep.applications] == [
        (1, {"A": 0, "B": 0}), (1, {"A": 1}), (2, {"A": 0, "B": 0}), (2, {"A": 1}), (3, {"B": 0}),
    ]  # fmt: skip
    continuous = serving.serve(asks, loop_batching="continuous")
    assert [(a.step, dict(a.loops)) for a in continuous.applications] == [
        (1, {"A": 0, "B": 0}), (2, {"A": 1, "B": 0}), (3, {"A": 0, "B": 0}), (4, {"A": 1}),
    ]  # fmt: skip
    assert (lockstep.steps, continuous.steps) == (3, 4)


def test_a_prefix_is_found_at_its_own_depth_only() -> None:
    prompt = "x" * 20
    asks = [serving.Ask(prompt, 2, loops) for loops in (2, 1, 2)]
    answers = serving.one_after_another(asks)
    assert [answer.num_cached_tokens for answer in answers] == [0, 0, 16]


def test_more_loops_than_one_are_worth_a_lot() -> None:
    bits = serving.bits_by_depth((1, 8), rows=4, length=64)
    assert bits[1] > bits[8] + 0.5


def test_the_figures_can_be_drawn() -> None:
    served = serving.serve({"A": serving.Ask("a", 2, 2)})
    figures = [
        layers.unrolled_figure(SMALL, 3, title="t"),
        layers.slots_figure(SMALL, 3, ("full", "terminal"), title="t"),
        states.norms_figure({"a": [1.0, 2.0]}, title="t", log_x=True),
        states.injection_view(1, 4),
        states.decay_figure(title="t"),
        serving.applications_figure({"lockstep": served}, title="t"),
        serving.exit_figure("ab", [2, 8], 8, title="t"),
        serving.depth_figure({1: 2.0, 2: 1.5}, title="t"),
    ]
    assert all(figure.axes for figure in figures)


def test_the_microscope_says_how_often_a_pass_applies_the_core() -> None:
    served = serving.serve({"A": serving.Ask("a", 3, 2), "B": serving.Ask("b", 3, 5)})
    frames = life_of_token(served.run, "A", 2).frames
    (forward,) = [frame.sentence for frame in frames if "forward pass" in frame.sentence]
    assert forward.endswith("It applies the core 5 times.")
