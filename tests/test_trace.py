"""The timeline and the table say what the events say, and the JSON is a valid Chrome trace."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from fakes import run_engine, tiny_engine

from minifer.events import Event, EventBus, ListSink
from minifer.request import SamplingParams
from minifer.trace import ChromeTraceSink, chrome_trace, life_of


def record(requests: dict[str, list[int]], max_tokens: int = 4, **options: Any) -> list[Event]:
    """Run a real engine on a clock that ticks a millisecond a look."""
    sink = ListSink()
    engine = tiny_engine(sinks=[sink], **options)
    ticks = itertools.count()
    engine.events.clock = lambda: next(ticks) / 1000
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    for request_id, prompt in requests.items():
        engine.add_request(request_id, prompt, params)
    run_engine(engine)
    return sink.events


def check_format(trace: dict[str, Any]) -> None:
    """What the Trace Event Format asks for, and that slices of a track nest."""
    trace = json.loads(json.dumps(trace))
    named: dict[str, set[Any]] = defaultdict(set)
    used, last = set(), 0
    open_until: dict[tuple[int, int], list[int]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert {"ph", "pid", "tid", "name", "ts"} <= event.keys()
        track = (event["pid"], event["tid"])
        if event["ph"] == "M":
            named[event["name"]].add(track if event["name"].startswith("thread") else event["pid"])
            continue
        start = round(event["ts"] * 1000)  # nanoseconds, as Perfetto keeps them
        assert start >= last, "not sorted"
        last = start
        used.add(track)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            stack = open_until[track]
            while stack and stack[-1] <= start:
                stack.pop()
            end = round((event["ts"] + event["dur"]) * 1000)
            assert not stack or end <= stack[-1], f"{event['name']} sticks out"
            stack.append(end)
        elif event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
        else:
            assert (event["ph"], event["s"]) == ("i", "t")
    assert used <= named["thread_name"]
    assert {pid for pid, _ in used} <= named["process_name"]


def slices(trace: dict[str, Any], thread: str) -> list[dict[str, Any]]:
    """The slices of a track, by its name."""
    events = trace["traceEvents"]
    (track,) = [
        (e["pid"], e["tid"])
        for e in events
        if e["name"] == "thread_name" and e["args"]["name"] == thread
    ]
    return [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == track]


def names(trace: dict[str, Any], thread: str) -> list[str]:
    return [s["name"] for s in slices(trace, thread)]


def test_a_request_is_queued_then_prefilled_in_chunks_then_decoded() -> None:
    trace = chrome_trace(record({"a": list(range(10))}, max_num_batched_tokens=4))
    check_format(trace)
    prefill = ["prefill [0, 4)", "prefill [4, 8)", "prefill [8, 10)"]
    # The fourth output token is never computed: nothing follows it.
    assert names(trace, "a") == ["queued", *prefill, "decode 10", "decode 11", "decode 12"]
    waits, first = slices(trace, "a")[:2]
    assert waits["ts"] + waits["dur"] == first["ts"]


def test_every_step_holds_its_five_stages_in_order() -> None:
    trace = chrome_trace(record({"a": [1, 2, 3]}, max_tokens=2))
    check_format(trace)
    stages = ["1 scheduling", "2 KV", "3, 4 forward", "4 sampling", "5 postprocessing"]
    assert names(trace, "steps") == ["step 1", *stages, "step 2", *stages]
    step, *parts = slices(trace, "steps")[:6]
    assert parts[0]["ts"] == step["ts"]
    assert sum(part["dur"] for part in parts) == pytest.approx(step["dur"])
    assert parts[2]["args"]["num_prefill_tokens"] == 3


def test_a_second_request_waits_for_a_seat() -> None:
    trace = chrome_trace(record({"a": [1, 2], "b": [3, 4]}, max_tokens=3, max_num_seqs=1))
    check_format(trace)
    (queued,) = [s for s in slices(trace, "b") if s["name"] == "queued"]
    last = slices(trace, "a")[-1]
    assert queued["ts"] + queued["dur"] > last["ts"] + last["dur"]


def test_a_preempted_request_queues_again_and_computes_its_output_as_prefill() -> None:
    prompts = {"a": list(range(8)), "b": list(range(20, 28))}
    events = record(prompts, max_tokens=12, num_kv_blocks=7, enable_prefix_caching=False)
    (victim,) = {e.request_id for e in events if e.name == "request.preempted"}
    trace = chrome_trace(events)
    check_format(trace)
    life = names(trace, str(victim))
    again = life.index("queued", 1)
    recomputed = int(life[again - 1].removeprefix("decode ")) + 2  # it had sampled one more
    assert life[again + 1] == f"prefill [0, {recomputed})"
    assert life[again + 2] == f"decode {recomputed}"


def test_a_fork_goes_on_where_its_parent_was() -> None:
    sink = ListSink()
    engine = tiny_engine(sinks=[sink])
    engine.add_request("a", [1, 2, 3], SamplingParams(n=2, max_tokens=3, seed=1))
    run_engine(engine)
    trace = chrome_trace(sink.events)
    check_format(trace)
    assert names(trace, "a") == ["queued", "prefill [0, 3)", "decode 3", "decode 4"]
    assert names(trace, "a#1") == ["decode 3", "decode 4"]


def test_a_fork_that_lost_its_blocks_computes_its_parents_tokens_as_prefill() -> None:
    fork = {"parent": "a", "blocks": [0]}
    events = [
        Event(0.0, 1, "b", "scheduling", "request.forked", (0, 9), fork),
        Event(1.0, 2, None, "engine", "step.started"),
        Event(1.0, 2, "b", "scheduling", "request.scheduled", (0, 9)),
        Event(2.0, 2, None, "decode", "step.sampled"),
    ]
    assert names(chrome_trace(events), "b") == ["prefill [0, 9)"]


def test_counters_follow_the_pool_and_the_queues() -> None:
    sink = ListSink()
    engine = tiny_engine(sinks=[sink], num_kv_blocks=20)
    shared = list(range(9))
    engine.add_request("a", shared, SamplingParams(temperature=0, max_tokens=6))
    engine.step()
    engine.add_request("b", [*shared, 30, 31], SamplingParams(temperature=0, max_tokens=9))
    while True:
        counted = {
            e["name"]: e["args"]
            for e in chrome_trace(sink.events, num_kv_blocks=20)["traceEvents"]
            if e["ph"] == "C"
        }
        free = engine.kv.pool.num_free
        assert counted["KV blocks"] == {"in use": 20 - free, "free": free}
        queues = (len(engine.scheduler.running), len(engine.scheduler.waiting))
        assert tuple(counted["requests"].values()) == queues
        if not engine.has_unfinished_requests:
            break
        engine.step()
    assert any(e.name == "kv.prefix_hit" for e in sink.events), "a shared block counts once"
    assert free == 20


def test_blocks_are_counted_in_use_only_where_the_size_of_the_pool_is_not_known() -> None:
    trace = chrome_trace(record({"a": [1, 2]}))
    (first, *_) = [e for e in trace["traceEvents"] if e["name"] == "KV blocks"]
    assert first["args"] == {"in use": 1}


def test_an_unknown_event_becomes_an_instant_where_it_belongs() -> None:
    bus_sink = ListSink()
    bus = EventBus(bus_sink, clock=itertools.count().__next__)
    bus.emit("kv", "tier.loaded", "a", (0, 4), tier="disk")
    bus.emit("engine", "router.moved", to="worker 2")
    trace = chrome_trace(bus_sink.events)
    check_format(trace)
    mine, engines = (e for e in trace["traceEvents"] if e["ph"] == "i")
    assert mine["args"] == {"stage": "kv", "step": 0, "tier": "disk", "tokens": [0, 4]}
    assert (mine["pid"], mine["tid"]) != (engines["pid"], engines["tid"])
    assert engines["ts"] == 1e6  # microseconds from the first event


def test_no_event_of_a_request_is_lost() -> None:
    events = record({"a": list(range(6)), "b": list(range(6))})
    trace = chrome_trace(events)
    shown = [e["name"] for e in trace["traceEvents"] if e["ph"] == "i"]
    expected = [
        e.name for e in events if e.name != "request.scheduled" and not e.name.startswith("step.")
    ]
    assert shown == expected


def test_a_step_that_fails_and_a_run_that_is_cut_short_leave_no_slice_open() -> None:
    sink = ListSink()
    engine = tiny_engine(sinks=[sink])
    params = SamplingParams(temperature=0, max_tokens=4)
    engine.add_request("a", [1, 2, 3], params)
    forward = engine.runner.forward

    def broken(batch: object) -> object:
        raise RuntimeError("device lost")

    engine.runner.forward = broken
    engine.step()
    engine.runner.forward = forward
    engine.add_request("b", [4, 5], params)
    engine.step()
    engine.add_request("c", [6], params)  # still queued when the trace is taken
    trace = chrome_trace(sink.events)
    check_format(trace)
    assert names(trace, "a") == ["queued", "prefill [0, 3)"]
    assert names(trace, "c") == ["queued"]
    assert [n for n in names(trace, "steps") if n.startswith("step ")] == ["step 1", "step 2"]


def test_the_sink_writes_what_perfetto_opens(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ChromeTraceSink(path, num_kv_blocks=64) as sink:
        engine = tiny_engine(sinks=[sink])
        engine.add_request("é", [1, 2, 3], SamplingParams(max_tokens=3))
        run_engine(engine)
    trace = json.loads(path.read_text(encoding="utf-8"))
    check_format(trace)
    assert trace == chrome_trace(sink.events, num_kv_blocks=64)
    assert names(trace, "é")[0] == "queued"


def test_a_trace_of_nothing_is_valid() -> None:
    check_format(chrome_trace([]))


# -- one life as a table

LIFE = [
    Event(5.0, 0, "a", "scheduling", "request.admitted", (0, 2), {"n": 1}),
    Event(5.5, 0, "b", "scheduling", "request.admitted", (0, 9), {"n": 1}),
    Event(6.0, 1, "a", "kv", "kv.block_allocated", None, {"blocks": [3]}),
    Event(6.0, 1, "a", "scheduling", "request.scheduled", (0, 2)),
    Event(7.0, 1, None, "prefill", "step.forward", None, {"duration": 0.5}),
    Event(7.5, 1, "a", "decode", "token.sampled", (2, 3), {"token_id": 65}),
    Event(7.5, 1, "a", "postprocessing", "text.released", (2, 3), {"text": "A" * 80}),
    Event(8.0, 2, "a", "scheduling", "request.scheduled", (2, 3)),
    Event(9.0, 2, None, "prefill", "step.forward", None, {"duration": 0.25}),
    Event(9.5, 3, None, "prefill", "step.forward", None, {"duration": 0.25}),
]


def test_the_life_of_a_request_is_a_table_in_order_of_time() -> None:
    lines = life_of(LIFE, "a").splitlines()
    assert lines[0].split() == ["step", "ms", "stage", "event", "tokens", "data"]
    assert lines[1].split() == ["0", "0.000", "scheduling", "request.admitted", "[0,", "2)", "n=1"]
    assert lines[5].split()[-1] == "token_id=65"
    assert lines[5].split()[1] == "2500.000"
    assert lines[6].endswith("…")
    assert len(lines) == 1 + 8  # neither request b nor the step that it alone was in
    column = lines[0].index("event")
    assert {line[column - 1] for line in lines} == {" "}


def test_the_life_of_one_token_is_its_sampling_and_the_step_that_computed_it() -> None:
    events = [line.split()[3] for line in life_of(LIFE, "a", position=2).splitlines()[1:]]
    assert events == ["token.sampled", "text.released", "request.scheduled", "step.forward"]
    of_prompt = life_of(LIFE, "a", position=0)
    assert "request.admitted" in of_prompt and "blocks=[3]" in of_prompt
    assert "token.sampled" not in of_prompt


def test_the_life_of_a_real_request_passes_all_five_stages() -> None:
    table = life_of(record({"a": list(range(5)), "b": [1]}), "a")
    stages = [line.split()[2] for line in table.splitlines()[1:]]
    assert set(stages) == {"scheduling", "kv", "prefill", "decode", "postprocessing"}
    assert [line.split()[3] for line in table.splitlines()[-2:]] == [
        "request.finished",
        "kv.block_freed",
    ]


@pytest.mark.parametrize("position", [-1, 99])
def test_a_position_that_a_request_does_not_have_is_refused(position: int) -> None:
    with pytest.raises(ValueError, match=rf"position must be in \[0, \d+\) .*got {position}"):
        life_of(LIFE, "a", position)


def test_the_life_of_nobody_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match="one of a, b, got 'c'"):
        life_of(LIFE, "c")
    with pytest.raises(ValueError, match="no requests in the events"):
        life_of([], "c")
