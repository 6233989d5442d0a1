"""What the pictures of rooflines draw: points on the roof, batches, and the steps of a run."""

from __future__ import annotations

from itertools import pairwise

import pytest

from minifer.course import example
from minifer.course.pictures import electricity
from minifer.course.pictures.roofline import (
    attainable,
    batch_rows,
    engine_steps,
    floor_intensity,
    limit_figure,
    lines,
    operation_points,
    powers_of_two,
    roofline,
    step_alt,
    step_bars,
    step_points,
    step_view,
)
from minifer.course.shapes import LLAMA_8B
from minifer.perf.costs import ElementBytes, OpCost, decode_cost, step_cost
from minifer.perf.devices import DEVICES, Device
from minifer.perf.steps import StepGroup

H100 = DEVICES["H100-SXM"]


def device(peak: float, bandwidth: float, memory: float = 1e12) -> Device:
    return Device("d", peak, bandwidth, memory, 1, 100, "data sheet", "2026-01")


def test_the_roof_rises_with_bandwidth_and_ends_at_the_peak() -> None:
    d = device(100, 10)
    assert [attainable(d, x) for x in (1, 5, 10, 20)] == [10, 50, 100, 100]


def test_operations_stand_on_the_roof_and_what_moves_nothing_is_left_out() -> None:
    ops = [OpCost("a", 20, 10), OpCost("softmax", 5), OpCost("look-up", 0, 4), OpCost("b", 900, 9)]
    points = operation_points(ops, device(100, 10), "decode")
    assert [(p.name, p.intensity, p.rate) for p in points] == [("a", 2, 20), ("b", 100, 100)]


def test_a_step_stands_where_its_fastest_pass_put_it() -> None:
    cost = OpCost("total", 60, 20, 10, 1000)
    steps = StepGroup("decode 2 × 8", "decode", 2, 8, cost, (5.0, 3.0), (6.0, 4.0))
    (point,) = step_points([steps])
    assert (point.intensity, point.rate, point.kind) == (2, 20, "decode")
    assert steps.floor(device(100, 10)) == 3.0  # 30 bytes at 10 a second


def test_batch_rows_of_llama_8b_on_an_h100() -> None:
    """15.0 GB of weights and 131,072 bytes of KV a token, over 3.35 TB/s; 700 W."""
    one, many = batch_rows(LLAMA_8B, H100, [1, 64], context=1024)
    weights = 2 * (8_030_261_248 - 128_256 * 4096)
    for row, batch in ((one, 1), (many, 64)):
        read = weights + batch * 2 * 4096 + batch * (1024 + 1) * 131_072
        assert row.seconds == pytest.approx(read / 3.35e12, rel=1e-9)
        assert row.tokens_per_second == pytest.approx(batch / row.seconds)
        assert row.joules_per_token == pytest.approx(700 * row.seconds / batch)
        assert row.fits
    assert not batch_rows(LLAMA_8B, H100, [64], context=16_384)[0].fits  # 16 GB and 137 GB


def test_smaller_elements_fit_more() -> None:
    eight = ElementBytes(weight=1, kv=1)
    wide, narrow = (
        batch_rows(LLAMA_8B, H100, [512], 1024, element)[0] for element in (None, eight)
    )
    assert (wide.fits, narrow.fits) == (False, True)
    assert narrow.seconds < wide.seconds


def test_steps_of_a_run_are_those_the_engine_computed() -> None:
    run = example.run()
    element = ElementBytes(4, 4, 4)
    steps = engine_steps(run.events, example.tiny().config, H100, element)
    assert [entry.step for entry in steps] == list(range(1, len(run.steps) + 1))
    for entry, (step, logits) in zip(steps, run.steps, strict=True):
        starts = step.query_start
        queries = [end - start for start, end in pairwise(starts)]
        assert sorted(entry.batch) == sorted(zip(queries, step.seq_lens, strict=True))
        assert (entry.kind == "decode") == all(query == 1 for query in queries)
        assert entry.limit == "memory"
        rows = len(logits)
        cost = step_cost(
            example.tiny().config, entry.batch, num_logits=rows, element=element
        ).total()
        assert entry.cost == cost


def test_intensity_of_a_step_leaves_activations_out() -> None:
    assert floor_intensity(OpCost("total", 30, 2, 1, 100)) == 10


def test_powers_of_two() -> None:
    assert powers_of_two(1, 256) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert powers_of_two(16, 100) == [16, 32, 64]


def test_everything_can_be_drawn() -> None:
    cost = decode_cost(LLAMA_8B, 1, 64)
    steps = StepGroup("decode 1 × 64", "decode", 1, 64, cost.total(), (0.01,), (0.02,))
    figure = limit_figure(H100, [steps], {"decode 1 × 64": cost.ops})
    left, right = figure.axes
    assert "FLOPs a byte" in left.get_xlabel() and "seconds" in right.get_xlabel()
    assert right.get_yticklabels()[0].get_text() == "decode 1 × 64"
    points = operation_points(cost.ops, H100, "decode")
    assert roofline(H100, points, title="t").axes[0].get_title(loc="left") == "t"
    drawn = lines({"a": ([1, 2], [3, 4])}, title="t", x="x (u)", y="y (u)", marks={2: "here"})
    assert list(drawn.axes[0].lines[0].get_ydata()) == [3, 4]
    run = engine_steps(example.run().events, example.tiny().config, H100, ElementBytes(4, 4, 4))
    assert len(step_bars(run, title="t").axes[0].patches) == len(run)
    title = step_view(LLAMA_8B, H100)(64, 1024).axes[0].get_title(loc="left")
    assert "64 × 1,024 tokens: 7.0 ms a step" in title


def test_the_lectures_curves_end_where_memory_does() -> None:
    curves = electricity.throughput(LLAMA_8B, H100)
    assert {context: batches[-1] for context, (batches, _) in curves.items()} == {
        1024: 256,
        8192: 32,
        32_768: 8,
    }
    for batches, rates in curves.values():
        assert batches == powers_of_two(1, batches[-1]) and rates == sorted(rates)


def test_the_lectures_figures_hold_what_their_alt_texts_say() -> None:
    labels = [t.get_text() for t in electricity.draw_products(LLAMA_8B, H100).axes[0].texts]
    assert {"1 row", "256 rows", "4096 rows"} <= set(labels)
    drawn = electricity.draw_intensity(LLAMA_8B, H100).axes[0].lines
    product, prompt, decode = (list(line.get_ydata()) for line in drawn[:3])
    assert product[-1] > prompt[-1] > H100.ridge_point > max(product[0], prompt[0])
    assert max(decode) < 4 < 1.01 * min(decode)
    rates = {size: 1e9 / size for size in electricity.CACHE_MIB}
    axes = electricity.draw_caches(rates, {"tiny": example.tiny().config}).axes[0]
    assert list(axes.lines[0].get_xdata()) == list(electricity.CACHE_MIB)
    assert axes.lines[1].get_xdata()[0] == pytest.approx(5.28, abs=0.01)
    assert len(electricity.draw_throughput({8: ([1, 2], [3.0, 4.0])}).axes[0].lines) == 1


def test_the_widgets_words_say_what_it_draws() -> None:
    words = step_alt(LLAMA_8B, H100, 1024, 8192)
    assert "does NOT fit one chip" in words and "1024 × 8,192 tokens" in words
    assert "fits" in step_alt(LLAMA_8B, H100, 1, 1024)
