"""Serves a workload with the real engine, in real time, and keeps the log.

What is simulated can be checked against such a log (`validate.py`): the same arrivals, on this
machine.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from types import NoneType
from typing import Any

from minifer.engine import Engine
from minifer.events import Event, ListSink
from minifer.perf.steps import busy_clock
from minifer.sampling_params import SamplingParams
from minifer.simulation.calibration.step_log import CONFIG, DUE
from minifer.simulation.workloads.arrivals import BLOCK, Arrival, Conversation, Workload


def record(
    engine: Engine,
    workload: Workload,
    *,
    seed: int = 0,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Event]:
    """Every event of serving the workload to its end, after one that tells the engine's settings.

    A request is admitted when it is due, or at the end of the step that is running then; the log
    says both, and a client waits from when it was due. Its prompt is made of random tokens, equal
    where the workload's blocks are; its answer has as many as the workload says. seed: of the
    tokens. sleep: waits for seconds of the engine's clock.

    Raises `ValueError` for a request that is longer than the engine takes, before anything is
    served, and when one is open in it already.
    """
    if engine.has_unfinished_requests:
        raise ValueError("the engine must have no open requests before it is recorded")
    _check(engine, workload)
    prompts = _Prompts(workload, engine.limits.vocab_size, seed)
    sink, clock = ListSink(), engine.events.clock
    sink.write(config_event(engine))
    engine.events.sinks.append(sink)
    due = _Due(workload, clock())
    try:
        while due or engine.has_unfinished_requests:
            for when, request in due.until(clock()):
                step = engine.events.step
                sink.write(Event(when, step, request.request_id, "scheduling", DUE))
                engine.add_request(request.request_id, prompts.of(request), _params(request))
            if engine.has_unfinished_requests:
                for output in engine.step():
                    if output.finished:
                        due.answered(output.request_id, clock())
            else:
                sleep(max(0.0, due.next - clock()))
    finally:
        engine.events.sinks.remove(sink)
    return sink.events


class BusyClock:
    """Seconds this process computed, and those it would have waited: an engine that has the machine
    to itself, on one that it has not. For torch with one thread, as its threads add up.

    An engine with this clock is recorded with `sleep` of it, which waits for nothing.
    """

    def __init__(self) -> None:
        self._skipped = 0.0

    def __call__(self) -> float:
        return busy_clock() + self._skipped

    def sleep(self, seconds: float) -> None:
        self._skipped += seconds


def warm_up(engine: Engine, num_tokens: int = 8) -> None:
    """Serve one request, so that the first one that counts does not pay for what is done once."""
    prompt = list(range(min(64, engine.limits.vocab_size, engine.limits.max_prompt_len)))
    room = engine.limits.max_total_tokens - len(prompt)
    params = SamplingParams(temperature=0, max_tokens=max(1, min(num_tokens, room)))
    engine.add_request("warm-up", prompt, params)
    while engine.has_unfinished_requests:
        engine.step()


def config_event(engine: Engine) -> Event:
    """The engine's settings, as the first line of a log."""
    settings: dict[str, Any] = {
        field.name: value if isinstance(value, (bool, int, float, NoneType)) else str(value)
        for field in fields(engine.config)
        for value in (getattr(engine.config, field.name),)
    }
    settings["num_kv_blocks"] = engine.kv.pool.num_blocks
    return Event(0.0, 0, None, "engine", CONFIG, None, settings)


def _check(engine: Engine, workload: Workload) -> None:
    most = engine.limits.max_total_tokens
    for item in workload:
        for request in item.turns if isinstance(item, Conversation) else (item,):
            if request.prompt_len + request.output_len > most:
                raise ValueError(
                    f"{request.request_id} has {request.prompt_len} + {request.output_len} tokens, "
                    f"the engine takes {most}: choose shorter traffic, or leave long rows of a "
                    "trace out with --max-total-len"
                )


def _params(request: Arrival) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=request.output_len, ignore_eos=True, detokenize=False
    )


class _Due:
    """Requests in the order they are due; a further turn is, once the one before is answered."""

    def __init__(self, workload: Workload, start: float) -> None:
        self._numbers = itertools.count()
        self._heap: list[tuple[float, int, Arrival]] = []
        self._following: dict[str, Arrival] = {}
        for item in workload:
            turns = item.turns if isinstance(item, Conversation) else (item,)
            self._push(start + turns[0].time, turns[0])
            pairs = itertools.pairwise(turns)
            self._following |= {before.request_id: after for before, after in pairs}

    def _push(self, when: float, request: Arrival) -> None:
        heapq.heappush(self._heap, (when, next(self._numbers), request))

    def until(self, now: float) -> Iterator[tuple[float, Arrival]]:
        while self._heap and self._heap[0][0] <= now:
            when, _, request = heapq.heappop(self._heap)
            yield when, request

    def answered(self, request_id: str, now: float) -> None:
        request = self._following.pop(request_id, None)
        if request is not None:
            self._push(now + request.time, request)

    @property
    def next(self) -> float:
        return self._heap[0][0]

    def __bool__(self) -> bool:
        return bool(self._heap)


class _Prompts:
    """Token ids. A session is one stream of random tokens of which each turn takes its length; a
    block that another session had first comes from that one's stream. A single request that names
    no blocks has a stream of its own."""

    def __init__(self, workload: Workload, vocab_size: int, seed: int) -> None:
        self._vocab_size, self._seed = vocab_size, seed
        self._stream_of: dict[str, str] = {}  # request id → the stream of its own tokens
        self._owner: dict[int, str] = {}  # block name → the stream that holds it
        self._streams: dict[str, tuple[random.Random, list[int]]] = {}
        for item in workload:
            chat = isinstance(item, Conversation)
            for request in item.turns if isinstance(item, Conversation) else (item,):
                shares = chat or request.block_names
                stream = f"session {request.session}" if shares else request.request_id
                self._stream_of[request.request_id] = stream
                for name in request.block_names:
                    self._owner.setdefault(name, stream)

    def of(self, request: Arrival) -> list[int]:
        ids: list[int] = []
        for name in request.block_names:
            ids += self._tokens(self._owner[name], len(ids), len(ids) + BLOCK)
        return ids + self._tokens(self._stream_of[request.request_id], len(ids), request.prompt_len)

    def _tokens(self, stream: str, start: int, end: int) -> list[int]:
        if stream not in self._streams:
            self._streams[stream] = (random.Random(f"{self._seed}/{stream}"), [])
        rng, tokens = self._streams[stream]
        if len(tokens) < end:
            tokens += rng.choices(range(self._vocab_size), k=end - len(tokens))
        return tokens[start:end]
