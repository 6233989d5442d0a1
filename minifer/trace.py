"""The event stream as pictures: a timeline for Perfetto, and one request's life as a table.

`ChromeTraceSink` writes the Trace Event Format ("JSON object format"), which ui.perfetto.dev and
chrome://tracing open:

    engine    steps        |step 1                                  |step 2            …
                           |scheduling|kv|forward|sampling|postproc.|
              KV blocks, requests      (counters)
    requests  a            |queued|prefill [0, 64)   |prefill [64, 90)|decode 90|decode 91| …
              b                   |queued            |prefill [0, 12) | …

Source: "Trace Event Format", Google, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from minifer.events import Event, ListSink

_ENGINE, _REQUESTS = 1, 2  # process ids of the two groups of tracks
_STEPS = 0  # thread id of the engine's only track
_STAGE_NAMES = {
    "step.scheduled": "1 scheduling",
    "step.prepared": "2 KV",
    "step.drafted": "4 drafting",
    "step.forward": "3, 4 forward",
    "step.sampled": "4 sampling",
    "step.postprocessed": "5 postprocessing",
}
_STEP_COMPUTED = "step.sampled"  # here the slices of the requests end


@dataclass
class _Track:
    """What is known of one request while the stream goes by."""

    tid: int
    num_prompt_tokens: int = 0
    num_computed: int = 0  # the furthest token ever computed
    waiting_since: float | None = None
    scheduled: tuple[int, int] | None = None  # token range in the open step
    scheduled_at: float = 0.0


class ChromeTraceSink(ListSink):
    """Keeps events in memory and writes them as one Chrome trace when it is closed.

    num_kv_blocks: see `chrome_trace`.
    """

    def __init__(self, path: str | Path, num_kv_blocks: int | None = None) -> None:
        super().__init__()
        self._path = Path(path)
        self._num_kv_blocks = num_kv_blocks

    def close(self) -> None:
        """Write the file, whatever is still running."""
        trace = chrome_trace(self.events, self._num_kv_blocks)
        self._path.write_text(json.dumps(trace, ensure_ascii=False), encoding="utf-8")

    def __enter__(self) -> ChromeTraceSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def chrome_trace(events: Iterable[Event], num_kv_blocks: int | None = None) -> dict[str, Any]:
    """Events, in order of time, as a JSON-ready Chrome trace.

    num_kv_blocks: blocks of the pool; with it a counter shows the free ones beside those in use.
    Events of unknown names become instants on the track of their request, or of the engine.
    Slices that are still open end at the last event.
    """
    builder = _Builder(num_kv_blocks)
    for event in events:
        builder.add(event)
    builder.end()
    # A slice that holds others of the same start comes before them.
    timed = sorted(builder.out, key=lambda e: (e["ts"], -e.get("dur", 0.0)))
    return {"traceEvents": builder.names() + timed, "displayTimeUnit": "ms"}


class _Builder:
    """What is open while the stream goes by, and the trace events written so far."""

    def __init__(self, num_kv_blocks: int | None) -> None:
        self.out: list[dict[str, Any]] = []
        self._num_kv_blocks = num_kv_blocks
        self._tracks: dict[str, _Track] = {}
        self._waiting: set[str] = set()
        self._running: set[str] = set()
        self._in_step: list[_Track] = []
        self._blocks_in_use: set[int] = set()
        self._origin: float | None = None
        self._last = 0.0
        self._step = 0
        self._step_start: float | None = None
        self._stage_start = 0.0

    def add(self, event: Event) -> None:
        if self._origin is None:
            self._origin = event.time
        self._last = event.time
        if event.name.startswith("step."):
            self._add_step(event)
        elif event.request_id is not None and event.name.startswith("request."):
            self._add_request(event, event.request_id)
        else:
            self._instant(event)
            self._count_blocks(event)

    def end(self) -> None:
        for request_id in sorted(self._waiting):
            self._end_wait(request_id, self._track(request_id), self._last)
        self._end_step(self._last)

    # -- the engine's track

    def _add_step(self, event: Event) -> None:
        if event.name == "step.started":
            self._end_step(event.time)  # one that failed never reported its end
            self._step_start = self._stage_start = event.time
            self._step = event.step
            return
        # Stages follow each other, so each begins where the one before it was reported.
        name = _STAGE_NAMES.get(event.name, event.name)
        self._slice(_ENGINE, _STEPS, name, self._stage_start, event.time, dict(event.data))
        self._stage_start = event.time
        if event.name == _STEP_COMPUTED:
            self._end_requests(event.time)
        if event.name == "step.postprocessed":
            self._end_step(event.time)

    def _end_step(self, time: float) -> None:
        if self._step_start is None:
            return
        self._end_requests(time)
        self._slice(_ENGINE, _STEPS, f"step {self._step}", self._step_start, time, {})
        self._step_start = None

    # -- the requests' tracks

    def _add_request(self, event: Event, request_id: str) -> None:
        track = self._track(request_id)
        if event.name == "request.admitted":
            track.num_prompt_tokens = event.token_range[1] if event.token_range else 0
            self._wait(request_id, track, event.time)
        elif event.name == "request.forked" and event.token_range:
            track.num_computed = event.token_range[1] - 1  # by its parent
        elif event.name == "request.scheduled":
            self._end_wait(request_id, track, event.time)
            self._running.add(request_id)
            track.scheduled, track.scheduled_at = event.token_range, event.time
            self._in_step.append(track)
        elif event.name == "request.preempted":
            self._running.discard(request_id)
            track.scheduled = None  # the step will not compute it
            self._wait(request_id, track, event.time)
        elif event.name == "request.finished":
            self._end_wait(request_id, track, event.time)
            self._end_slice(track, event.time)
            self._running.discard(request_id)
        if event.name != "request.scheduled":  # the slice says it
            self._instant(event)
        counts = {"running": len(self._running), "waiting": len(self._waiting)}
        self._counter("requests", event.time, counts)

    def _track(self, request_id: str) -> _Track:
        if request_id not in self._tracks:
            self._tracks[request_id] = _Track(tid=len(self._tracks) + 1)
        return self._tracks[request_id]

    def _wait(self, request_id: str, track: _Track, time: float) -> None:
        self._waiting.add(request_id)
        track.waiting_since = time

    def _end_wait(self, request_id: str, track: _Track, time: float) -> None:
        self._waiting.discard(request_id)
        if track.waiting_since is not None:
            self._slice(_REQUESTS, track.tid, "queued", track.waiting_since, time, {})
            track.waiting_since = None

    def _end_requests(self, time: float) -> None:
        for track in self._in_step:
            self._end_slice(track, time)
        self._in_step = []

    def _end_slice(self, track: _Track, time: float) -> None:
        """The work of one step for one request: from its scheduling to the sampled tokens."""
        if track.scheduled is None:
            return
        start, end = track.scheduled
        # What a preemption threw away is computed again: a prefill, though it was output once.
        if start >= max(track.num_prompt_tokens, track.num_computed):
            name = f"decode {start}" if end == start + 1 else f"decode [{start}, {end})"
        else:
            name = f"prefill [{start}, {end})"
        self._slice(_REQUESTS, track.tid, name, track.scheduled_at, time, {"step": self._step})
        track.num_computed = max(track.num_computed, end)
        track.scheduled = None

    # -- what the format is made of

    def _microseconds(self, time: float) -> float:
        assert self._origin is not None  # set by the first event
        return round((time - self._origin) * 1e6, 3)

    def _slice(
        self, pid: int, tid: int, name: str, start: float, end: float, args: dict[str, Any]
    ) -> None:
        ts = self._microseconds(start)
        duration = round(self._microseconds(end) - ts, 3)
        self.out.append(
            {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": ts, "dur": duration}
            | ({"args": args} if args else {})
        )

    def _instant(self, event: Event) -> None:
        pid, tid = _ENGINE, _STEPS
        if event.request_id is not None:
            pid, tid = _REQUESTS, self._track(event.request_id).tid
        args = {"stage": event.stage, "step": event.step, **event.data}
        if event.token_range is not None:
            args["tokens"] = list(event.token_range)
        ts = self._microseconds(event.time)
        self.out.append(
            {
                "ph": "i",
                "s": "t",
                "pid": pid,
                "tid": tid,
                "name": event.name,
                "ts": ts,
                "args": args,
            }
        )

    def _counter(self, name: str, time: float, values: dict[str, int]) -> None:
        ts = self._microseconds(time)
        self.out.append(
            {"ph": "C", "pid": _ENGINE, "tid": _STEPS, "name": name, "ts": ts, "args": values}
        )

    def _count_blocks(self, event: Event) -> None:
        """A block is in use from its allocation, or a hit on it, until its last user frees it."""
        blocks = event.data.get("blocks", ())
        if event.name in ("kv.block_allocated", "kv.prefix_hit"):
            self._blocks_in_use.update(blocks)
        elif event.name == "kv.block_freed":
            self._blocks_in_use.difference_update(blocks)
        else:
            return
        values = {"in use": len(self._blocks_in_use)}
        if self._num_kv_blocks is not None:
            values["free"] = self._num_kv_blocks - len(self._blocks_in_use)
        self._counter("KV blocks", event.time, values)

    def names(self) -> list[dict[str, Any]]:
        """Metadata: what the tracks are called and in which order they stand."""

        def meta(pid: int, tid: int, kind: str, **args: Any) -> dict[str, Any]:
            return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "ts": 0, "args": args}

        names = [
            meta(_ENGINE, _STEPS, "process_name", name="engine"),
            meta(_ENGINE, _STEPS, "thread_name", name="steps"),
            meta(_REQUESTS, _STEPS, "process_name", name="requests"),
        ]
        for request_id, track in self._tracks.items():
            names.append(meta(_REQUESTS, track.tid, "thread_name", name=request_id))
            names.append(meta(_REQUESTS, track.tid, "thread_sort_index", sort_index=track.tid))
        return names


def life_of(events: Iterable[Event], request_id: str, position: int | None = None) -> str:
    """One request's life as a text table: step, time, stage, event, tokens, data.

    position: of one token, to see only what happened to it: how it was sampled (or came with the
    prompt) and in which step its KV was computed. Times are milliseconds since the request's first
    event. The forward pass of each step that worked on the request is shown too, although it
    belongs to the whole batch. Raises `ValueError` when no event has this request_id or position.
    """
    stream = list(events)
    own = [e for e in stream if e.request_id == request_id]
    if not own:
        known = sorted({e.request_id for e in stream if e.request_id is not None})
        raise ValueError(
            f"request_id must be one of {', '.join(known) or 'none (no requests in the events)'}, "
            f"got {request_id!r}"
        )
    end = max((e.token_range[1] for e in own if e.token_range), default=0)
    if position is not None and not 0 <= position < end:
        raise ValueError(f"position must be in [0, {end}) for {request_id!r}, got {position}")
    steps = {
        e.step for e in own if e.name == "request.scheduled" and _covers(e.token_range, position)
    }
    rows = [
        (
            str(e.step),
            f"{(e.time - own[0].time) * 1e3:.3f}",
            e.stage,
            e.name,
            f"[{e.token_range[0]}, {e.token_range[1]})" if e.token_range else "",
            _shortened(e),
        )
        for e in stream
        if _belongs(e, request_id, position, steps)
    ]
    return _table(("step", "ms", "stage", "event", "tokens", "data"), rows)


def _covers(token_range: tuple[int, int] | None, position: int | None) -> bool:
    if position is None:
        return True
    return token_range is not None and token_range[0] <= position < token_range[1]


def _belongs(event: Event, request_id: str, position: int | None, steps: set[int]) -> bool:
    if event.name == "step.forward":
        return event.step in steps
    if event.request_id != request_id:
        return False
    if event.token_range is None:  # e.g. an allocation: for the tokens of its step
        return position is None or event.step in steps
    return _covers(event.token_range, position)


def _shortened(event: Event, width: int = 60) -> str:
    values = dict(event.data)
    if "duration" in values:  # seconds; the table is in milliseconds
        values["ms"] = round(values.pop("duration") * 1e3, 3)
    text = " ".join(
        f"{key}={json.dumps(value, ensure_ascii=False, default=str)}"
        for key, value in values.items()
    )
    return text if len(text) <= width else text[: width - 1] + "…"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = (
        "  ".join(
            cell.rjust(width) if i < 2 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    )
    return "\n".join(lines)
