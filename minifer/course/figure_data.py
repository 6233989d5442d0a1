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


class PoolFollower:
    """Who holds which block, told event by event: a hit or a fork begins a block table,
    allocations extend it, the end or a preemption clears it.
    """

    def __init__(self) -> None:
        self._tables: dict[str, list[int]] = {}
        self._cached: set[int] = set()
        self._copies: list[tuple[int, int]] = []  # since `new_step`

    def new_step(self) -> None:
        self._copies.clear()

    def table(self, request_id: str) -> Sequence[int]:
        """A request's block table now."""
        return self._tables.get(request_id, ())

    def column(self, step: int | None) -> BlockColumn:
        """The pool as it is now."""
        held = MappingProxyType({r: tuple(table) for r, table in self._tables.items() if table})
        return BlockColumn(step, held, frozenset(self._cached), tuple(self._copies))

    def apply(self, event: Event) -> None:
        blocks: Sequence[int] = event.data.get("blocks", ())
        request_id, tables = event.request_id or "", self._tables
        match event.name:
            case "kv.prefix_hit" | "request.forked":
                tables[request_id] = list(blocks)
            case "kv.block_allocated":
                tables.setdefault(request_id, []).extend(blocks)
            case "kv.block_copied":
                table = tables[request_id]
                for source, destination in event.data["copies"]:
                    table.remove(destination)  # its allocation has put it at the end
                    table[table.index(source)] = destination
                    self._copies.append((source, destination))
            case "kv.block_published":
                self._cached.update(blocks)
            case "kv.block_evicted" | "kv.block_unpublished":
                self._cached.difference_update(blocks)
            case "request.finished" | "request.preempted":
                tables.pop(request_id, None)


def block_map_data(events: Iterable[Event]) -> list[BlockColumn]:
    """One column a step, then one for what is left at the end, from the events alone."""
    pool = PoolFollower()
    columns: list[BlockColumn] = []
    for event in events:
        pool.apply(event)
        if event.name == "step.prepared":
            columns.append(pool.column(event.step))
            pool.new_step()
    columns.append(pool.column(None))
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
