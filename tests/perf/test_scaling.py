"""Exponents are found, and preparation looks at who runs, never at who waits.

Nothing here measures time: what stands for the cost is how often Python functions are called.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections import Counter

import pytest

from minifer.config import POLICIES
from minifer.perf.scaling import StepProbe, fit_power, plain_tokens
from minifer.weights.resolve import load_model

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


@pytest.mark.parametrize("exponent", [-0.5, 0.0, 1.0, 1.7])
def test_the_exponent_of_a_power_is_found(exponent):
    fit = fit_power(SIZES, [3e-5 * size**exponent for size in SIZES])
    assert fit.exponent == pytest.approx(exponent, abs=1e-12)
    assert fit.tail == pytest.approx(exponent, abs=1e-12)
    assert fit.error == pytest.approx(0, abs=1e-7)


def test_three_points_by_hand():
    # log2: (0, 0), (1, 1), (2, 3): slope 3/2, residuals 1/6, -1/3, 1/6, so error = sqrt(1/6 / 2)
    fit = fit_power((1, 2, 4), (1, 2, 8))
    assert fit.exponent == pytest.approx(1.5)
    assert fit.error == pytest.approx(math.sqrt(1 / 12))
    assert fit.tail == pytest.approx(2)


def test_the_standard_error_covers_what_noise_does():
    draw = random.Random(0)
    inside = 0
    for _ in range(400):
        costs = [size * math.exp(draw.gauss(0, 0.1)) for size in SIZES]
        fit = fit_power(SIZES, costs)
        inside += abs(fit.exponent - 1) < 2 * fit.error
    assert 0.85 < inside / 400 < 0.97  # Student's t with 6 degrees of freedom: 0.91


def test_a_constant_part_shows_in_the_larger_half():
    fit = fit_power(SIZES, [50 + size for size in SIZES])
    assert fit.exponent < fit.tail < 1


@pytest.mark.parametrize(
    ("sizes", "costs", "why"),
    [
        ((1, 2), (1, 2), "at least 3 sizes"),
        ((1, 2, 2), (1, 2, 2), "at least 3 sizes"),
        ((1, 2, 3), (1, 2), "at least 3 sizes"),
        ((0, 1, 2), (1, 2, 3), "above 0"),
        ((1, 2, 3), (1, 0, 3), "above 0"),
    ],
)
def test_what_cannot_be_fitted_is_refused(sizes, costs, why):
    with pytest.raises(ValueError, match=why):
        fit_power(sizes, costs)


@pytest.fixture(scope="module")
def loaded():
    return load_model("minifer-tiny")


def calls(step) -> Counter[str]:
    """How often each of minifer's Python functions is entered."""
    found: Counter[str] = Counter()

    def watch(frame, event, _):
        code = frame.f_code
        if event == "call" and "minifer" in code.co_filename:
            found[code.co_qualname] += 1

    sys.setprofile(watch)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found


def calls_of(loaded, **probe) -> Counter[str]:
    """Of a step in which nobody begins or fills a block."""
    made = StepProbe(loaded, context=30, steps=3, **probe)
    made.step()
    found = calls(made.engine.step)
    assert len(made.engine.scheduler.running) == probe["batch"]
    assert len(made.engine.scheduler.waiting) == probe.get("waiting", 0)
    made.engine.close()
    return found


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_does_not_touch_the_requests_that_wait(loaded, policy, blocked):
    """`lpm` gives up looking at more than 128; see the next test for fewer."""
    few = 200 if policy == "lpm" and blocked else 10
    some = calls_of(loaded, batch=2, waiting=few, policy=policy, blocked=blocked)
    many = calls_of(loaded, batch=2, waiting=2000, policy=policy, blocked=blocked)
    assert some == many
    assert sum(some.values()) > 100


def test_longest_prefix_first_looks_up_whoever_waits_for_memory_and_nobody_for_a_seat(loaded):
    def lookups(waiting, blocked):
        found = calls_of(loaded, batch=2, waiting=waiting, policy="lpm", blocked=blocked)
        return found["KVCacheManager.find_cached"]

    assert lookups(100, False) == 0
    assert lookups(100, True) - lookups(50, True) == 50
    assert lookups(128, True) > 128 > lookups(129, True)


def test_a_step_costs_no_more_than_linearly_in_the_requests_that_run(loaded):
    sizes = (8, 16, 32, 64)
    totals = [sum(calls_of(loaded, batch=size).values()) for size in sizes]
    slopes = [(b - a) / (n - m) for (m, n), (a, b) in zip(pairs(sizes), pairs(totals), strict=True)]
    assert max(slopes) <= 1.1 * min(slopes)  # calls a request: the same at every size
    assert fit_power(sizes, totals).exponent < 1.05


def test_a_step_does_not_cost_more_calls_with_longer_contexts(loaded):
    def total(context):
        made = StepProbe(loaded, batch=4, context=context, steps=3)
        made.step()
        return calls(made.engine.step)

    assert total(30) == total(126)


def pairs(values):
    return list(itertools.pairwise(values))


def test_a_step_is_split_into_stages_that_add_up(loaded):
    probe = StepProbe(loaded, batch=3, context=20, steps=4)
    step = probe.step()
    assert all(step[stage] > 0 for stage in ("schedule", "prepare", "batch", "sample"))
    assert step["model"] == 0
    taken = probe.take(2)
    assert taken["preparation"] <= taken["seconds"]
    request = probe.engine.scheduler.running[0]
    assert request.num_output_tokens == 4  # the prefill's and three steps'
    assert len(set(request.token_ids[-4:])) > 1  # silent replies do not repeat themselves


def test_with_the_model_itself_a_step_computes(loaded):
    probe = StepProbe(loaded, batch=2, context=20, steps=2, compute=True)
    step = probe.step()
    assert step["model"] > 0
    assert step["batch"] == 0
    assert probe.engine.scheduler.running[0].num_computed_tokens == 21


def test_replies_are_made_of_plain_text(loaded):
    tokens = plain_tokens(loaded)
    assert tokens
    assert all(loaded.tokenizer.decode([token]).isascii() for token in tokens)
