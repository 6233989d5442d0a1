"""Timelines as pictures: nothing is lost between the spans and what a reader sees."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from test_trace import check_format

from minifer.kernels.mega.schedule import assign, build
from minifer.kernels.mega.shapes import MODELS, decode_shape
from minifer.perf.devices import DEVICES
from minifer.perf.timeline import gantt
from minifer.perf.timeline.decode import ARMS, PREFETCH, panel
from minifer.perf.timeline.model import (
    Machine,
    Timeline,
    chrome_trace,
    from_timestamps,
    simulate,
    tasks,
)

TINY = decode_shape(MODELS["minifer-tiny"], batch=2, splits=2)
PICTURE = Path(__file__).parents[3] / "lectures" / "figures" / "megakernel_timeline.svg"


def tiny_timeline() -> Timeline:
    return simulate(tasks(assign(build(TINY, 5), 5), 100), Machine(5, 1e9, overhead=1e-6))


@pytest.fixture(scope="module")
def panels() -> list[gantt.Panel]:
    return [panel(arm, TINY, DEVICES["T4"], 100) for arm in ARMS]


def test_the_chrome_trace_is_valid_and_holds_every_span(panels: list[gantt.Panel]) -> None:
    timelines = [panel.timeline for panel in panels]
    trace = chrome_trace(timelines)
    check_format(trace)
    events = json.loads(json.dumps(trace))["traceEvents"]
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == [f"{arm} (modelled)" for arm in ARMS]
    for pid, timeline in enumerate(timelines, 1):
        work = [e for e in events if (e["pid"], e["ph"]) == (pid, "X") and e["name"] != "wait"]
        assert len(work) == len(timeline.spans)
        assert max(e["ts"] + e["dur"] for e in work) == pytest.approx(
            timeline.seconds * 1e6, abs=2e-3
        )


def test_bars_show_every_task_of_the_window_once() -> None:
    timeline = tiny_timeline()
    layers = range(1, 3)
    start, end = gantt.window(timeline, layers)
    area = sum(
        (bar.end - bar.start) * (bar.last - bar.first) for bar in gantt.bars(timeline, start, end)
    )
    spans = [
        min(span.end, end) - max(span.start, start)
        for span in timeline.spans
        if span.end > start and span.start < end
    ]
    assert area == pytest.approx(sum(spans) * 1e6, rel=0.01)


def test_the_strip_shows_the_bandwidth_in_use(panels: list[gantt.Panel]) -> None:
    for one in panels:
        timeline, chip = one.timeline, one.machine
        assert chip is not None
        used = gantt.bandwidth_in_use(one, 0.0, timeline.seconds, 77)
        assert len(used) == 77 and all(-1e-9 <= share <= 1 + 1e-9 for share in used)
        mean = timeline.num_bytes / timeline.seconds / chip.bandwidth
        assert sum(used) / 77 == pytest.approx(mean)


def test_the_svg_is_small_well_formed_and_says_that_it_is_modelled(
    panels: list[gantt.Panel],
) -> None:
    text = gantt.svg(panels, "A < B & C", "µs")
    root = ET.fromstring(text)
    assert root.attrib["viewBox"].startswith("0 0 1000 ")
    words = " ".join("".join(e.itertext()) for e in root.iter("{http://www.w3.org/2000/svg}text"))
    assert words.count(", modelled") == len(panels)
    assert all(arm in words for arm in ARMS) and "time, µs" in words and "A < B & C" in words
    for _, label in gantt.KINDS.values():
        assert label in words


@pytest.mark.parametrize("seconds", [1e-8, 3e-5, 0.5, 1e4])
def test_any_length_of_time_has_an_axis(seconds: float) -> None:
    timeline = simulate(tasks(assign(build(TINY, 1), 1), 9), Machine(1, 1e15, overhead=seconds))
    text = gantt.svg([gantt.Panel(timeline)], "", "")
    assert 1 <= text.count('v5" stroke="#222"/>') <= 17


def test_the_committed_picture_is_small_and_of_one_piece() -> None:
    text = PICTURE.read_text(encoding="utf-8")
    ET.fromstring(text)
    assert len(text.encode()) <= 300_000 and ", modelled" in text


def test_colours_are_told_apart_without_colour_vision() -> None:
    """Okabe and Ito's palette, each colour once."""
    okabe_ito = {"#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"}
    colours = [colour for colour, _ in gantt.KINDS.values()]
    assert len(set(colours)) == len(colours)
    assert set(colours) <= okabe_ito | {"#B8B8B8"}


def test_matplotlib_draws_the_same_bars(panels: list[gantt.Panel]) -> None:
    pytest.importorskip("matplotlib")
    one = panels[ARMS.index(PREFETCH)]
    drawing = gantt.figure([one], "modelled")
    axes, strip = drawing.axes
    start, end = gantt.window(one.timeline, gantt.shown_layers([one]))
    assert len(axes.collections) == len(gantt.bars(one.timeline, start, end))
    assert "modelled" in axes.get_title(loc="left") and strip.get_xlabel() == "time, µs"


def test_measured_spans_are_drawn_without_what_was_not_measured() -> None:
    schedule = assign(build(TINY, 1), 1)
    stamps = [[[1 + 3 * i, 2 + 3 * i, 3 + 3 * i] for i in range(schedule.num_instructions)]]
    one = gantt.Panel(from_timestamps(stamps, schedule, 100))
    text = gantt.svg([one], "measured", "on nothing")
    assert ", measured" in text and "modelled" not in text and "in use" not in text
    assert 'class="k-overhead" d=' not in text and 'class="k-QKV" d=' in text


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="panels must not be empty"):
        gantt.svg([], "", "")
    with pytest.raises(ValueError, match=r"layers must be some of the timeline's, got \[9\]"):
        gantt.svg([gantt.Panel(tiny_timeline())], "", "", range(9, 10))
