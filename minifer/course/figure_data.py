"""The event stream as plain values: what the pictures draw, and what tests and claims check."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from minifer.events import Event

SpanKind = Literal["waiting", "prefill", "decode"]


@dataclass(frozen=True)
class BlockColumn:
    """The pool at one moment. step: while that step's forward pass ran; None: after the last event.

    tables: request id → its block table. cached: blocks that a prefix look-up can find, used or
    free. copies: (source, destination) blocks of this step's copy-on-write.
    """

    step: int | None
    tables: Mapping[str, tuple[int, ...]]
    cached: frozenset[int]
    copies: tuple[tuple[int, int], ...] = ()

    def holders(self, block_id: int) -> tuple[str, ...]:
        """The requests whose tables hold a block; more than one share it."""
        return tuple(r for r, table in self.tables.items() if block_id in table)


@dataclass(frozen=True)
class Span:
    """What one step did for one request.

    tokens: the half-open positions it computed, None while it waited. cached: leading tokens that
    a prefix hit of this step spared it. begin, end: seconds on the engine's clock.
    """

    request_id: str
    step: int
    kind: SpanKind
    tokens: tuple[int, int] | None
    cached: int
    begin: float
    end: float


def block_map_data(events: Iterable[Event]) -> list[BlockColumn]:
    """One column a step, then one for what is left at the end. Block tables come from the events
    alone: a hit or a fork begins one, allocations extend it, the end or a preemption clears it.
    """
    tables: dict[str, list[int]] = {}
    cached: set[int] = set()
    copies: list[tuple[int, int]] = []
    columns: list[BlockColumn] = []

    def snapshot(step: int | None) -> None:
        held = MappingProxyType({r: tuple(table) for r, table in tables.items() if table})
        columns.append(BlockColumn(step, held, frozenset(cached), tuple(copies)))
        copies.clear()

    for event in events:
        blocks: Sequence[int] = event.data.get("blocks", ())
        request_id = event.request_id or ""
        match event.name:
            case "step.prepared":
                snapshot(event.step)
            case "kv.prefix_hit" | "request.forked":
                tables[request_id] = list(blocks)
            case "kv.block_allocated":
                tables.setdefault(request_id, []).extend(blocks)
            case "kv.block_copied":
                table = tables[request_id]
                for source, destination in event.data["copies"]:
                    table.remove(destination)  # its allocation has put it at the end
                    table[table.index(source)] = destination
                    copies.append((source, destination))
            case "kv.block_published":
                cached.update(blocks)
            case "kv.block_evicted" | "kv.block_unpublished":
                cached.difference_update(blocks)
            case "request.finished" | "request.preempted":
                tables.pop(request_id, None)
    snapshot(None)
    return columns


def timeline_data(events: Iterable[Event]) -> list[Span]:
    """One span for each request that is open in a step, in order of steps, then of arrival.

    A token that is computed for the second time, after a preemption, counts as prefill. A step
    that failed has no spans.
    """
    known: dict[str, int] = {}  # open request → tokens from which on it decodes
    present: list[str] = []  # open when the step began
    ended: set[str] = set()
    scheduled: dict[str, tuple[int, int]] = {}
    hits: dict[str, int] = {}
    begin = 0.0
    spans: list[Span] = []
    for event in events:
        request_id, tokens = event.request_id or "", event.token_range
        match event.name:
            case "step.started":
                known = {r: n for r, n in known.items() if r not in ended}
                present, begin = list(known), event.time
                ended, scheduled, hits = set(), {}, {}
            case "request.admitted":
                known[request_id] = tokens[1] if tokens else 0
            case "request.forked":
                known[request_id] = known[event.data["parent"]]
            case "request.scheduled" if tokens:
                scheduled[request_id] = tokens
            case "request.preempted":
                scheduled.pop(request_id, None)  # the step will not compute it
            case "kv.prefix_hit" if tokens:
                hits[request_id] = tokens[1]
            case "request.finished":
                ended.add(request_id)
            case "step.postprocessed":
                for r in present:
                    computed = scheduled.get(r)
                    kind: SpanKind = "waiting"
                    if computed:
                        kind = "decode" if computed[0] >= known[r] else "prefill"
                        known[r] = max(known[r], computed[1])
                    hit = hits.get(r, 0)
                    spans.append(Span(r, event.step, kind, computed, hit, begin, event.time))
    return spans
