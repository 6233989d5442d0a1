"""What happened to a token: one stream of records that every stage writes.

The microscope, the timeline and the fit of the simulator read the same stream. A record is
written only when somebody listens: with no sink an `EventBus` is falsy and costs one test.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

STAGES = ("scheduling", "kv", "prefill", "decode", "postprocessing")


@dataclass(frozen=True, slots=True)
class Event:
    """One thing a stage did.

    time: seconds on the injected clock. step: engine step, counted from 1 (0 before the first).
    stage: one of `STAGES`, or "engine". name: dotted, e.g. "kv.prefix_hit".
    token_range: half-open positions [start, end) in the request's tokens, or None.
    """

    time: float
    step: int
    request_id: str | None
    stage: str
    name: str
    token_range: tuple[int, int] | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary, keys in the order of the fields."""
        return {
            "time": self.time,
            "step": self.step,
            "request_id": self.request_id,
            "stage": self.stage,
            "name": self.name,
            "token_range": list(self.token_range) if self.token_range else None,
            "data": dict(self.data),
        }


class EventSink(Protocol):
    """Receives every event, in order, on the engine's thread."""

    def write(self, event: Event) -> None: ...


class ListSink:
    """Keeps events in memory: what notebooks and tests use."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, event: Event) -> None:
        self.events.append(event)

    def of(self, request_id: str) -> list[Event]:
        """The life of one request, in order."""
        return [e for e in self.events if e.request_id == request_id]


class JSONLSink:
    """One JSON object a line, flushed as it comes."""

    def __init__(self, path: str | Path) -> None:
        self._file: TextIO = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed in close()

    def write(self, event: Event) -> None:
        self._file.write(json.dumps(event.to_dict(), ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> JSONLSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


class EventBus:
    """Fans one event out to the sinks; knows the clock and the current step.

    clock: returns seconds; wall time by default, a virtual clock in tests and simulations.
    """

    def __init__(self, *sinks: EventSink, clock: Callable[[], float] = time.perf_counter) -> None:
        self.sinks: list[EventSink] = list(sinks)
        self.clock = clock
        self.step = 0

    def __bool__(self) -> bool:
        return bool(self.sinks)

    def emit(
        self,
        stage: str,
        name: str,
        request_id: str | None = None,
        token_range: tuple[int, int] | None = None,
        **data: Any,
    ) -> None:
        """Write one event to every sink. Callers on a hot path test `if bus:` first.

        A sink that raises is dropped, with a warning: what is watched goes on without it.
        """
        if self.sinks:
            event = Event(self.clock(), self.step, request_id, stage, name, token_range, data)
            for sink in list(self.sinks):
                try:
                    sink.write(event)
                except Exception as error:  # a full disk must not end the requests
                    self.sinks.remove(sink)
                    warnings.warn(
                        f"event sink {sink!r} failed and is dropped: {error!r}", stacklevel=2
                    )


class StepTimer:
    """Reports how long each stage of a step took; does nothing when nobody listens."""

    def __init__(self, events: EventBus) -> None:
        self._events = events
        self._last = events.clock() if events else 0.0
        if events:
            events.emit("engine", "step.started")

    def lap(self, name: str, stage: str, **data: Any) -> None:
        """Emit `name` with the seconds since the last lap as `duration`."""
        if self._events:
            now = self._events.clock()
            self._events.emit(stage, name, None, None, duration=now - self._last, **data)
            self._last = now
