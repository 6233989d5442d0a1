"""What the pictures of prefill say: shares of a step from the engine, costs by hand."""

from __future__ import annotations

import pytest

from minifer.course import example
from minifer.course.pictures.packed_prefill import Part, chunk_cost, parts_of
from minifer.course.shapes import LLAMA_8B
from minifer.perf.costs import attended_pairs, step_cost
from minifer.perf.devices import DEVICES

H100 = DEVICES["H100-SXM"]


def test_parts_are_the_shares_of_the_engines_steps() -> None:
    run = example.run()
    shares = [parts_of(step) for step, _ in run.steps]
    assert [sum(p.queries for p in parts) for parts in shares] == [
        step.query_start[-1] for step, _ in run.steps
    ]
    assert shares[1] == [Part("A", 4, 20), Part("B", 12, 28)]
    assert [part.computed for part in shares[1]] == [16, 16]


@pytest.mark.parametrize(("queries", "seen"), [(1, 1), (3, 13), (12, 28)])
def test_pairs_are_those_of_the_cost_model(queries: int, seen: int) -> None:
    assert Part("A", queries, seen).pairs == attended_pairs(queries, seen)


def test_the_cost_of_chunks_is_the_sum_of_its_steps_by_hand() -> None:
    model = LLAMA_8B
    cost = chunk_cost(model, H100, 1000, 400, decoding=2, context=10)
    steps = [
        step_cost(model, [(n, end), (1, 10), (1, 10)], num_logits=rows).total()
        for n, end, rows in ((400, 400, 2), (400, 800, 2), (200, 1000, 3))
    ]
    seconds = [H100.seconds(step.flops, step.bytes) for step in steps]
    assert cost.steps == 3
    assert cost.ttft == pytest.approx(sum(seconds)) and cost.slowest == max(seconds)
    written = 1000  # once
    per_token = 2 * 32 * 8 * 128 * 2  # bytes: K and V, layers, heads, width, bfloat16
    assert cost.kv_bytes == per_token * (written + 400 + 800 + 1000)
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        chunk_cost(model, H100, 10, 0)
