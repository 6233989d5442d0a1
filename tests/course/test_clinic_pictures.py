"""What the bug clinic's pictures say, on engines whose illness is known."""

from __future__ import annotations

import pytest

from minifer.course import example
from minifer.course.pictures import clinic, clinic_cases, clinic_data
from minifer.execution.reference import reference_logits
from minifer.faults.memory import off_by_one_length
from minifer.faults.numerics import unchecked_nan
from minifer.faults.scenes import QUESTIONS

TEXT = QUESTIONS[0]


@pytest.fixture(scope="module")
def well() -> clinic_data.Trace:
    return clinic_data.trace(TEXT, max_tokens=20)


def linear(count, is_bad):
    """The first bad place, by looking at all of them."""
    return next(place for place in range(count) if is_bad(place)), list(range(count))


def test_a_trace_holds_the_logits_of_every_token(well) -> None:
    loaded = example.tiny()
    ids = loaded.tokenizer.encode(TEXT) + well.tokens[:-1]
    truth = reference_logits(loaded.model, ids)[-20:]
    assert well.layers.shape == (20, loaded.config.num_layers, loaded.config.hidden_size)
    assert (well.logits - truth).abs().max() < 1e-3
    assert well.logits.argmax(-1).tolist() == well.tokens


def test_two_healthy_engines_do_not_differ(well) -> None:
    again = clinic_data.trace(TEXT, forced=well.tokens)
    assert clinic_data.gaps(well, again).max() == 0


@pytest.mark.parametrize(("layer", "after"), [(0, 3), (2, 11), (3, 0)])
def test_a_turned_key_is_found_in_its_layer_one_step_later(well, layer, after) -> None:
    ill = clinic_data.trace(TEXT, ill=clinic_data.turned_key(layer, after), forced=well.tokens)
    grid = clinic_data.health(clinic_data.gaps(well, ill))
    assert clinic_data.hunt(grid, linear)[0] == (after + 1, layer)


@pytest.mark.parametrize("layer", [0, 2])
def test_nan_spreads_from_its_layer_upwards(layer) -> None:
    healthy = clinic_data.trace(TEXT)
    sick = clinic_data.trace(TEXT, ill=lambda engine: unchecked_nan(engine, layer))
    grid = clinic_data.health(clinic_data.gaps(healthy, sick))
    assert [row.index("NaN") if "NaN" in row else None for row in grid] == [
        17 if place >= layer else None for place in range(5)
    ]


def test_the_prefill_reads_no_slot_too_many(well) -> None:
    ill = clinic_data.trace(TEXT, ill=off_by_one_length, forced=well.tokens)
    gaps = clinic_data.gaps(well, ill)
    assert gaps[:, 0].max() == 0
    assert gaps[-1, 1:].min() > 0


def test_what_lies_in_the_slot_decides() -> None:
    zeros, stale, four, sixteen, nan = clinic_data.slot_contents()
    assert zeros.kl < four.kl and stale.kl < four.kl < 100
    assert stale.changed < 5 < four.changed <= sixteen.changed <= nan.changed
    assert nan.kl is None


def test_a_scene_shows_both_engines() -> None:
    (case,) = clinic_cases.cases(["salt-ignored"])
    assert "0 tokens found" in case.healthy and "80 tokens found" in case.broken
    assert case.text_differs and case.title in clinic.gallery_html([case])


def test_what_is_common_is_grey_and_html_is_escaped() -> None:
    case = clinic_cases.Case("x", "A <title>", "a<b", "a<c")
    html = clinic.gallery_html([case])
    assert "A &lt;title&gt;" in html and "a&lt;</span>b" in html and "a&lt;</span>c" in html


def test_the_guard_s_limits_are_met_from_both_sides() -> None:
    assert clinic_cases.tripped_at("ha " * 21) is None
    assert clinic_cases.tripped_at("ha " * 30) == 64
    assert clinic_cases.tripped_at("=" * 1023) is None
    assert clinic_cases.tripped_at("=" * 2000) == 1024


def test_lengths_stay_below_the_limit_and_loops_are_at_it() -> None:
    lengths = clinic_cases.completion_lengths(0.01, 10_000, limit=8192)
    assert lengths.max() == 8192 and 60 < (lengths == 8192).sum() < 140
    assert 230 < sorted(lengths)[5000] < 270


def test_every_picture_is_drawn(well) -> None:
    ill = clinic_data.trace(TEXT, ill=off_by_one_length, forced=well.tokens)
    differences = clinic_data.gaps(well, ill)
    grid = clinic_data.health(differences)
    found, looked = clinic_data.hunt(grid, linear)
    figures = [
        clinic.health_figure(grid, title="t"),
        clinic.health_figure(grid, title="t", looked=looked[:3], found=found),
        clinic.gap_figure(differences, title="t"),
        clinic.slot_figure(clinic_data.slot_contents(8), title="t"),
        clinic.chance_figure(title="t"),
        clinic.lengths_figure({"a": clinic_cases.completion_lengths(0.0, 1000)}, title="t"),
        clinic.alarms_figure({"fault": ["b"]}, ["a", "b"], title="t"),
    ]
    for figure in figures:
        figure.canvas.draw()
        assert figure.axes[0].get_title(loc="left") == "t"
