"""Lecture 0's pictures: text is shown when it is certain, and a floor is a floor."""

from __future__ import annotations

import random

import pytest

from minifer.course import example
from minifer.course.pictures import life
from minifer.perf.costs import num_parameters
from minifer.perf.devices import DEVICES


def test_text_is_shown_as_soon_as_it_is_certain_and_no_sooner():
    """Against brute force: what every possible way to go on would show as well."""
    decode = example.tiny().tokenizer.decode
    draw = random.Random(5)
    for _ in range(30):
        text = "".join(draw.choices("aEN→", k=9)) + draw.choice(["", "END", "ENDEN"])
        end = text.find("END")
        whole = text if end < 0 else text[:end]
        shown = life.shown_text(text.encode(), decode, "END")
        assert whole.startswith("".join(token.released for token in shown))
        seen, drawn = "", b""
        for token in shown:
            seen, drawn = seen + token.released, drawn + bytes([token.token])
            characters = drawn.decode(errors="ignore")
            stopped = characters.find("END")
            kept = max(n for n in range(4) if n == 0 or characters.endswith("END"[:n]))
            certain = characters[: len(characters) - kept] if stopped < 0 else characters[:stopped]
            assert seen == certain
            assert token.held == len(drawn) - len(seen.encode())


def test_the_floor_of_one_token_is_the_read_of_every_weight():
    """Activations are a few per cent of it."""
    config, device = example.tiny().config, DEVICES["T4"]
    read = 4 * num_parameters(config) / device.memory_bandwidth
    assert read < life.predicted_seconds(config, device, 1) < 1.1 * read
    longer = [life.predicted_seconds(config, device, n) for n in (1, 8, 64, 512)]
    assert longer == sorted(longer)


def test_a_measured_step_is_the_whole_prompt_in_one_pass():
    times = life.step_times(example.tiny(), DEVICES["T4"], [1, 3], repeats=1)
    assert [time.tokens for time in times] == [1, 3]
    assert all(time.measured > 0 and time.predicted > 0 for time in times)


def test_the_pictures_name_their_axes_and_their_units():
    pytest.importorskip("matplotlib")
    times = [life.StepTime(1, 1e-4, 3e-4), life.StepTime(4, 2e-4, 4e-4)]
    (axes,) = life.draw_step_times(times, "this machine: a CPU").axes
    assert axes.get_ylabel().endswith("(ms)") and len(axes.lines) == 2
    assert list(axes.lines[0].get_ydata()) == pytest.approx([0.3, 0.4])
    shown = [life.Shown(69, "", 1), life.Shown(226, "", 2), life.Shown(33, "E→!", 0)]
    (axes,) = life.draw_shown(shown, title="One").axes
    assert [text.get_text() for text in axes.texts] == ["E", "", "E2", "", "!", "E→!"]
