"""What the pictures say is what the engine did: the data functions against the pool itself."""

from __future__ import annotations

import base64
import random
import struct
import subprocess
import sys
from typing import Any

import pytest
from fakes import run_engine, step_checked, tiny_engine

from minifer.course.figure_data import BlockColumn, block_map_data, timeline_data
from minifer.course.figures import (
    PALETTE,
    REQUEST_COLOURS,
    block_map,
    request_colours,
    show,
    timeline,
)
from minifer.events import Event, ListSink
from minifer.kv.step_input import StepInput
from minifer.request import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def event(
    step: int,
    name: str,
    request: str | None = None,
    tokens: tuple[int, int] | None = None,
    **data: Any,
) -> Event:
    return Event(float(step), step, request, "any", name, tokens, data)


class Watcher:
    """A runner that notes, while a step computes, what the requests and the pool really hold."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.inner = engine, engine.runner
        self.columns: list[BlockColumn] = []

    def forward(self, step: StepInput) -> Any:
        pool = self.engine.kv.pool
        running = self.engine.scheduler.running
        self.columns.append(
            BlockColumn(
                self.engine.events.step,
                {r.request_id: tuple(r.block_table) for r in running},
                frozenset(b.block_id for b in pool.blocks if b.key is not None),
                tuple(step.block_copies),
            )
        )
        return self.inner.forward(step)


def watched_engine(**options: Any) -> tuple[Any, Watcher, ListSink]:
    sink = ListSink()
    engine = tiny_engine(sinks=[sink], **options)
    engine.runner = watcher = Watcher(engine)
    return engine, watcher, sink


# -- the block map


def test_a_block_is_shared_then_cached_then_evicted():
    events = [
        event(1, "kv.block_allocated", "a", blocks=[0, 1]),
        event(1, "kv.block_published", "a", blocks=[0]),
        event(1, "step.prepared"),
        event(2, "kv.prefix_hit", "b", (0, 4), blocks=[0]),
        event(2, "kv.block_allocated", "b", blocks=[2]),
        event(2, "step.prepared"),
        event(2, "request.finished", "a"),
        event(2, "request.finished", "b"),
        event(3, "kv.block_evicted", blocks=[0]),
        event(3, "kv.block_allocated", "c", blocks=[0]),
        event(3, "step.prepared"),
    ]
    first, second, third, end = block_map_data(events)
    assert (first.step, first.tables, first.cached) == (1, {"a": (0, 1)}, {0})
    assert second.tables == {"a": (0, 1), "b": (0, 2)}
    assert second.holders(0) == ("a", "b") and second.holders(2) == ("b",)
    assert (third.tables, third.cached) == ({"c": (0,)}, frozenset())
    assert (end.step, end.tables) == (None, {"c": (0,)})


def test_copy_on_write_swaps_one_block_and_is_seen_in_its_step_only():
    events = [
        event(1, "kv.block_allocated", "a", blocks=[5, 6]),
        event(1, "step.prepared"),
        event(1, "request.forked", "b", (0, 7), parent="a", blocks=[5, 6]),
        event(2, "kv.block_allocated", "b", blocks=[7]),
        event(2, "kv.block_copied", "b", copies=[(6, 7)]),
        event(2, "kv.block_allocated", "b", blocks=[8]),
        event(2, "step.prepared"),
        event(3, "step.prepared"),
    ]
    _, second, third, _ = block_map_data(events)
    assert second.tables == {"a": (5, 6), "b": (5, 7, 8)}
    assert (second.copies, third.copies) == (((6, 7),), ())


@pytest.mark.parametrize("index", ["hash", "radix"])
@pytest.mark.parametrize("seed", range(4))
def test_the_map_equals_the_pool_whatever_happens(seed: int, index: str) -> None:
    """Prefix hits, preemption, eviction, n > 1, branches and aborts in a pool that is too small."""
    rng = random.Random(seed)
    engine, watcher, sink = watched_engine(
        num_kv_blocks=12, max_num_batched_tokens=7, max_num_seqs=5, prefix_index=index
    )
    trunk = [rng.randrange(40) for _ in range(11)]
    for i in range(12):
        prompt = trunk[: rng.randrange(1, 12)] + [
            rng.randrange(40) for _ in range(rng.randrange(9))
        ]
        n = rng.choice([1, 1, 3])
        temperature = 0 if n == 1 else 1
        params = SamplingParams(
            temperature=temperature, n=n, max_tokens=rng.randrange(1, 12), ignore_eos=True
        )
        engine.add_request(f"r{i}", prompt, params)
        if n == 1 and rng.random() < 0.3:
            engine.fork(f"r{i}", f"r{i}-branch", seed=i)
        for _ in range(rng.randrange(4)):
            step_checked(engine)
        if rng.random() < 0.2:
            engine.abort(f"r{i}")
    run_engine(engine)
    names = {e.name for e in sink.events}
    assert {"kv.prefix_hit", "kv.block_copied", "request.preempted", "kv.block_evicted"} <= names

    *columns, end = block_map_data(sink.events)
    assert len(columns) == len(watcher.columns)
    for seen, true in zip(columns, watcher.columns, strict=True):
        assert seen.tables == true.tables
        assert (seen.step, seen.cached, seen.copies) == (true.step, true.cached, true.copies)
    assert not end.tables
    pool = engine.kv.pool
    assert end.cached == {b.block_id for b in pool.blocks if b.key is not None}


# -- the timeline


def test_a_small_budget_cuts_the_prompt_in_chunks_and_the_second_request_waits():
    engine, _, sink = watched_engine(max_num_batched_tokens=4, enable_prefix_caching=False)
    engine.add_request("a", [1, 2, 3, 4, 5, 6], GREEDY)
    engine.add_request("b", [7, 8, 9], GREEDY.with_(max_tokens=2))
    run_engine(engine)
    spans = timeline_data(sink.events)
    assert [(s.kind, s.tokens) for s in spans if s.request_id == "a"] == [
        ("prefill", (0, 4)),
        ("prefill", (4, 6)),
        ("decode", (6, 7)),
        ("decode", (7, 8)),
        ("decode", (8, 9)),
    ]
    assert [(s.step, s.kind, s.tokens) for s in spans if s.request_id == "b"] == [
        (1, "waiting", None),
        (2, "prefill", (0, 2)),
        (3, "prefill", (2, 3)),
        (4, "decode", (3, 4)),
    ]


def test_a_prefix_hit_is_noted_where_it_happened():
    engine, _, sink = watched_engine()
    for name in ("a", "b"):
        engine.add_request(name, range(10), GREEDY)
        run_engine(engine)
    (hit,) = [s for s in timeline_data(sink.events) if s.cached]
    assert (hit.request_id, hit.kind, hit.cached, hit.tokens) == ("b", "prefill", 8, (8, 10))


def test_after_a_preemption_the_same_tokens_are_prefill_again():
    stream = [
        event(0, "request.admitted", "a", (0, 3)),
        event(1, "step.started"),
        event(1, "request.scheduled", "a", (0, 3)),
        event(1, "step.postprocessed"),
        event(2, "step.started"),
        event(2, "request.scheduled", "a", (3, 4)),
        event(2, "step.postprocessed"),
        event(3, "step.started"),
        event(3, "request.scheduled", "a", (4, 5)),
        event(3, "request.preempted", "a"),  # what it was given this step is not computed
        event(3, "step.postprocessed"),
        event(4, "step.started"),
        event(4, "request.scheduled", "a", (0, 5)),
        event(4, "request.finished", "a"),
        event(4, "step.postprocessed"),
        event(5, "step.started"),
        event(5, "step.postprocessed"),
    ]
    spans = timeline_data(stream)
    assert [s.kind for s in spans] == ["prefill", "decode", "waiting", "prefill"]
    assert [(s.begin, s.end) for s in spans] == [(float(i), float(i)) for i in range(1, 5)]


def test_every_scheduled_token_is_in_one_span_and_forks_go_on_decoding():
    engine, watcher, sink = watched_engine()
    engine.add_request("a", [1, 2, 3, 4, 5], SamplingParams(n=3, max_tokens=3, ignore_eos=True))
    run_engine(engine)
    spans = timeline_data(sink.events)
    assert [(s.request_id, s.kind) for s in spans if s.step == 1] == [("a", "prefill")]
    assert {(s.request_id, s.kind) for s in spans if s.step == 2} == {
        (name, "decode") for name in ("a", "a#1", "a#2")
    }
    computed = sum(s.tokens[1] - s.tokens[0] for s in spans if s.tokens)
    forward = [e.data for e in sink.events if e.name == "step.forward"]
    assert computed == sum(d["num_prefill_tokens"] + d["num_decode_tokens"] for d in forward)
    assert len({s.step for s in spans}) == len(watcher.columns)


# -- the pictures


@pytest.fixture
def events() -> list[Event]:
    pytest.importorskip("matplotlib")
    engine, _, sink = watched_engine(max_num_batched_tokens=4)
    engine.add_request("a", range(10), GREEDY)
    engine.add_request("b", [*range(8), 20, 21], GREEDY)
    run_engine(engine)
    return sink.events


def colours_of(axes: Any) -> set[str]:
    from matplotlib.colors import to_hex

    return {to_hex(patch.get_facecolor()).upper() for patch in axes.patches}


def texts_of(figure: Any) -> list[Any]:
    from matplotlib.text import Text

    return [t for t in figure.findobj(Text) if t.get_text()]


def test_pictures_name_their_axes_and_keep_to_the_palette(events: list[Event]) -> None:
    ours = {*PALETTE.values(), *REQUEST_COLOURS, "#FFFFFF"}
    for figure, label in (
        (block_map(events, 8, title="Two requests share two blocks"), "engine step"),
        (timeline(events, title="B waits for A"), "engine step"),
        (timeline(events, title="B waits for A", x="time"), "time (ms)"),
    ):
        (axes,) = figure.axes
        assert axes.get_xlabel() == label and axes.get_ylabel()
        assert colours_of(axes) <= ours
        assert all(text.get_fontsize() >= 9 for text in texts_of(figure))


def test_the_map_labels_a_shared_block_with_both_requests(events: list[Event]) -> None:
    (axes,) = block_map(events, 8, title="shared").axes
    assert "a+b" in {text.get_text() for text in axes.texts}


def test_named_requests_keep_their_colours_in_every_picture() -> None:
    a, b, c, d = REQUEST_COLOURS
    assert request_colours("ABC") == {"A": a, "B": b, "C": c}
    assert request_colours(["B", "D"]) == {"B": b, "D": d}
    assert request_colours(["x", "y"]) == {"x": a, "y": b}


def test_nothing_is_drawn_outside_the_figure(events: list[Event]) -> None:
    for figure in (
        block_map(events, 8, title="A finding" * 9),
        timeline(events, title="A finding" * 9),
    ):
        figure.draw_without_rendering()
        width, height = figure.bbox.size
        for text in texts_of(figure):
            box = text.get_window_extent()
            assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, text


def test_a_timeline_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one finished step"):
        timeline([], title="nothing")


def test_show_displays_a_png_with_its_alt_text_and_returns_nothing(
    events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[dict[str, str], Any]] = []
    monkeypatch.setattr(
        "IPython.display.display",
        lambda data, raw, metadata=None: shown.append((data, metadata)),
    )
    assert show(timeline(events, title="B waits"), alt="Request b waits < 2 steps.") is None
    (data, metadata), (words, _) = shown
    assert "<details>" in words["text/html"] and "waits &lt; 2 steps." in words["text/html"]
    png = base64.b64decode(data["image/png"])
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and len(png) < 150_000
    assert min(struct.unpack(">II", png[16:24])) > 100
    assert metadata == {"image/png": {"alt": "Request b waits < 2 steps."}}
    assert data["text/plain"] == "Request b waits < 2 steps."
    with pytest.raises(ValueError, match="alt must say"):
        show(timeline(events, title="B waits"), alt=" ")


def test_the_data_half_needs_no_matplotlib() -> None:
    program = "import sys, minifer.course.figures; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
