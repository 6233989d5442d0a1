"""The token microscope: what it shows of a token is what the engine did with it."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from fakes import run_engine, tiny_engine

from minifer.course import example
from minifer.course.microscope import life_of_token, microscope, microscope_page, stepper
from minifer.course.microscope_data import Life, life_frames
from minifer.course.microscope_places import event_places
from minifer.course.microscope_view import view
from minifer.course.microscope_words import SENTENCES
from minifer.events import STAGES, Event, ListSink
from minifer.request import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


class Watcher:
    """A runner that notes the slot of every (request, position) in every step."""

    def __init__(self, engine: Any) -> None:
        self.inner, self.engine = engine.runner, engine
        self.slots: dict[tuple[str, int], list[tuple[int, int]]] = {}

    def forward(self, step: Any) -> Any:
        rows = iter(step.slot_mapping)
        for entry in step.scheduled:
            for position in range(entry.start, entry.end):
                key = entry.request.request_id, position
                self.slots.setdefault(key, []).append((self.engine.events.step, next(rows)))
        return self.inner.forward(step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def scene(**options: Any) -> tuple[list[Event], dict[tuple[str, int], list[tuple[int, int]]]]:
    """Three requests, two with one beginning, one that forks; P = 4."""
    sink = ListSink()
    engine = tiny_engine(sinks=[sink], **options)
    engine.runner = watcher = Watcher(engine)
    engine.add_request("a", range(10), GREEDY)
    engine.add_request("b", [*range(8), 20, 21, 22], GREEDY)
    engine.add_request("c", [9, 8, 7, 6, 5], SamplingParams(n=2, max_tokens=5, ignore_eos=True))
    run_engine(engine)
    return sink.events, watcher.slots


SCENES = {
    "chunks and hits": {"max_num_batched_tokens": 6},
    "preemptions": {"num_kv_blocks": 7, "max_num_batched_tokens": 12},
    "tiers": {"num_kv_blocks": 8, "kv_dram_bytes": 1 << 20},
}


@pytest.fixture(scope="module", params=SCENES)
def told(request):
    return scene(**SCENES[request.param])


def test_every_token_is_computed_where_and_when_the_engine_did(told):
    events, slots = told
    for (name, position), computed in slots.items():
        frames = life_frames(events, name, position, block_size=4).frames
        passes = [frame.step for frame in frames if frame.name == "step.forward"]
        assert passes == [step for step, _ in computed]
        prepared = [(f.step, f.slot) for f in frames if f.name == "step.prepared"]
        assert prepared == computed


def test_no_event_about_the_token_is_missing_and_none_comes_twice(told):
    events, slots = told
    for name, position in slots:
        frames = life_frames(events, name, position, block_size=4).frames
        shown = [frame.index for frame in frames]
        assert shown == sorted(set(shown))
        own = {
            i
            for i, e in enumerate(events)
            if e.request_id == name
            and (
                e.name in ("request.finished", "request.preempted")
                or (e.token_range and e.token_range[0] <= position < e.token_range[1])
            )
        }
        assert own <= set(shown)
        assert all(frame.name == events[frame.index].name for frame in frames)
        drawn = [e for e in events if e.name == "token.sampled" and e.request_id == name]
        is_drawn = any(e.token_range == (position, position + 1) for e in drawn)
        assert [f.name for f in frames].count("token.sampled") == is_drawn


def test_a_block_that_others_find_or_overwrite_is_followed():
    run = example.run()
    names = [f.name for f in life_of_token(run, "A", 3).frames]
    assert names.count("kv.prefix_hit") == 1  # B's
    hit = next(f for f in life_of_token(run, "A", 3).frames if f.name == "kv.prefix_hit")
    assert hit.sentence.startswith("Request B begins with the same tokens: it finds block 0")
    assert hit.pool.holders(0) == ("A", "B")
    assert "kv.prefix_hit" not in [f.name for f in life_of_token(run, "A", 17).frames]
    small = example.run(num_kv_blocks=8)  # what A left is needed again
    ends = [life_of_token(small, name, 0).frames[-1].name for name in "ABC"]
    assert set(ends) <= {"kv.block_evicted", "kv.block_freed", "kv.block_allocated"}


def test_the_stages_of_a_drawn_token_in_their_order():
    life = life_of_token(example.run(), "A")  # the first that was drawn
    assert life.position == 20
    assert [(f.step, f.stage, f.name) for f in life.frames] == [
        (2, "kv", "kv.block_allocated"),
        (2, "decode", "token.sampled"),
        (2, "postprocessing", "text.released"),
        (3, "scheduling", "request.scheduled"),
        (3, "kv", "step.prepared"),
        (3, "decode", "step.forward"),  # in a step that prefills B and C as well
        (6, "kv", "kv.block_published"),
        (13, "postprocessing", "request.finished"),
        (13, "kv", "kv.block_freed"),
    ]
    assert life.stages()[:3] == ["kv", "decode", "postprocessing"]
    kv = life_of_token(example.run(), "A", stage="kv")
    assert {frame.stage for frame in kv.frames} == {"kv"} and len(kv.frames) == 4


# -- the places


@pytest.mark.parametrize("name", event_places())
def test_a_place_is_a_statement_of_the_function_it_names(name):
    for place in event_places()[name]:
        found: Any = importlib.import_module(place.module)
        for part in place.function.split("."):
            found = getattr(found, part)
        text = "".join(inspect.getsource(found).split())
        assert "".join(place.statement.split()).replace(",)", ")") in text.replace(",)", ")")
        ast.parse(place.statement)
        assert name in place.statement or name == "kv.block_unpublished"  # that is its default


def test_every_event_that_an_engine_emits_has_a_place_and_a_sentence(told):
    assert set(SENTENCES) == set(event_places())
    emitted = {event.name for event in told[0]}
    assert emitted <= set(event_places())


def test_the_scan_finds_every_event_named_in_the_engine():
    """Against a cruder look: every dotted string that follows "emit(" or a stage."""
    engine = importlib.import_module("minifer.engine")
    text = inspect.getsource(engine)
    named = set(re.findall(r'"((?:step|request|kv|token|text|guard)\.[a-z_]+)"', text))
    assert named and named <= set(event_places())


# -- the picture


@pytest.fixture(scope="module")
def life() -> Life:
    return life_of_token(example.run(), "A", 20)


class Reader(HTMLParser):
    """Checks that tags are balanced, and keeps the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("br", "meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None: ...

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_frame_says_stage_sentence_source_values_blocks_and_step(life):
    text = Reader(view(life, 4)).text
    assert "Event 5 of 9 · step 3 · request A, position 20" in text
    assert "▼ 2 KV: the token is here" in text
    assert "Every token of the step gets its slot; ours is slot 20, in block 2, offset 4." in text
    assert 'minifer.engine:Engine.steptimer.lap("step.prepared", "kv")' in text
    assert "2A●" in text and "0A+B✓" in text  # block 2 is ours, block 0 has two holders
    assert "▼ 3" in text and "P12 +16" in text
    assert "the token is here" in Reader(view(life, 4, drawn=True)).text


def test_pictures_are_the_same_on_every_run_whatever_the_clock(life):
    again = life_of_token(example.run(), "A", 20)
    assert [view(again, i) for i in range(9)] == [view(life, i) for i in range(9)]
    page = microscope_page(example.run(), "A", 20)
    assert page == microscope_page(example.run(), "A", 20)
    assert Reader(page).text.count("Event ") >= 9
    assert "duration" not in page
    assert page.count("<details") == 9 and page.count(" open>") == 1


def test_what_the_model_wrote_cannot_become_html():
    text = "<script>alert(1)</script>"
    stream = [
        Event(0.0, 0, "<b>", "scheduling", "request.admitted", (0, 1), {"n": 1}),
        Event(0.0, 1, "<b>", "postprocessing", "text.released", (0, 1), {"text": text}),
    ]
    page = microscope_page(stream, "<b>", 0)
    assert text not in page and "<b>'" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_buttons_and_slider_move_together():
    pytest.importorskip("ipywidgets")
    life = life_of_token(example.run(), "A", 20)
    controls, shown = stepper(life, "mark").children
    previous, following, slider, play = controls.children
    assert previous.disabled and "Event 1 of 9" in shown.value and ".mark-live" in shown.value
    following.click()
    assert slider.value == play.value == 1 and "Event 2 of 9" in shown.value
    play.value = 8
    assert slider.value == 8 and following.disabled and not previous.disabled
    previous.click()
    assert "Event 8 of 9" in shown.value


def test_in_a_notebook_the_twin_comes_first_and_as_text_too(monkeypatch):
    pytest.importorskip("ipywidgets")
    outputs = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: outputs.append(data))
    microscope(example.run(), "A", position=20)
    twin, widget = outputs
    assert twin["text/plain"].splitlines()[3].startswith("4 · step 3 · 1 scheduling · The sched")
    assert twin["text/html"].count("<details") == 9
    assert widget["text/plain"] == "In a running notebook, buttons step through 9 events"


def test_bad_arguments_are_refused():
    run = example.run()
    with pytest.raises(ValueError, match="request_id must be one of A, B, C, got 'Z'"):
        life_of_token(run, "Z")
    with pytest.raises(ValueError, match=r"position must be in \[0, 32\) for 'A', got 32"):
        life_of_token(run, "A", 32)
    with pytest.raises(ValueError, match="stage must be one of scheduling, kv"):
        life_of_token(run, "A", stage="sampling")
    with pytest.raises(ValueError, match="block_size must fit the block tables, got 4"):
        life_of_token(run.events, "A", 19, block_size=4)
    with pytest.raises(ValueError, match=r"index must be in \[0, 9\), got 9"):
        view(life_of_token(run, "A", 20), 9)
    assert set(STAGES) >= {frame.stage for frame in life_of_token(run, "A", 20).frames}
