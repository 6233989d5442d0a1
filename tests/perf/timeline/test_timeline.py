"""The model of time against cases worked out by hand, and what must hold for every schedule."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from test_trace import check_format

from minifer.kernels.mega.isa import Instruction, Op
from minifer.kernels.mega.schedule import Schedule, assign, build
from minifer.kernels.mega.shapes import MODELS, decode_shape
from minifer.perf.devices import DEVICES
from minifer.perf.timeline.decode import (
    AHEAD,
    COUNTERS,
    FUSED,
    FUSED_PDL,
    PREFETCH,
    UNFUSED,
    Assumptions,
    panel,
    useful_bytes,
)
from minifer.perf.timeline.launches import launches
from minifer.perf.timeline.model import (
    Machine,
    Task,
    Timeline,
    chrome_trace,
    from_timestamps,
    machine,
    simulate,
    task_of,
    tasks,
)

# Two SMs, 100 bytes/s together, 80 alone; a second of overhead.
TWO = Machine(programs=2, bandwidth=100.0, program_bandwidth=80.0, overhead=1.0)
TINY = decode_shape(MODELS["minifer-tiny"], batch=2, splits=2)


def times(timeline: Timeline) -> dict[str, tuple[int, float, float, float]]:
    return {s.task.name: (s.program, s.idle_from, s.start, s.end) for s in timeline.spans}


def three_tasks() -> list[list[Task]]:
    """A (100 bytes) and B (50) side by side; C (60), behind B, needs both."""
    a = Task("A", weights=100, signal=0)
    b = Task("B", weights=50, signal=0)
    c = Task("C", weights=60, wait=0, target=2)
    return [[a], [b, c]]


def tiny_schedule(programs: int = 5) -> Schedule:
    return assign(build(TINY, programs), programs)


# -- by hand


def test_two_programs_share_the_memory_and_one_alone_has_its_own_limit() -> None:
    """Both at 50/s until B has its 50 bytes at 1 s; A's other 50 at 80/s until 1.625 s; a second of
    overhead each; C's 60 bytes at 80/s: 0.75 s, and a second."""
    found = times(simulate(three_tasks(), TWO))
    assert found["B"] == pytest.approx((1, 0, 0, 2.0))
    assert found["A"] == pytest.approx((0, 0, 0, 2.625))
    assert found["C"] == pytest.approx((1, 2.0, 2.625, 4.375))


def test_prefetch_streams_while_the_program_waits_and_no_further() -> None:
    """C waits from 2 to 2.625 s: 40 of its bytes are there at 2.5 s, 20 are left: 0.25 s."""
    timeline = simulate(three_tasks(), replace(TWO, prefetch=40))
    assert times(timeline)["C"] == pytest.approx((1, 2.0, 2.625, 3.875))
    ((program, task, start, end),) = timeline.prefetched
    assert (program, task.name, start, end) == (1, "C", 2.0, pytest.approx(2.5))


def test_a_prefetch_that_is_under_way_goes_on_when_the_wait_ends() -> None:
    """All 60 may come early: 50 do so until 2.625 s, and the last 10 take 0.125 s more."""
    found = times(simulate(three_tasks(), replace(TWO, prefetch=60)))
    assert found["C"] == pytest.approx((1, 2.0, 2.625, 3.75))


def test_loads_ahead_start_when_the_bytes_of_the_task_before_are_there() -> None:
    """From 1 s on C's 60 bytes share the memory with A's last 50, at 50/s each: both are through
    when A is, at 2 s (A), and C, with 10 left at 80/s, at 2.125 s. A ends at 3 s; so does C's
    wait, and its second of overhead follows."""
    ahead = replace(TWO, prefetch=60, lookahead=True)
    assert times(simulate(three_tasks(), ahead))["C"] == pytest.approx((1, 2.0, 3.0, 4.0))


def test_prefetch_can_cost() -> None:
    """Two SMs fill this memory. A and B at 50/s, C0 and C2 then too: 2 + 1 + 2 + 1 s. With C2's 100
    bytes early, A and B get 33/s and take a second more, and C0 alone is no faster for it."""
    first = [Task(name, weights=100, signal=0) for name in "AB"]
    behind = [Task(name, weights=100, wait=0, target=2) for name in ("C0", "C2")]
    queues = [[first[0], behind[0]], [first[1]], [behind[1]]]
    three = Machine(programs=3, bandwidth=100.0, program_bandwidth=50.0, overhead=1.0)
    assert simulate(queues, three).seconds == pytest.approx(6.0)
    assert simulate(queues, replace(three, prefetch=100)).seconds == pytest.approx(7.0)


def test_only_weights_come_early() -> None:
    queues = three_tasks()
    queues[1][1] = queues[1][1]._replace(weights=0.0, other=60.0)
    assert times(simulate(queues, replace(TWO, prefetch=60)))["C"][3] == pytest.approx(4.375)


def test_a_launch_gap_lies_between_a_kernel_and_the_next_whoever_ended_last() -> None:
    """The gap counts from the last block's end: for the SM that ran it, and for one long idle."""
    first = [Task("A", weights=100, signal=0), Task("B", weights=50, signal=0)]
    second = [Task("A2", wait=0, target=2), Task("B2", wait=0, target=2)]
    timeline = simulate([list(q) for q in zip(first, second, strict=True)], replace(TWO, gap=0.5))
    found = times(timeline)
    assert found["A2"] == pytest.approx((0, 2.625, 3.125, 4.125))
    assert found["B2"] == pytest.approx((1, 2.0, 3.125, 4.125))


def test_the_shares_of_the_hand_made_case() -> None:
    """8.75 SM-seconds. Streaming 1.625 + 1 + 0.75, overhead 3. B waits from 2 to 2.625 s, when
    nobody streams; A has nothing left from 2.625 s on, of which C streams 0.75 s."""
    shares = simulate(three_tasks(), TWO).shares()
    assert shares == pytest.approx(
        {
            "stream": 3.375 / 8.75,
            "overhead": 3 / 8.75,
            "tail": 0.75 / 8.75,
            "bubble": (0.625 + 1) / 8.75,
        }
    )


def test_an_empty_queue_is_an_sm_that_waits_all_the_time() -> None:
    timeline = simulate([[Task("A", weights=80)], []], TWO)
    assert timeline.seconds == pytest.approx(2.0)
    assert timeline.shares() == pytest.approx(
        {"stream": 0.25, "overhead": 0.25, "tail": 0.25, "bubble": 0.25}
    )


def test_a_deadlock_is_named() -> None:
    one = [Task("A", wait=1, target=1, signal=0), Task("B", layer=3, wait=0, target=2)]
    with pytest.raises(
        ValueError, match=r"deadlock: program 0 waits at A of layer 0 for counter 1"
    ):
        simulate([one], TWO)
    with pytest.raises(
        ValueError, match=r"B of layer 3 for counter 0 to reach 2, which stays at 1"
    ):
        simulate([[one[0]._replace(wait=-1), one[1]]], TWO)


# -- bytes of a schedule


def test_the_bytes_of_a_step_are_its_weights_its_kv_and_its_partial_results() -> None:
    shape = decode_shape(MODELS["llama-1b"], batch=2, splits=4)
    queues = tasks(assign(build(shape, 132), 132), context=4096)
    found = [task for queue in queues for task in queue]
    embedded, heads = 2 * 2048 * 2, 2 * 16 * 8  # of EMBED; requests × layers × KV heads
    # Llama-3.2-1B has 1,235,814,400 parameters, 33 · 2048 of them norms.
    weights = 2 * (1_235_814_400 - 33 * 2048) + embedded
    assert sum(task.weights for task in found) == weights
    partial = 2 * 4 * heads * 4 * 4 * 65  # written and read: splits, 4 heads a group, 65 floats
    assert sum(task.other for task in found) == 2 * 4096 * 16 * 2 * 8 * 64 * 2 + partial
    assert useful_bytes(shape, 4096) == weights - embedded + 2 * 4096 * 32768


@pytest.mark.parametrize("fused", [True, False])
def test_launches_read_the_same_weights_and_kv_as_the_megakernel(fused: bool) -> None:
    mega = tasks(tiny_schedule(), 100)
    queues = launches(TINY, 5, 100, fused=fused)
    total = sum(task.weights for queue in queues for task in queue)
    assert total == pytest.approx(sum(task.weights for queue in mega for task in queue))
    for name in ("ATTENTION", "MERGE"):
        sums = [
            sum(task.other for queue in arm for task in queue if task.name == name)
            for arm in (queues, mega)
        ]
        assert sums[0] == sums[1] > 0


def test_the_launches_of_a_layer() -> None:
    def order(fused: bool) -> list[str]:
        queues = launches(TINY, 5, 100, fused=fused)
        seen = {t.signal: t.name for queue in queues for t in queue if t.layer == 1}
        return [seen[i] for i in sorted(seen)]

    assert order(True) == ["QKV", "RoPE", "ATTENTION", "MERGE", "OUTPUT", "GATE_UP", "DOWN"]
    assert order(False) == [
        *("norm", "QKV", "RoPE", "append", "ATTENTION", "MERGE", "OUTPUT", "residual"),
        *("norm", "gate", "up", "silu·mul", "DOWN", "residual"),
    ]


# -- what holds for every schedule


@pytest.mark.parametrize("policy", ["round_robin", "zig_zag", "list", "random"])
@pytest.mark.parametrize("sync", ["counters", "grid"])
def test_no_schedule_beats_the_memory_and_every_task_runs_once(policy: str, sync: str) -> None:
    schedule = assign(build(TINY, 5), 5, policy, sync, seed=3)
    queues = tasks(schedule, 100)
    chip = Machine(5, 1e9, 3e8, overhead=1e-6, prefetch=2048)
    timeline = simulate(queues, chip)
    assert timeline.num_bytes / chip.bandwidth <= timeline.seconds
    by_program = [[s.task for s in timeline.spans if s.program == p] for p in range(5)]
    assert by_program == [list(queue) for queue in queues]
    for span in timeline.spans:
        early = sum(b - a for p, t, a, b in timeline.prefetched if (p, t) == (span[0], span.task))
        floor = (span.task.weights + span.task.other) / chip.program_bandwidth - early
        assert span.end - span.start >= max(0.0, floor) + chip.overhead - 1e-12
        assert span.idle_from <= span.start
    assert sum(timeline.shares().values()) == pytest.approx(1)
    assert all(share >= -1e-9 for share in timeline.shares().values())
    # The bytes that went through the pipe are the bytes that were asked for.
    steps = [*timeline.streaming, (timeline.seconds, 0)]
    moved = sum(
        min(chip.bandwidth, active * chip.program_bandwidth) * (steps[i + 1][0] - time)
        for i, (time, active) in enumerate(steps[:-1])
    )
    assert moved == pytest.approx(timeline.num_bytes)


def test_a_task_starts_when_all_that_signal_its_counter_have_ended() -> None:
    timeline = simulate(tasks(tiny_schedule(), 100), Machine(5, 1e9, overhead=1e-6))
    last: dict[int, float] = {}
    for span in timeline.spans:
        last[span.task.signal] = max(last.get(span.task.signal, 0.0), span.end)
    for span in timeline.spans:
        ready = last[span.task.wait] if span.task.wait >= 0 else 0.0
        assert span.start == pytest.approx(max(ready, span.idle_from), abs=1e-15)


def test_more_overhead_is_never_faster_and_more_bandwidth_never_slower() -> None:
    queues = tasks(tiny_schedule(), 100)

    def seconds(overhead: float = 1e-6, bandwidth: float = 1e9) -> float:
        return simulate(queues, Machine(5, bandwidth, overhead=overhead)).seconds

    rising = [seconds(overhead=us * 1e-6) for us in (0, 0.5, 1, 2, 4)]
    assert rising == sorted(rising) and len(set(rising)) == 5
    falling = [seconds(bandwidth=b) for b in (1e9, 2e9, 4e9, math.inf)]
    assert falling == sorted(falling, reverse=True) and len(set(falling)) == 4


@pytest.mark.parametrize("overhead", [0.5, 2.5])
@pytest.mark.parametrize("tile", [16, 32])
def test_the_arms_come_in_their_order(overhead: float, tile: int) -> None:
    """On four layers of Llama-1B: a launch less is a launch saved, and prefetch never costs."""
    shape = replace(decode_shape(MODELS["llama-1b"], splits=2, tile=tile), layers=4)
    assumed = Assumptions(overhead=overhead * 1e-6)
    arms = (UNFUSED, FUSED, FUSED_PDL, COUNTERS, PREFETCH, AHEAD)
    seconds = [
        panel(arm, shape, DEVICES["H100-SXM"], 512, assumed).timeline.seconds for arm in arms
    ]
    assert seconds == sorted(seconds, reverse=True) and len(set(seconds)) == len(arms)


def test_list_scheduling_gives_no_program_two_pieces_where_another_has_none() -> None:
    """It once started instructions before they were ready, and took such programs for free."""
    shape = decode_shape(MODELS["llama-1b"], splits=2)
    schedule = assign(build(shape, 132), 132, "list")
    for op in (Op.QKV, Op.OUTPUT, Op.GATE_UP, Op.DOWN):
        counts = [sum(i.op == op and i.layer == 3 for i in queue) for queue in schedule.queues]
        assert set(counts) <= {0, 1}, f"{op.name}: {max(counts)} on one program"


# -- the chips


def test_a_chip_becomes_a_machine() -> None:
    h100 = machine(DEVICES["H100-SXM"], achievable=0.5, in_flight=7000, latency=1e-6, prefetch=9)
    assert h100 == Machine(132, 3.35e12 / 2, 7e9, prefetch=9)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: Machine(0, 1.0), "programs must be above 0, got 0"),
        (lambda: Machine(1, -1.0), r"bandwidth must be above 0, got -1\.0"),
        (lambda: Machine(1, 1.0, prefetch=-1), "prefetch must be finite and at least 0, got -1"),
        (lambda: Machine(1, 1.0, overhead=math.inf), "overhead must be finite and at least 0"),
        (lambda: machine(DEVICES["Groq-LPU-v1"]), "device must be a GPU with SMs, got Groq-LPU-v1"),
        (lambda: machine(DEVICES["T4"], achievable=1.5), r"achievable must be in \(0, 1\], got 1"),
        (lambda: machine(DEVICES["T4"], latency=0), "in_flight and latency must be above 0"),
        (lambda: simulate([[], [], []], TWO), "queues must be at most 2, one a program"),
        (lambda: panel("x", TINY, DEVICES["T4"], 1), "arm must be one of un-fused, .*, got 'x'"),
        (lambda: panel(FUSED, TINY, DEVICES["T4"], 0), "context must be at least 1, got 0"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()


def test_attention_that_is_not_split_leaves_no_partial_results() -> None:
    for splits, partial in ((1, 0.0), (2, 4.0 * TINY.group * (TINY.head_dim + 1))):
        shape = decode_shape(MODELS["minifer-tiny"], batch=2, splits=splits)
        task = task_of(Instruction(Op.ATTENTION, end=1), shape, 100, 2.0, 2.0)
        assert task.other == 100 / splits * 2 * shape.head_dim * 2 + partial


# -- measured timestamps


def test_timestamps_become_the_spans_they_were_made_of() -> None:
    schedule = tiny_schedule()
    modelled = simulate(tasks(schedule, 100), Machine(5, 1e9, overhead=1e-6))
    longest = max(map(len, schedule.queues)) + 1  # the kernel keeps one for HALT
    stamps = [[[0, 0, 0]] * longest for _ in schedule.queues]
    at = [0] * 5
    for span in modelled.spans:  # a queue's spans end in its order
        times_ns = [7_000_000_000 + round(t * 1e9) for t in span[2:]]
        stamps[span.program][at[span.program]] = times_ns
        at[span.program] += 1
    measured = from_timestamps(stamps, schedule, 100)
    assert not measured.modelled and measured.overhead is None
    assert len(measured.spans) == len(modelled.spans)
    key = lambda span: (span.program, span.start, span.end)  # noqa: E731
    for found, wanted in zip(
        sorted(measured.spans, key=key), sorted(modelled.spans, key=key), strict=True
    ):
        assert found[:2] == wanted[:2]
        assert found[2:] == pytest.approx(wanted[2:], abs=1e-9)
    assert set(measured.shares()) == {"work", "wait"}
    check_format(chrome_trace([measured]))


def test_timestamps_may_be_a_tensor() -> None:
    torch = pytest.importorskip("torch")
    schedule = tiny_schedule(1)
    count = schedule.num_instructions
    stamps = 5 + torch.arange(3 * count, dtype=torch.int64).reshape(1, count, 3)
    assert from_timestamps(stamps, schedule, 100).seconds == pytest.approx((3 * count - 1) * 1e-9)


def test_timestamps_that_are_missing_or_run_backwards_are_refused() -> None:
    schedule = tiny_schedule(1)
    good = [[[1 + i, 2 + i, 3 + i] for i in range(schedule.num_instructions)]]
    with pytest.raises(ValueError, match="timestamps must be of 1 programs, got 2"):
        from_timestamps(good * 2, schedule, 100)
    with pytest.raises(ValueError, match=r"timestamps\[0\] must hold \d+ instructions, got 4"):
        from_timestamps([good[0][:4]], schedule, 100)
    for bad in ([3, 2, 4], [0, 0, 0], [1, 2]):
        good[0][5] = bad
        with pytest.raises(ValueError, match=r"timestamps\[0, 5\] must be 3 rising times above 0"):
            from_timestamps(good, schedule, 100)


def test_an_instruction_that_only_arrives_pays_the_overhead() -> None:
    item = Instruction(Op.NOTHING)
    timeline = simulate([[task_of(item, TINY, 100, 2.0, 2.0)]], replace(TWO, overhead=0.25))
    assert timeline.seconds == 0.25 and timeline.num_bytes == 0
