"""An engine's own events, read as a log of steps and requests.

::

    request.admitted    a request came: when, and how long its prompt is
    kv.prefix_hit       what the cache had of it
    step.started … step.postprocessed     one step, with the seconds of each stage
    request.scheduled   in a step: which positions of a request it computes
    token.sampled       each output token, and when

The log is what `JSONLSink` writes: `minifer sim record`, `minifer trace --jsonl`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minifer.config import EngineConfig
from minifer.events import Event
from minifer.simulation.steps.times import Chunk

CONFIG = "engine.config"  # an event with what the simulator has to know of the engine
DUE = "request.due"  # when a client wanted to send it, which may be before it was admitted


@dataclass(frozen=True)
class LoggedStep:
    """start: seconds. seconds: from its start to that of the next one while requests were open,
    else of its five stages. forward: of the model. chunks: what it computed."""

    start: float
    seconds: float
    forward: float
    chunks: tuple[Chunk, ...]


@dataclass
class LoggedRequest:
    """What the engine did for one request; times in seconds on its clock."""

    request_id: str
    arrival: float
    prompt_len: int
    cached_len: int = 0
    token_times: list[float] = field(default_factory=list)
    end: float | None = None
    finish_reason: str | None = None

    @property
    def output_len(self) -> int:
        return len(self.token_times)


@dataclass(frozen=True)
class StepLog:
    """steps, requests: in order of time, those that ended. num_failed: steps that did not end.
    config: of the engine, None where the log does not say."""

    steps: tuple[LoggedStep, ...]
    requests: tuple[LoggedRequest, ...]
    config: EngineConfig | None = None
    num_failed: int = 0


def read_log(path: str | Path) -> StepLog:
    """Raises `ValueError` naming file and line for what is no event, and as `log_of`."""
    with open(path, encoding="utf-8") as file:
        try:
            return log_of(_events(path, file))
        except _LogError as error:
            raise ValueError(f"{path}: {error}") from None


def _events(path: str | Path, file: Iterable[str]) -> Iterator[Event]:
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            fields = json.loads(text)
            span = fields["token_range"]
            yield Event(
                float(fields["time"]),
                int(fields["step"]),
                fields["request_id"],
                fields["stage"],
                fields["name"],
                None if span is None else (int(span[0]), int(span[1])),
                fields["data"],
            )
        except (ValueError, KeyError, TypeError, IndexError) as error:
            why = f"field {error.args[0]!r} is missing" if type(error) is KeyError else error
            raise ValueError(f"{path}, line {line}: no event of an engine: {why}") from None


class _LogError(ValueError):
    """Has no place in a file to name."""


def log_of(events: Iterable[Event]) -> StepLog:
    """Raises `ValueError` for a log without steps, and for one whose steps did work that chunks do
    not tell: drafts of speculation, loops of a loop model, several answers to one prompt."""
    reader = _Reader()
    for event in events:
        reader.add(event)
    return reader.log()


class _Reader:
    def __init__(self) -> None:
        self._requests: dict[str, LoggedRequest] = {}
        self._due: dict[str, float] = {}
        self._open: set[str] = set()
        self._steps: list[LoggedStep] = []
        self._num_failed = 0
        self._config: Mapping[str, Any] | None = None
        self._start: float | None = None  # of the step that is going on
        self._latest = -math.inf  # start of a step
        self._chunks: dict[str, Chunk] = {}
        self._whole = self._forward = 0.0
        self._busy = False  # were requests open when the last step ended?

    def add(self, event: Event) -> None:
        name, request_id = event.name, event.request_id
        if name.startswith("step."):
            self._add_step(event)
        elif name == CONFIG:
            self._config = event.data
        elif name in ("draft.judged", "request.forked"):
            raise _LogError(
                f"step {event.step} has {name}: the steps of speculation and of several answers to "
                "one prompt do work that a step model of chunks cannot tell"
            )
        elif request_id is not None:
            self._add_request(event, request_id)

    def _add_request(self, event: Event, request_id: str) -> None:
        if event.name == DUE:
            self._due[request_id] = event.time
        elif event.name == "request.admitted":
            length = event.token_range[1] if event.token_range else 0
            due = self._due.pop(request_id, event.time)
            self._requests[request_id] = LoggedRequest(request_id, due, length)
            self._open.add(request_id)
        request = self._requests.get(request_id)
        if request is None:
            return  # it came before the log began
        if event.name == "request.scheduled" and event.token_range:
            start, end = event.token_range
            self._chunks[request_id] = (end - start, end)
        elif event.name == "request.preempted":
            self._chunks.pop(request_id, None)
        elif event.name == "kv.prefix_hit" and event.token_range and not request.token_times:
            request.cached_len = max(request.cached_len, event.token_range[1])
        elif event.name == "token.sampled":
            request.token_times.append(event.time)
        elif event.name == "request.finished":
            request.end = event.time
            request.finish_reason = event.data.get("finish_reason")
            self._open.discard(request_id)

    def _add_step(self, event: Event) -> None:
        if event.name == "step.started":
            if event.time < self._latest:
                raise _LogError(
                    f"step {event.step} started at {event.time:g} s, after one at "
                    f"{self._latest:g} s: the lines are not in order, or of several recordings"
                )
            self._latest = event.time
            self._num_failed += self._start is not None
            if self._busy and self._steps:  # what lies between two steps is a step's too
                last = self._steps[-1]
                self._steps[-1] = LoggedStep(
                    last.start, event.time - last.start, last.forward, last.chunks
                )
            self._start, self._chunks, self._busy = event.time, {}, False
            self._whole = self._forward = 0.0
            return
        if self._start is None:
            return
        self._whole += event.data.get("duration", 0.0)
        if event.name == "step.forward":
            self._forward = event.data.get("duration", 0.0)
            self._check_tokens(event)
        if event.name == "step.postprocessed":
            chunks = tuple(self._chunks.values())
            self._steps.append(LoggedStep(self._start, self._whole, self._forward, chunks))
            self._start, self._busy = None, bool(self._open)

    def _check_tokens(self, event: Event) -> None:
        counted = sum(event.data.get(f"num_{kind}_tokens", 0) for kind in ("prefill", "decode"))
        scheduled = sum(query for query, _ in self._chunks.values())
        if counted != scheduled:
            raise _LogError(
                f"step {event.step} completed {counted} tokens and scheduled {scheduled}: the log "
                "begins in the middle of requests, or there were drafts or loops, work that a step "
                "model of chunks cannot tell"
            )

    def log(self) -> StepLog:
        self._num_failed += self._start is not None
        if not self._steps:
            raise _LogError("the log holds no finished step")
        done = tuple(request for request in self._requests.values() if request.end is not None)
        config = None
        if self._config is not None:
            try:
                config = EngineConfig.from_kwargs(**self._config)
            except (TypeError, ValueError) as error:
                raise _LogError(f"{CONFIG} of the log: {error}") from None
        return StepLog(tuple(self._steps), done, config, self._num_failed)
