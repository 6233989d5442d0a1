"""Schedules as plain values: what the pictures of scheduling draw, and what claims check."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from minifer.course.figure_data import timeline_data
from minifer.course.pictures.schedule_run import Arrival, Batch, serve
from minifer.events import Event

BarKind = Literal["waiting", "prefill", "decode", "preempted", "recompute"]


@dataclass(frozen=True)
class Bar:
    """One request in one step. seat: its place among the running, lowest first; None: it has none.

    kind: "recompute" is prefill of tokens that a preemption had thrown away, "preempted" the wait
    for it. begin, end: seconds on the engine's clock.
    """

    name: str
    seat: int | None
    step: int
    begin: float
    end: float
    kind: BarKind
    num_tokens: int


def bars(events: Sequence[Event]) -> list[Bar]:
    """The bars of a timeline, in order of steps, from the events of any engine or scheduler."""
    happened: dict[int, list[Event]] = {}
    for event in events:
        happened.setdefault(event.step, []).append(event)
    seats: dict[str, int] = {}
    thrown: dict[str, int] = {}  # preempted → tokens it had computed at most
    reached: dict[str, int] = {}
    left: list[str] = []
    found, step = [], 0
    for span in timeline_data(events):
        if span.step != step:
            step = span.step
            for name in left:
                seats.pop(name, None)
            left = []
            for event in happened[step]:
                name = event.request_id or ""
                if event.name == "request.scheduled":
                    free = (seat for seat in range(len(seats) + 1) if seat not in seats.values())
                    seats.setdefault(name, next(free))
                elif event.name == "request.preempted":
                    seats.pop(name, None)
                    thrown[name] = max(thrown.get(name, 0), reached.get(name, 0))
                elif event.name == "request.finished":
                    left.append(name)
        kind: BarKind = span.kind
        if span.tokens:
            if span.tokens[0] < thrown.get(span.request_id, 0):
                kind = "recompute"
            reached[span.request_id] = span.tokens[1]
        elif span.request_id in thrown and span.request_id not in seats:
            kind = "preempted"
        count = span.tokens[1] - span.tokens[0] if span.tokens else 0
        seat = seats.get(span.request_id)
        found.append(Bar(span.request_id, seat, step, span.begin, span.end, kind, count))
    return found


_WORDS = {
    "waiting": "waits {steps}",
    "preempted": "is preempted and waits {steps}",
    "prefill": "prefills {tokens}",
    "recompute": "computes {tokens} again",
    "decode": "decodes {steps}",
}


def describe(found: Sequence[Bar]) -> str:
    """A timeline in words, a sentence a request: what an alternative text says."""
    sentences = [f"Timeline of {found[-1].step} steps."]
    for name in dict.fromkeys(bar.name for bar in found):
        phrases = []
        for kind, run in groupby((b for b in found if b.name == name), key=lambda b: b.kind):
            same = list(run)
            steps = f"{len(same)} step{'s' * (len(same) > 1)}"
            tokens = " and ".join(str(bar.num_tokens) for bar in same)
            phrases.append(_WORDS[kind].format(steps=steps, tokens=tokens))
        sentences.append(f"{name} {', '.join(phrases)}.")
    return " ".join(sentences)


def shares(events: Iterable[Event]) -> list[dict[str, int]]:
    """Request → tokens computed, for every step."""
    found: dict[int, dict[str, int]] = {}
    for span in timeline_data(events):
        share = found.setdefault(span.step, {})
        if span.tokens:
            share[span.request_id] = span.tokens[1] - span.tokens[0]
    return list(found.values())


def transitions(events: Iterable[Event]) -> Counter[tuple[str, str]]:
    """(state, next state) → how often: what every request did on its way through the scheduler."""
    states: dict[str, str] = {}
    counts: Counter[tuple[str, str]] = Counter()
    new_state = {
        "request.admitted": "waiting",
        "request.scheduled": "running",
        "request.preempted": "waiting",
        "request.finished": "finished",
    }
    for event in events:
        name, after = event.request_id or "", new_state.get(event.name)
        before = states.get(name, "new")
        if after is not None and before != after:
            counts[before, after] += 1
            states[name] = after
    return counts


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def door_or_cap(
    crowd: Sequence[Arrival], seconds: Callable[[Batch], float], fit: Sequence[int]
) -> tuple[Sequence[int], list[float], list[float]]:
    """Everybody in, or as many seats as requests fit into memory? crowd: equal requests.

    For each number in `fit` memory holds half a request more than that. Returns `fit`, then for
    each the time with an open door over the time with capped seats, and the tokens that the open
    door computes for each one needed.
    """
    first = crowd[0]
    blocks = -(-(first.prompt + first.wanted) // 16)
    needed = len(crowd) * (first.prompt + first.wanted - 1)
    times, work = [], []
    for seats in fit:
        size = int((seats + 0.5) * blocks)
        door = serve(crowd, seconds, num_kv_blocks=size)
        capped = serve(crowd, seconds, num_kv_blocks=size, max_num_seqs=seats)
        times.append(door.seconds / capped.seconds)
        work.append(door.num_computed / needed)
    return fit, times, work


@dataclass(frozen=True)
class Load:
    """Latency at one arrival rate, in seconds: (p50, p99) over requests."""

    rate: float
    ttft: tuple[float, float]
    tpot: tuple[float, float]

    def __str__(self) -> str:
        (a, b), (c, d) = self.ttft, self.tpot
        times = (
            f"TTFT {a * 1e3:3.0f} and {b * 1e3:3.0f} ms, TPOT {c * 1e3:.0f} and {d * 1e3:.0f} ms"
        )
        return f"{self.rate:g} a second: {times} (p50 and p99)"


def traffic(rate: float, count: int, *, seed: int = 3) -> list[Arrival]:
    """`count` requests that come independently, `rate` a second: mostly short, some long prompts.

    The same requests at every rate, closer together or further apart.
    """
    rng = random.Random(seed)
    at, found = 0.0, []
    for i in range(count):
        at += rng.expovariate(1.0) / rate
        prompt = rng.randint(1500, 4000) if rng.random() < 0.2 else rng.randint(64, 512)
        found.append(Arrival(f"r{i}", at, prompt, rng.randint(8, 48)))
    return found


def load_curve(
    rates: Iterable[float], seconds: Callable[[Batch], float], *, count: int = 80, **options: Any
) -> list[Load]:
    """Latency of the same requests at each of `rates` (a second). options: as of `serve`."""
    found = []
    for rate in rates:
        run = serve(traffic(rate, count), seconds, **options)
        ttft = [run.ttft(name) for name in run.arrivals]
        tpot = [run.tpot(name) for name in run.arrivals]
        p50, p99 = 0.5, 0.99
        found.append(
            Load(
                rate,
                (percentile(ttft, p50), percentile(ttft, p99)),
                (percentile(tpot, p50), percentile(tpot, p99)),
            )
        )
    return found
