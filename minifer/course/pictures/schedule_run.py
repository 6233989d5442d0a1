"""A scheduler on a virtual clock, without a model: `serve` the engine's own, `play` anybody's.

A step's time comes from a function of its batch, so a second of traffic takes milliseconds and
every run is repeatable. Both report the events that an engine reports.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from minifer.config import EngineConfig, ModelConfig
from minifer.events import Event, EventBus, ListSink
from minifer.kv.manager import KVCacheManager
from minifer.outputs import RequestGroup
from minifer.perf.costs import ElementBytes, step_cost
from minifer.perf.devices import Device
from minifer.request import Request, SamplingParams
from minifer.scheduling.plan import SchedulePlan
from minifer.scheduling.scheduler import Scheduler

Batch = Sequence[tuple[int, int]]  # (tokens of this step, length after it), a request


@dataclass(frozen=True)
class Arrival:
    """One request of a workload. at: seconds. prompt, wanted: tokens it brings and asks for."""

    name: str
    at: float
    prompt: int
    wanted: int
    priority: int = 0


@dataclass(frozen=True)
class VirtualRun:
    """A workload served to the end. plans: of each step, request → tokens it computed.

    token_times: request → seconds at which each of its tokens was drawn.
    """

    arrivals: Mapping[str, Arrival]
    plans: list[dict[str, int]]
    token_times: Mapping[str, list[float]]
    events: list[Event]

    @property
    def seconds(self) -> float:
        """When the last token was drawn."""
        return max(times[-1] for times in self.token_times.values())

    @property
    def num_computed(self) -> int:
        """Tokens that went through the model; those computed twice count twice."""
        return sum(sum(plan.values()) for plan in self.plans)

    @property
    def num_preemptions(self) -> int:
        return sum(event.name == "request.preempted" for event in self.events)

    def ttft(self, name: str) -> float:
        """Seconds from arrival to the first token."""
        return self.token_times[name][0] - self.arrivals[name].at

    def gaps(self, name: str) -> list[float]:
        """Seconds between one token and the next (ITL), in order."""
        times = self.token_times[name]
        return [b - a for a, b in pairwise(times)]

    def gap_series(self, name: str) -> tuple[list[float], list[float]]:
        """When each token after the first came, and after how long; both in milliseconds."""
        return [t * 1e3 for t in self.token_times[name][1:]], [g * 1e3 for g in self.gaps(name)]

    def tpot(self, name: str) -> float:
        """Mean of the gaps; 0 for a request of one token."""
        gaps = self.gaps(name)
        return sum(gaps) / len(gaps) if gaps else 0.0


def step_seconds(
    model: ModelConfig, device: Device, *, element: ElementBytes | None = None
) -> Callable[[Batch], float]:
    """The roofline's floor of a step on a chip, as a function of its batch.

    element: bytes of an element, bfloat16 throughout by default.
    """

    def seconds(batch: Batch) -> float:
        cost = step_cost(model, batch, element=element).total()
        return device.seconds(cost.flops, cost.bytes)

    return seconds


def serve(
    arrivals: Iterable[Arrival],
    seconds: Callable[[Batch], float],
    *,
    watch: Callable[[SchedulePlan, Scheduler, list[Request]], None] | None = None,
    limit: int = 20_000,
    **options: Any,
) -> VirtualRun:
    """Let the engine's scheduler serve a workload on a virtual clock, without a model.

    watch: called after every step with its plan, the scheduler and all requests so far. options:
    fields of `EngineConfig`; by default blocks of 16 tokens, 4096 of them, and no prefix cache.
    Prompts share no tokens. Raises `RuntimeError` after `limit` steps.
    """
    defaults = {"block_size": 16, "num_kv_blocks": 4096, "enable_prefix_caching": False}
    config = EngineConfig(**{**defaults, **options})
    assert config.num_kv_blocks is not None  # a default above
    now, sink, plans = 0.0, ListSink(), []
    requests: list[Request] = []
    bus = EventBus(sink, clock=lambda: now)
    kv = KVCacheManager(
        config.num_kv_blocks,
        config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        events=bus,
    )
    scheduler = Scheduler(config, kv, bus)
    coming = sorted(arrivals, key=lambda arrival: arrival.at)
    times: dict[str, list[float]] = {arrival.name: [] for arrival in coming}
    known = {arrival.name: arrival for arrival in coming}
    while coming or scheduler.waiting or scheduler.running:
        if not scheduler.waiting and not scheduler.running:
            now = max(now, coming[0].at)
        while coming and coming[0].at <= now:
            requests.append(_add(coming.pop(0), len(requests), scheduler, bus))
        bus.step += 1
        if bus.step > limit:
            raise RuntimeError(f"limit must be enough steps, {limit} were not")
        bus.emit("engine", "step.started")
        plan = scheduler.schedule()
        kv.prepare(plan)
        now += seconds([(entry.num_new, entry.end) for entry in plan.scheduled])
        scheduler.advance(plan)
        for entry in plan.scheduled:
            if entry.is_last_chunk:
                _draw(entry.request, times[entry.request.request_id], now, scheduler, bus)
        plans.append(plan.tokens_by_request())
        bus.emit("engine", "step.postprocessed")
        if watch is not None:
            watch(plan, scheduler, requests)
    return VirtualRun(known, plans, times, sink.events)


def play(
    arrivals: Iterable[Arrival],
    schedule: Callable[[deque[Any], list[Any]], dict[Any, int]],
    seconds: Callable[[Batch], float],
    request: Callable[[str, int, int], Any],
) -> VirtualRun:
    """Serve a workload with a scheduler of one's own, on the clock of `serve`.

    schedule: given the waiting (a deque) and the running (a list), moves requests between them and
    returns request → new tokens. request: makes one of (name, prompt, wanted); it must have the
    attributes name, wanted, computed, drawn and behind. The events are those of an engine.
    """
    coming = deque(sorted(arrivals, key=lambda arrival: arrival.at))
    known = {arrival.name: arrival for arrival in coming}
    times: dict[str, list[float]] = {name: [] for name in known}
    waiting, running, plans, now, sink = deque[Any](), list[Any](), [], 0.0, ListSink()
    bus = EventBus(sink, clock=lambda: now)
    while coming or waiting or running:
        if not waiting and not running:
            now = max(now, coming[0].at)  # nobody is there: the clock jumps
        while coming and coming[0].at <= now:
            new = coming.popleft()
            waiting.append(request(new.name, new.prompt, new.wanted))
            bus.emit("scheduling", "request.admitted", new.name, (0, new.prompt))
        bus.step += 1
        bus.emit("engine", "step.started")
        before = list(running)
        plan = schedule(waiting, running)
        for r in [r for r in before if r in waiting]:
            bus.emit("scheduling", "request.preempted", r.name)
        for r, count in plan.items():
            span = (r.computed, r.computed + count)
            bus.emit("scheduling", "request.scheduled", r.name, span)
        now += seconds([(count, r.computed + count) for r, count in plan.items()])
        for r, count in plan.items():
            r.computed += count
            if r.behind == 0:  # whoever has caught up draws a token
                r.drawn += 1
                times[r.name].append(now)
                if r.drawn == r.wanted:
                    running.remove(r)
                    bus.emit("postprocessing", "request.finished", r.name)
        bus.emit("engine", "step.postprocessed")
        plans.append({r.name: count for r, count in plan.items()})
    return VirtualRun(known, plans, times, sink.events)


def _add(arrival: Arrival, index: int, scheduler: Scheduler, bus: EventBus) -> Request:
    params = SamplingParams(max_tokens=arrival.wanted, priority=arrival.priority)
    first = index << 32  # no two prompts have a token in common
    prompt = list(range(first, first + arrival.prompt))
    request = Request(arrival.name, prompt, params, RequestGroup(arrival.name, None))
    scheduler.add(request)
    bus.emit("scheduling", "request.admitted", arrival.name, (0, arrival.prompt))
    return request


def _draw(
    request: Request, times: list[float], now: float, scheduler: Scheduler, bus: EventBus
) -> None:
    times.append(now)
    request.token_ids.append(request.token_ids[0] + request.num_tokens)
    if request.num_output_tokens == request.params.max_tokens:
        scheduler.finish(request)
        bus.emit("postprocessing", "request.finished", request.request_id)


def random_arrivals(rng: random.Random, count: int, *, longest: int = 40) -> list[Arrival]:
    """Requests at random moments of a short while, each of at most `longest` tokens in all."""
    found = []
    for i in range(count):
        prompt = rng.randint(1, longest - 1)
        wanted = rng.randint(1, longest - prompt)
        found.append(Arrival(f"r{i}", rng.choice([0.0, rng.uniform(0, 0.05)]), prompt, wanted))
    return found


def random_worlds(seed: int, count: int) -> list[tuple[list[Arrival], dict[str, int]]]:
    """Workloads with options of `serve`: budget, seats, blocks, block size, in this order."""
    rng = random.Random(seed)
    worlds = []
    for _ in range(count):
        arrivals = random_arrivals(rng, rng.randint(1, 8))
        options = {
            "max_num_batched_tokens": rng.randint(1, 24),
            "max_num_seqs": rng.randint(1, 5),
            "num_kv_blocks": rng.randint(10, 24),  # one request of 40 tokens fits
            "block_size": 4,
        }
        worlds.append((arrivals, options))
    return worlds
