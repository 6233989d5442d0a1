"""Tests of exercises 00: what a summary says is what the engine did."""

from __future__ import annotations

import pytest

from minifer.course import example
from minifer.course.grading import compare, points, probe, unchanged
from minifer.events import Event


def trace(*, budget: int = 16) -> tuple[list[Event], dict[str, dict[str, int]]]:
    """Events of the book's three requests, and the truth from the outputs and the steps."""
    run = example.run(max_num_batched_tokens=budget)
    truth = {}
    for name, output in run.outputs.items():
        drawn = len(output.outputs[0].token_ids)
        prompt = len(output.prompt_token_ids or ())
        truth[name] = {
            "first_step": next(
                number
                for number, (step, _) in enumerate(run.steps, start=1)
                if name in [entry.request.request_id for entry in step.scheduled]
            ),
            "num_prefill_tokens": prompt - output.num_cached_tokens,
            "num_cached_tokens": output.num_cached_tokens,
            "num_output_tokens": drawn,
        }
    return run.events, truth


@points("0.1", 2)
@pytest.mark.parametrize("budget", [64, 16, 5])
def test_ex00_1_agrees_with_the_engine(target, budget):
    events, truth = trace(budget=budget)
    for name, expected in truth.items():
        tried = f"summarize(events of A, B and C under a budget of {budget}, {name!r})"
        with unchanged(tried, events=events):
            got = target.summarize(events, name)
        compare(got, expected, tried)


@points("0.1", 1)
def test_ex00_1_refuses_a_request_that_never_ran(target):
    with pytest.raises(ValueError):
        target.summarize(trace()[0], "Z")


@probe("0.1")
def probe_trio(target):
    events, _ = trace()
    return [target.summarize(events, name) for name in "ABC"]
