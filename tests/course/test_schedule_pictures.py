"""What the pictures of scheduling say is what the scheduler did."""

from __future__ import annotations

import itertools
import random
import xml.etree.ElementTree as ET
from collections import Counter
from typing import Any

import pytest

from minifer.course.pictures.schedule import Panel, curves, gantt, load_view, state_machine
from minifer.course.pictures.schedule_data import (
    bars,
    describe,
    door_or_cap,
    load_curve,
    percentile,
    shares,
    traffic,
    transitions,
)
from minifer.course.pictures.schedule_here import predicted_steps, timed_steps
from minifer.course.pictures.schedule_run import (
    Arrival,
    play,
    random_worlds,
    serve,
    step_seconds,
)
from minifer.course.shapes import LLAMA_8B
from minifer.events import Event
from minifer.kv.invariants import check_invariants
from minifer.perf.costs import ElementBytes, step_cost
from minifer.perf.devices import DEVICES

H100 = DEVICES["H100-SXM"]
TWO = [Arrival("A", 0, 6, 3), Arrival("B", 0, 4, 2)]


def one(batch: Any) -> float:
    return 1.0


def test_the_virtual_run_of_two_requests_by_hand():
    run = serve(TWO, one, max_num_batched_tokens=8)
    assert run.plans == [{"A": 6, "B": 2}, {"A": 1, "B": 2}, {"A": 1, "B": 1}]
    assert run.token_times == {"A": [1.0, 2.0, 3.0], "B": [2.0, 3.0]}
    assert (run.ttft("B"), run.gaps("A"), run.tpot("B")) == (2.0, [1.0, 1.0], 1.0)
    assert run.gap_series("B") == ([3000.0], [1000.0])
    assert (run.seconds, run.num_computed, run.num_preemptions) == (3.0, 13, 0)
    assert shares(run.events) == run.plans


def test_the_clock_jumps_over_idle_time_and_lets_nobody_in_early():
    run = serve([Arrival("late", 7.5, 2, 1), Arrival("first", 0, 1, 2)], one)
    assert run.token_times == {"first": [1.0, 2.0], "late": [8.5]}
    assert run.ttft("late") == 1.0


def test_a_run_without_end_says_so():
    with pytest.raises(RuntimeError, match="limit must be enough steps, 2 were not"):
        serve(TWO, one, max_num_batched_tokens=1, limit=2)


def test_the_step_time_is_the_roofline_of_its_batch():
    batch = [(1, 900), (64, 64)]
    cost = step_cost(LLAMA_8B, batch).total()
    assert step_seconds(LLAMA_8B, H100)(batch) == H100.seconds(cost.flops, cost.bytes)
    wide = step_cost(LLAMA_8B, batch, element=ElementBytes(4, 4, 4)).total()
    steps = [(batch, 0.5)]
    assert predicted_steps(steps, LLAMA_8B, H100) == [H100.seconds(wide.flops, wide.bytes)]


def test_every_run_keeps_the_books():
    """Bars, shares and arrows against the scheduler itself, step by step."""
    preemptions = 0
    for arrivals, options in random_worlds(seed=5, count=30):
        running: list[set[str]] = []

        def watch(plan: Any, scheduler: Any, requests: Any, running: Any = running) -> None:
            check_invariants(scheduler.kv, requests)
            done = {e.request.request_id for e in plan.scheduled if e.request.finished}
            running.append({r.request_id for r in scheduler.running} | done)

        run = serve(arrivals, lambda batch: 0.01, watch=watch, **options)
        by_step: dict[int, list[Any]] = {}
        for bar in bars(run.events):
            by_step.setdefault(bar.step, []).append(bar)
        for step, (plan, seated) in enumerate(zip(run.plans, running, strict=True), start=1):
            found = by_step[step]
            assert {b.name: b.num_tokens for b in found if b.num_tokens} == plan
            assert {b.name for b in found if b.seat is not None} == seated
            seats = [b.seat for b in found if b.seat is not None]
            assert len(set(seats)) == len(seats) and max(seats) < options["max_num_seqs"]
        counts = transitions(run.events)
        assert counts["running", "waiting"] == run.num_preemptions
        assert counts["waiting", "running"] == len(arrivals) + run.num_preemptions
        assert counts["running", "finished"] == len(arrivals) == counts["new", "waiting"]
        needed = sum(a.prompt + a.wanted - 1 for a in arrivals)
        again = sum(b.num_tokens for b in bars(run.events) if b.kind == "recompute")
        assert needed <= run.num_computed <= needed + again
        preemptions += run.num_preemptions
    assert preemptions > 20


def test_play_runs_a_scheduler_of_ones_own_on_the_same_clock():
    class Mine:
        def __init__(self, name: str, prompt: int, wanted: int) -> None:
            self.name, self.prompt, self.wanted, self.computed, self.drawn = (
                name,
                prompt,
                wanted,
                0,
                0,
            )

        @property
        def behind(self) -> int:
            return self.prompt + self.drawn - self.computed

    def all_at_once(waiting: Any, running: Any) -> Any:
        while waiting:
            running.append(waiting.popleft())
        return {r: r.behind for r in running}

    arrivals = traffic(50, 12)
    seconds = step_seconds(LLAMA_8B, H100)
    ours = play(arrivals, all_at_once, seconds, Mine)
    engine = serve(arrivals, seconds, max_num_batched_tokens=10**6)
    assert (ours.plans, ours.token_times) == (engine.plans, engine.token_times)
    assert bars(ours.events) == bars(engine.events)


def event(step: int, name: str, request: str | None = None, tokens: Any = None) -> Event:
    return Event(step / 10, step, request, "any", name, tokens)


PREEMPTED = [
    event(0, "request.admitted", "A", (0, 4)),
    event(0, "request.admitted", "B", (0, 3)),
    *(event(1, "step.started"), event(1, "request.scheduled", "A", (0, 4))),
    *(event(1, "request.scheduled", "B", (0, 2)), event(1, "step.postprocessed")),
    *(event(2, "step.started"), event(2, "request.preempted", "B")),
    *(event(2, "request.scheduled", "A", (4, 5)), event(2, "request.finished", "A")),
    event(2, "step.postprocessed"),
    *(event(3, "step.started"), event(3, "request.scheduled", "B", (0, 3))),
    event(3, "step.postprocessed"),
]


def test_what_a_preemption_costs_is_told_apart():
    found = [(b.step, b.name, b.seat, b.kind, b.num_tokens) for b in bars(PREEMPTED)]
    assert found == [
        (1, "A", 0, "prefill", 4),
        (1, "B", 1, "prefill", 2),
        (2, "A", 0, "decode", 1),
        (2, "B", None, "preempted", 0),
        (3, "B", 0, "recompute", 3),
    ]
    assert describe(bars(PREEMPTED)) == (
        "Timeline of 3 steps. A prefills 4, decodes 1 step. B prefills 2, is preempted and waits "
        "1 step, computes 3 again."
    )
    assert transitions(PREEMPTED) == Counter(
        {("new", "waiting"): 2, ("waiting", "running"): 3, ("running", "waiting"): 1}
        | {("running", "finished"): 1}
    )


def test_steps_are_timed_from_start_to_end_with_their_batches():
    assert [batch for batch, _ in timed_steps(PREEMPTED)] == [[(4, 4), (2, 2)], [(1, 5)], [(3, 3)]]
    assert [seconds for _, seconds in timed_steps(PREEMPTED)] == [0.0] * 3


def test_percentiles_are_values_that_occurred():
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert [percentile(values, share) for share in (0.2, 0.5, 0.99, 1.0)] == [1.0, 3.0, 5.0, 5.0]
    assert percentile([7.0], 0.5) == 7.0


def test_more_traffic_never_makes_the_tail_shorter_and_rates_share_requests():
    low, high = load_curve([5, 80], step_seconds(LLAMA_8B, H100), count=40)
    assert low.ttft[1] < high.ttft[1] and low.ttft[0] <= low.ttft[1]
    slow, fast = traffic(1.0, 9), traffic(3.0, 9)
    assert [(a.prompt, a.wanted) for a in slow] == [(a.prompt, a.wanted) for a in fast]
    for a, b in zip(slow, fast, strict=True):
        assert a.at == pytest.approx(3 * b.at)


def test_an_open_door_wastes_work_that_a_cap_does_not():
    crowd = [Arrival(f"r{i}", 0, 300, 60) for i in range(5)]
    fit, times, work = door_or_cap(crowd, step_seconds(LLAMA_8B, H100), (2, 5))
    assert fit == (2, 5) and work[0] > 1.0 and work[1] == 1.0
    assert times[1] == 1.0


def test_the_drawings_show_every_bar_and_refuse_an_empty_one():
    found = bars(PREEMPTED)
    by_request = gantt(found, title="one")
    (axes,) = by_request.axes
    assert len(axes.patches) == len(found)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["A", "B"]
    by_seat = gantt({"a": found, "b": found}, title="two", rows="seat", x="time")
    assert [len(axes.patches) for axes in by_seat.axes] == [2 + 4, 2 + 4]  # seats, then bars
    with pytest.raises(ValueError, match="panel 'none' must have at least one bar"):
        gantt({"none": []}, title="none")
    words = [t.get_text() for t in state_machine(transitions(PREEMPTED), title="s").axes[0].texts]
    assert any(text.endswith("1 ×") and "preempted" in text for text in words)
    figure = curves(Panel("x", "y", {"a": ([1, 2], [3, 4])}, log_y=True), title="t", line=3.5)
    assert len(figure.axes[0].lines) == 2


def test_the_load_view_is_well_formed_and_says_its_numbers():
    seconds = step_seconds(LLAMA_8B, H100)
    loads = {
        b: load_curve([10, 40], seconds, count=20, max_num_batched_tokens=b) for b in (64, 512)
    }
    views = [load_view(loads, rate=r, budget=b) for r, b in itertools.product((10, 40), loads)]
    assert len(set(views)) == 4
    for view, (rate, budget) in zip(views, itertools.product((10, 40), loads), strict=True):
        root = ET.fromstring(view)
        assert root.attrib["aria-label"].startswith(f"{rate} requests a second, budget {budget}")
        assert root.attrib["role"] == "img"
    here = next(load for load in loads[64] if load.rate == 40)
    assert f"p99 {here.ttft[1] * 1e3:.0f} ms" in views[2]
    assert str(here).startswith("40 a second: TTFT")


def test_workloads_are_the_same_for_the_same_seed():
    assert random_worlds(1, 3) == random_worlds(1, 3) != random_worlds(2, 3)
    for arrivals, options in random_worlds(random.Random(0).randint(0, 9), 50):
        assert max(a.prompt + a.wanted for a in arrivals) <= 4 * options["num_kv_blocks"]
