"""What the figures of lecture 14 draw, against laws by hand, exact counts and the lab's files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from minifer.course import example
from minifer.course.pictures import closing
from minifer.course.pictures.scaling_data import (
    BUDGETS,
    band,
    cheapest,
    exponent_band,
    generated,
    iso_flop,
    iso_parameter,
    lab_curves,
    lab_points,
    lab_results,
    line_fit,
    measured_depths,
    resampled,
    serving,
    worth,
)
from minifer.events import STAGES
from minifer.parcae.lab.laws.isoflop import by_budget
from minifer.perf.devices import DEVICES

H100 = DEVICES["H100-SXM"]
RESULTS = Path(__file__).resolve().parents[2] / "lectures" / "results"


def test_lab_results_are_the_committed_ones() -> None:
    file = json.loads((RESULTS / "parcae_laws.json").read_text(encoding="utf-8"))
    assert lab_results("parcae_laws") == file
    assert [p.loss for p in lab_points()] == [p["loss"] for p in file["isoflop"]["points"]]
    assert [list(c.losses) for c in lab_curves()] == [
        c["losses"] for c in file["test_time"]["curves"]
    ]
    with pytest.raises(FileNotFoundError, match="no_such"):
        lab_results("no_such")


def test_the_analysis_of_the_reloaded_points_is_the_files() -> None:
    file = lab_results("parcae_laws")["isoflop"]["budgets"]
    for mine, stored in zip(by_budget(lab_points()), file, strict=True):
        assert mine.mean == pytest.approx(stored["mean"], abs=1e-5)
        assert mine.spread == pytest.approx(stored["spread"], abs=1e-4)


def test_equal_tokens_fall_and_equal_flops_have_a_valley() -> None:
    mus = range(1, 13)
    falling = iso_parameter("parcae-140m", mus, 11.2e9)
    assert falling == sorted(falling, reverse=True)
    valley = iso_flop("parcae-140m", mus, 4e18)
    assert 0 < valley.index(min(valley)) < 11


def test_without_noise_the_protocol_finds_the_exponent_exactly() -> None:
    for truth in (0.2, 0.4):
        experiment = generated(truth, 0.0, seed=0)
        assert experiment.law().exponent == pytest.approx(truth, abs=1e-9)
        ratio = BUDGETS[-1] / BUDGETS[0]
        assert experiment.minima()[-1] == pytest.approx(2 * ratio**truth)


def test_a_fit_without_logarithms_finds_an_exact_law_too() -> None:
    x = [1.0, 2.0, 4.0, 8.0]
    assert line_fit(x, [3 * value**0.4 for value in x]) == pytest.approx(0.4, abs=1e-3)


def test_resampling_draws_with_replacement_and_repeats_itself() -> None:
    draws = resampled([1, 2, 3], 50, seed=4)
    assert draws == resampled([1, 2, 3], 50, seed=4)
    assert {len(draw) for draw in draws} == {3}
    assert any(len(set(draw)) < 3 for draw in draws)
    assert band([float(i) for i in range(101)], 0.9) == (5.0, 95.0)


def test_an_exact_law_has_a_band_without_width() -> None:
    low, high = exponent_band([(x, 2 * x**0.3) for x in (1.0, 3.0, 9.0, 20.0)])
    assert low == pytest.approx(0.3) and high == pytest.approx(0.3)


def test_worth_of_a_loop_by_hand() -> None:
    """parcae-140m: 7,079,520 numbers a layer, 2 + 2 + 2 of them; B and the readout, D² each."""
    (one, eight) = worth("parcae-140m", (1, 8))
    assert (one.quality, one.read, one.flops) == (1.0, 1.0, 1.0)
    core, all_of_it = 14.16e6, 42.48e6 + 2 * 768**2
    assert eight.read == pytest.approx((all_of_it + 7 * core) / all_of_it, rel=1e-3)
    assert eight.flops == pytest.approx(eight.read, rel=1e-3)
    assert eight.quality == pytest.approx(1 + (8**0.46 - 1) * core / all_of_it, rel=1e-3)
    assert eight.resident == pytest.approx(1.0)


def test_a_resident_core_saves_weights_and_no_kv() -> None:
    (again,) = serving("parcae-140m", H100, [8], 512)
    (kept,) = serving("parcae-140m", H100, [8], 512, resident=True)
    assert again.kv == kept.kv == 20 * 2 * 768 * 2
    assert again.bytes - kept.bytes == pytest.approx(7 * 2 * 14.16e6, rel=1e-3)
    assert again.joules == pytest.approx(700 * again.seconds)


def test_the_cheapest_depth_is_the_best_one_that_is_paid_for() -> None:
    costs, losses = {1: 1.0, 2: 2.0, 4: 4.0}, {1: 3.0, 2: 2.0, 4: 2.0}
    assert cheapest(costs, losses, 0.5) is None
    assert cheapest(costs, losses, 1.0) == 1
    assert cheapest(costs, losses, 9.0) == 2  # of equals the fewer loops


def test_depths_that_were_not_timed_lie_on_the_line() -> None:
    losses, costs, (fixed, loop) = measured_depths()
    assert losses.keys() == costs.keys() == {1, 2, 3, 4, 6, 8, 12, 16}
    assert costs[16] == pytest.approx(fixed + 16 * loop)
    timed = lab_results("parcae_tradeoff")["tradeoff"][0]
    assert timed["name"] == "depth 8"
    assert costs[8] == 1e3 / timed["single"]["tokens_per_second"]


def test_the_engine_does_what_the_lecture_counts_by_hand() -> None:
    did = closing.counts()
    assert did.chunks == [(0, 16), (16, 20)]
    assert (did.steps, did.hits, did.computed) == (13, {"B": 16}, 75)
    assert did.kv_bytes == 75 * 2 * 4 * 6 * 16 * 4  # K and V, layers, heads, width, bytes
    assert did.draws == did.pieces == 27


def test_laps_of_a_run_are_its_steps() -> None:
    steps = closing.measure(example.TRIO, rounds=1)
    assert len(steps) == 13
    assert sum(step.features["tokens"] for step in steps) == 75
    assert sum(step.draws for step in steps) == 27
    assert sum(step.blocks for step in steps) == 4 + 3 + 3  # less the two that B found
    assert [step.stage for step in steps[:2]] == ["prefill", "prefill"]
    for step in steps:
        assert sum(step.stages().values()) == pytest.approx(sum(step.seconds.values()))


def test_prices_that_are_exact_predict_exactly() -> None:
    """Each lap costs 1 and, for each thing its time may depend on, 1 for each of it."""
    steps = []
    for requests, tokens, blocks in ((1, 1, 0), (2, 1, 1), (3, 4, 0), (2, 5, 3), (4, 2, 1)):
        batch = {str(i): (tokens, 9) for i in range(requests)}
        stage = "decode" if tokens == 1 else "prefill"
        step = closing.Step(batch, requests - 1, blocks, {}, stage)
        seconds = {
            lap: 1.0 + sum(step.features[name] for name in names)
            for lap, names in closing.LAPS.items()
        }
        steps.append(replace(step, seconds=seconds))
    prices = closing.price_list(steps)
    for step in steps:
        assert closing.priced(prices, step) == pytest.approx(step.seconds)
    found = closing.life("0", steps, prices)
    assert list(found) == list(STAGES)
    assert all(predicted == pytest.approx(measured) for predicted, measured in found.values())
