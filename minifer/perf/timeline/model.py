"""What a schedule looks like in time: a model of the GPU's memory, and measured timestamps.

Every program (one an SM) walks its queue. A task waits for its counter, streams its bytes, pays a
fixed overhead (fill the pipeline, reduce, store, signal, fetch the next instruction), signals.

    program 3  |· · wait · ·|=== stream ===|overhead|· wait ·|== stream …
               idle_from    start                  end

The memory is a pipe that the streaming programs share. Each of k programs that stream at one moment
gets

    rate = min(program_bandwidth, bandwidth / k)          bytes a second

where program_bandwidth = bytes in flight ÷ latency (Little's law): what one SM can draw however
idle the rest is. So a last, half-empty wave is slow only once too few SMs are left to fill the
pipe. With prefetch, up to `prefetch` bytes of a task's weights stream while it waits, because
weights depend on nothing. That is mostly a gain, and can be a loss: what comes early takes
bandwidth from those whom all the others wait for.

A second pipe of the same form stands for what the chip keeps in its shared cache: tasks marked
`cached` draw from it and leave the memory to the others.

This is a MODEL: nothing here has been fitted to a measurement. It leaves out arithmetic, L2 hits
of activations (they cost nothing), counter traffic, clocks, memory refresh and anything that varies
from run to run. `from_timestamps` turns what a GPU wrote down into the same spans.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minifer.kernels.mega.isa import DecodeShape, Instruction, Op
from minifer.kernels.mega.schedule import Schedule
from minifer.perf.devices import Device

LATENCY = 0.7e-6  # seconds from a load to its bytes under load: an assumption, see `machine`
IN_FLIGHT = 48 * 1024  # bytes an SM has under way: three stages of a [16, 512] tile of bfloat16


class Task(NamedTuple):
    """One piece of work of a program, whichever kernel it belongs to.

    weights: bytes that depend on nothing, so that they may stream early. other: bytes of KV cache
    and partial results. wait, target, signal, amount: as in `isa.Instruction`. cached: its bytes
    come from the cache and not from memory.
    """

    name: str
    layer: int = 0
    weights: float = 0.0
    other: float = 0.0
    wait: int = -1
    target: int = 0
    signal: int = -1
    amount: int = 1
    cached: bool = False


class Span(NamedTuple):
    """A task in time, modelled or measured. Seconds.

    idle_from: the program came to it. start: its counter had reached the target. end: it had
    signalled.
    """

    program: int
    task: Task
    idle_from: float
    start: float
    end: float


@dataclass(frozen=True)
class Machine:
    """Programs that share a memory. Seconds, bytes, bytes a second.

    gap: from the moment a counter reaches its target to the start of those who wait for it: 0 in a
    megakernel, the launch of a kernel elsewhere. lookahead: a task's prefetch starts when the bytes
    of the task before it are there, not when that task has ended (a warp of its own for loads).
    cache_*: of what is read from the cache. Raises `ValueError` for numbers that no machine has.
    """

    programs: int
    bandwidth: float
    program_bandwidth: float = math.inf
    overhead: float = 1.2e-6
    prefetch: float = 0.0
    gap: float = 0.0
    lookahead: bool = False
    cache_bandwidth: float = math.inf
    cache_program_bandwidth: float = math.inf

    def __post_init__(self) -> None:
        rates = [f"{kind}{part}bandwidth" for kind in ("", "cache_") for part in ("", "program_")]
        for name in ("programs", *rates):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("overhead", "prefetch", "gap"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {getattr(self, name)}")


def machine(
    device: Device,
    *,
    achievable: float = 1.0,
    in_flight: float = IN_FLIGHT,
    latency: float = LATENCY,
    **options: Any,
) -> Machine:
    """A chip as a `Machine`; `options` are its other fields.

    achievable: the part of the data sheet's bandwidth that a plain copy reaches. Raises
    `ValueError` for a chip without SMs.
    """
    if device.num_sms is None:
        raise ValueError(f"device must be a GPU with SMs, got {device.name}")
    if not 0 < achievable <= 1:
        raise ValueError(f"achievable must be in (0, 1], got {achievable}")
    if not (in_flight > 0 and latency > 0):
        raise ValueError(f"in_flight and latency must be above 0, got {in_flight}, {latency}")
    return Machine(
        device.num_sms, achievable * device.memory_bandwidth, in_flight / latency, **options
    )


@dataclass(frozen=True)
class Timeline:
    """Spans in the order in which they ended, and how many programs streamed when.

    overhead: seconds of it in each span; None where it was measured with the rest. streaming:
    (time, programs that stream from then on), and prefetched: (program, task, from, to) of what
    streamed before its task had started; both empty where that was not measured.
    """

    name: str
    programs: int
    spans: tuple[Span, ...]
    overhead: float | None = None
    streaming: tuple[tuple[float, int], ...] = ()
    prefetched: tuple[tuple[int, Task, float, float], ...] = ()
    modelled: bool = True

    @property
    def seconds(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    @property
    def num_bytes(self) -> float:
        """Read from memory."""
        tasks = (span.task for span in self.spans if not span.task.cached)
        return sum(task.weights + task.other for task in tasks)

    def share_of(self, bandwidth: float) -> float:
        """Bytes a second, as a part of `bandwidth`."""
        return self.num_bytes / (bandwidth * self.seconds)

    def shares(self) -> dict[str, float]:
        """Where the SMs' time goes; adds up to 1.

        stream and overhead; of the rest, tail: the program waits while others still stream; bubble:
        it waits and nobody streams, so the memory is idle. Measured spans know work and wait.
        """
        total = self.programs * self.seconds
        work = sum(span.end - span.start for span in self.spans) / total
        if self.overhead is None:
            return {"work": work, "wait": 1 - work}
        overhead = self.overhead * len(self.spans) / total
        idle = _IdleMemory(self.streaming)
        ended = [0.0] * self.programs
        bubble = 0.0
        for span in self.spans:
            bubble += idle.between(span.idle_from, span.start)
            ended[span.program] = max(ended[span.program], span.end)
        bubble += sum(idle.between(end, self.seconds) for end in ended)  # nothing left to do
        return {
            "stream": work - overhead,
            "overhead": overhead,
            "tail": 1 - work - bubble / total,
            "bubble": bubble / total,
        }


class _IdleMemory:
    """Time without any stream, as a running sum."""

    def __init__(self, streaming: Sequence[tuple[float, int]]) -> None:
        self._times, self._sums, self._idle = [0.0], [0.0], [True]
        for time, active in streaming:
            self._sums.append(self.until(time))
            self._times.append(time)
            self._idle.append(active == 0)

    def until(self, time: float) -> float:
        at = bisect_right(self._times, time) - 1
        return self._sums[at] + (time - self._times[at] if self._idle[at] else 0.0)

    def between(self, start: float, end: float) -> float:
        return self.until(end) - self.until(start)


# -- from a schedule to tasks


def tasks(
    schedule: Schedule, context: int, *, weight_bytes: float = 2.0, kv_bytes: float = 2.0
) -> list[list[Task]]:
    """The queues of a megakernel: one task an instruction.

    context: S, tokens attended to, in each request. weight_bytes, kv_bytes: of one element.
    """
    return [
        [task_of(item, schedule.shape, context, weight_bytes, kv_bytes) for item in queue]
        for queue in schedule.queues
    ]


def task_of(
    item: Instruction, shape: DecodeShape, context: int, weight_bytes: float, kv_bytes: float
) -> Task:
    """An instruction with the bytes it streams. Partial results are float32."""
    partial = 4.0 * shape.group * (shape.head_dim + 1)  # one split's output and log-sum-exp
    other = 0.0
    if item.op == Op.ATTENTION:
        other = context / shape.splits * 2 * shape.head_dim * kv_bytes
        other += partial if shape.splits > 1 else 0.0
    elif item.op == Op.MERGE:
        other = partial * shape.splits
    weights = shape.weight_bytes(item, weight_bytes)
    return Task(Op(item.op).name, item.layer, weights, other, *item[-4:])


# -- the model


@dataclass
class _Program:
    """Where a program is in its queue, and the one stream it has open."""

    queue: Sequence[Task]
    at: int = -1  # of the task it waits for, or works on
    idle_from: float = 0.0
    started: float | None = None
    fetching: int = 0  # of the task that its stream belongs to
    got: float = 0.0  # bytes of that task that arrived before this stream
    opened: float | None = None  # the service level at which the stream began; None: no stream
    opened_at: float = 0.0  # seconds
    version: int = 0  # of the stream's place among the ends


@dataclass
class _Memory:
    """A pipe shared equally. Its level is the bytes that one stream open since the start has had:
    so a stream opened at level s with n bytes to go ends at level s + n, whoever comes and goes."""

    bandwidth: float
    program_bandwidth: float
    level: float = 0.0
    active: int = 0
    ends: list[tuple[float, int, int]] = field(default_factory=list)  # level, program, version
    history: list[tuple[float, int]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return min(self.program_bandwidth, self.bandwidth / self.active)

    def change(self, time: float, by: int) -> None:
        self.active += by
        if self.history and self.history[-1][0] == time:
            self.history.pop()
        self.history.append((time, self.active))


def simulate(
    queues: Sequence[Sequence[Task]], machine: Machine, name: str = "megakernel"
) -> Timeline:
    """Run the queues through the model, one queue a program.

    Raises `ValueError` when there are more queues than programs, and when they deadlock.
    """
    if len(queues) > machine.programs:
        raise ValueError(f"queues must be at most {machine.programs}, one a program")
    return _Simulation(queues, machine).run(name)


class _Simulation:
    def __init__(self, queues: Sequence[Sequence[Task]], machine: Machine) -> None:
        self.machine = machine
        self.memory = _Memory(machine.bandwidth, machine.program_bandwidth)
        self.cache = _Memory(machine.cache_bandwidth, machine.cache_program_bandwidth)
        self.programs = [_Program(queue) for queue in queues]
        self.counters: dict[int, int] = {}
        self.signalled: dict[int, float] = {}  # counter → the last time
        self.waiting: dict[int, list[int]] = {}  # counter → programs
        self.clock = 0.0
        self.timers: list[tuple[float, int, bool]] = []  # time, program, True: its task has ended
        self.spans: list[Span] = []
        self.prefetched: list[tuple[int, Task, float, float]] = []

    def run(self, name: str) -> Timeline:
        for index in range(len(self.programs)):
            self._arrive(index)
        while True:
            stream_at, pipe = self._next_end(self.memory)
            if self.cache.ends:
                cached_at, cache = self._next_end(self.cache)
                if cached_at < stream_at:
                    stream_at, pipe = cached_at, cache
            if self.timers and self.timers[0][0] <= stream_at:
                time, index, ended = heapq.heappop(self.timers)
                self._advance(time)
                (self._end if ended else self._start)(index)
            elif pipe is not None:
                self._advance(stream_at)
                pipe.level, index, _ = heapq.heappop(pipe.ends)
                self._stream_ended(index)
            else:
                break
        self._check_all_done()
        return Timeline(
            name,
            self.machine.programs,
            tuple(self.spans),
            self.machine.overhead,
            tuple(self.memory.history),
            tuple(self.prefetched),
        )

    def _next_end(self, pipe: _Memory) -> tuple[float, _Memory | None]:
        """When the first of a pipe's streams ends; never, of no pipe, if none is open."""
        ends = pipe.ends
        while ends and ends[0][2] != self.programs[ends[0][1]].version:
            heapq.heappop(ends)  # its stream was given more to do
        if not ends:
            return math.inf, None
        return self.clock + max(0.0, ends[0][0] - pipe.level) / pipe.rate, pipe

    def _advance(self, time: float) -> None:
        for pipe in (self.memory, self.cache):
            if pipe.active:
                pipe.level += (time - self.clock) * pipe.rate
        self.clock = time

    def _pipe(self, program: _Program) -> _Memory:
        """Where the bytes that a program fetches come from."""
        return self.cache if program.queue[program.fetching].cached else self.memory

    def _arrive(self, index: int) -> None:
        """A program comes to the next task of its queue."""
        program = self.programs[index]
        program.at, program.idle_from, program.started = program.at + 1, self.clock, None
        if program.at >= len(program.queue):
            return
        if program.fetching != program.at:
            program.fetching, program.got = program.at, 0.0
        task = program.queue[program.at]
        if task.wait >= 0 and self.counters.get(task.wait, 0) < task.target:
            self.waiting.setdefault(task.wait, []).append(index)
            self._prefetch(index)
            return
        start = self.signalled.get(task.wait, -math.inf) + self.machine.gap
        if start <= self.clock:
            self._start(index)
        else:
            heapq.heappush(self.timers, (start, index, False))
            self._prefetch(index)

    def _prefetch(self, index: int) -> None:
        program = self.programs[index]
        early = min(self.machine.prefetch, program.queue[program.fetching].weights)
        if early > program.got and program.opened is None:
            self._open(index, early)

    def _open(self, index: int, goal: float) -> None:
        """Stream until `goal` bytes of the task are there."""
        program = self.programs[index]
        memory = self._pipe(program)
        if program.opened is None:
            program.opened, program.opened_at = memory.level - program.got, self.clock
            memory.change(self.clock, 1)
        program.version += 1
        heapq.heappush(memory.ends, (program.opened + goal, index, program.version))

    def _start(self, index: int) -> None:
        """The counter of the program's task has reached its target."""
        program = self.programs[index]
        if program.opened is not None:
            self._note_prefetch(index)
        program.started = self.clock
        task = program.queue[program.at]
        if program.opened is None and program.got >= task.weights + task.other:
            self._bytes_are_there(index)
        else:
            self._open(index, task.weights + task.other)  # or let the prefetch go on

    def _stream_ended(self, index: int) -> None:
        program = self.programs[index]
        memory = self._pipe(program)
        assert program.opened is not None
        program.got, program.opened = memory.level - program.opened, None
        memory.change(self.clock, -1)
        if program.fetching == program.at and program.started is not None:
            self._bytes_are_there(index)
        else:
            self._note_prefetch(index)

    def _note_prefetch(self, index: int) -> None:
        program = self.programs[index]
        task = program.queue[program.fetching]
        self.prefetched.append((index, task, program.opened_at, self.clock))

    def _bytes_are_there(self, index: int) -> None:
        program = self.programs[index]
        heapq.heappush(self.timers, (self.clock + self.machine.overhead, index, True))
        if self.machine.lookahead and program.at + 1 < len(program.queue):
            program.fetching, program.got = program.at + 1, 0.0
            self._prefetch(index)

    def _end(self, index: int) -> None:
        """The overhead is over: signal, and let those go who waited for it."""
        program = self.programs[index]
        task = program.queue[program.at]
        assert program.started is not None
        self.spans.append(Span(index, task, program.idle_from, program.started, self.clock))
        if task.signal >= 0:
            count = self.counters[task.signal] = self.counters.get(task.signal, 0) + task.amount
            self.signalled[task.signal] = self.clock
            still = []
            for other in self.waiting.pop(task.signal, []):
                if count < self.programs[other].queue[self.programs[other].at].target:
                    still.append(other)
                else:
                    heapq.heappush(self.timers, (self.clock + self.machine.gap, other, False))
            if still:
                self.waiting[task.signal] = still
        self._arrive(index)

    def _check_all_done(self) -> None:
        for index, program in enumerate(self.programs):
            if program.at < len(program.queue):
                task = program.queue[program.at]
                raise ValueError(
                    f"deadlock: program {index} waits at {task.name} of layer {task.layer} for "
                    f"counter {task.wait} to reach {task.target}, which stays at "
                    f"{self.counters.get(task.wait, 0)}"
                )


# -- measured


def from_timestamps(
    timestamps: Any, schedule: Schedule, context: int, name: str = "megakernel"
) -> Timeline:
    """What a GPU wrote down, as the same spans.

    timestamps: integers [programs, at least the longest queue, 3], nanoseconds of one clock: before
    an instruction's wait, after it, at its end; entries beyond a queue are ignored. Times count
    from the earliest. Raises `ValueError` for missing entries and for time that runs backwards.
    """
    rows = timestamps.tolist() if hasattr(timestamps, "tolist") else timestamps
    queues = tasks(schedule, context)
    if len(rows) != len(queues):
        raise ValueError(f"timestamps must be of {len(queues)} programs, got {len(rows)}")
    spans = []
    for program, (queue, written) in enumerate(zip(queues, rows, strict=True)):
        if len(written) < len(queue):
            raise ValueError(
                f"timestamps[{program}] must hold {len(queue)} instructions, got {len(written)}"
            )
        for i, (task, stamps) in enumerate(zip(queue, written, strict=False)):
            if len(stamps) != 3 or sorted(stamps) != list(stamps) or stamps[0] <= 0:
                raise ValueError(
                    f"timestamps[{program}, {i}] must be 3 rising times above 0, got {stamps}"
                )
            spans.append((program, task, *stamps))
    origin = min((span[2] for span in spans), default=0)
    measured = [Span(p, task, *((t - origin) / 1e9 for t in times)) for p, task, *times in spans]
    measured.sort(key=lambda span: span.end)
    return Timeline(name, len(queues), tuple(measured), modelled=False)


# -- for Perfetto


def chrome_trace(timelines: Iterable[Timeline]) -> dict[str, Any]:
    """Timelines as one JSON-ready Chrome trace: a process each, a thread a program, microseconds.

    Trace Event Format: see minifer/trace.py. Waits are slices too. A modelled timeline also has a
    counter of the programs that stream.
    """
    names: list[dict[str, Any]] = []
    timed: list[dict[str, Any]] = []

    def ts(seconds: float) -> float:
        return round(seconds * 1e6, 3)

    for pid, timeline in enumerate(timelines, 1):
        kind = "modelled" if timeline.modelled else "measured"
        common: dict[str, Any] = {"ph": "M", "pid": pid, "ts": 0}
        title = {"name": f"{timeline.name} ({kind})"}
        names.append({**common, "tid": 0, "name": "process_name", "args": title})
        for program in range(timeline.programs):
            thread = {**common, "tid": program, "name": "thread_name"}
            names.append({**thread, "args": {"name": f"SM {program}"}})
            order = {**thread, "name": "thread_sort_index"}
            names.append({**order, "args": {"sort_index": program}})
        for span in timeline.spans:
            times = [ts(t) for t in (span.idle_from, span.start, span.end)]
            base = {"ph": "X", "pid": pid, "tid": span.program}
            if times[1] > times[0]:
                wait = {"name": "wait", "ts": times[0], "dur": round(times[1] - times[0], 3)}
                timed.append(base | wait | {"args": {"for": span.task.name}})
            args = {"layer": span.task.layer, "bytes": span.task.weights + span.task.other}
            work = {"name": span.task.name, "ts": times[1], "dur": round(times[2] - times[1], 3)}
            timed.append(base | work | {"args": args})
        for time, active in timeline.streaming:
            values = {"name": "streaming SMs", "args": {"SMs": active}}
            timed.append({"ph": "C", "pid": pid, "tid": 0, "ts": ts(time), **values})
    timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return {"traceEvents": names + timed, "displayTimeUnit": "ns"}
