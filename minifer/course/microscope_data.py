"""The life of one token as frames: what the microscope shows, and what tests and claims check.

    frame 1  step 0  1 scheduling      request A enters the queue …
    frame 2  step 1  2 KV              the pool hands out block 0 …
    frame 3  …

A token is (request, position). Its life holds every event that concerns it: those of its request
whose range covers its position, those about the block that holds its keys and values (also when
another request finds or overwrites it), its request's end, and the forward pass that computed it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minifer.course.figure_data import BlockColumn, PoolFollower, Span, timeline_data
from minifer.course.microscope_places import Place, event_places
from minifer.course.microscope_words import Moment, sentence
from minifer.events import STAGES, Event

_COMPUTES = ("request.scheduled", "kv.prefix_hit", "kv.tier_hit")  # or brings what was computed
_ALWAYS = ("request.finished", "request.preempted")
_LOSES = ("request.preempted", "kv.block_evicted")  # the token's keys and values
_OF_THE_BATCH = ("step.prepared", "step.forward")


@dataclass(frozen=True)
class Frame:
    """One event of a token's life and the world right after it.

    index: in the stream of all events. stage: one of `minifer.events.STAGES`, or "start". block:
    the block that holds, or will hold, the token's keys and values; slot: its place in the cache.
    """

    index: int
    step: int
    name: str
    stage: str
    sentence: str
    places: tuple[Place, ...]
    values: tuple[tuple[str, str], ...]
    pool: BlockColumn
    block: int | None
    slot: int | None


@dataclass(frozen=True)
class Life:
    """Everything the microscope needs. requests: in order of appearance, for their colours."""

    request_id: str
    position: int
    block_size: int
    num_blocks: int
    requests: tuple[str, ...]
    frames: tuple[Frame, ...]
    spans: tuple[Span, ...]

    def stages(self) -> list[str]:
        """The stages passed, each once for every time it is entered."""
        names = [frame.stage for frame in self.frames]
        return [s for i, s in enumerate(names) if i == 0 or names[i - 1] != s]


def life_frames(
    events: Iterable[Event],
    request_id: str,
    position: int | None = None,
    *,
    block_size: int,
    num_blocks: int | None = None,
    stage: str | None = None,
) -> Life:
    """The life of the token at `position` of a request, from an engine's events.

    position: 0 is the first token of the prompt; None is the first token that was drawn.
    block_size: P of the engine. num_blocks: N of its pool; None counts the blocks that the events
    name. stage: keep the frames of one stage only. Raises `ValueError` for a request or position
    that is not in the events, for another stage, and for a block size that contradicts the tables.
    """
    stream = list(events)
    if stage is not None and stage not in STAGES:
        raise ValueError(f"stage must be one of {', '.join(STAGES)}, got {stage!r}")
    requests = tuple(dict.fromkeys(e.request_id for e in stream if e.request_id is not None))
    position = _position(stream, requests, request_id, position)
    frames = _Follower(stream, request_id, position, block_size).frames()
    named = [b for e in stream for b in _blocks(e)]
    count = max(named, default=-1) + 1 if num_blocks is None else num_blocks
    kept = tuple(f for f in frames if stage is None or f.stage == stage)
    spans = tuple(timeline_data(stream))
    return Life(request_id, position, block_size, count, requests, kept, spans)


class _Follower:
    """Walks through the stream once and keeps what concerns one token."""

    def __init__(self, stream: Sequence[Event], request_id: str, position: int, P: int) -> None:
        self.stream, self.request_id, self.position, self.P = stream, request_id, position, P
        own = [span for span in timeline_data(stream) if span.request_id == request_id]
        self.kinds = {span.step: span.kind for span in own}
        # What is scheduled and then preempted in the same step is not computed: no tokens there.
        self.steps = {s.step for s in own if s.tokens and s.tokens[0] <= position < s.tokens[1]}
        self.pool = PoolFollower()
        self.block: int | None = None  # where its KV lies, as long as nobody overwrites it

    def frames(self) -> list[Frame]:
        frames: list[Frame] = []
        places = event_places()
        for index, event in enumerate(self.stream):
            if event.name == "step.started":
                self.pool.new_step()
            before = self.block
            self._move(event)
            if not self._concerns(event, before):
                continue
            block = before if self.block is None else self.block
            slot = None if block is None else block * self.P + self.position % self.P
            moment = Moment(event, self.request_id, self.position, self.P, block, slot)
            frames.append(
                Frame(
                    index=index,
                    step=event.step,
                    name=event.name,
                    stage=self._stage(event),
                    sentence=sentence(moment),
                    places=places.get(event.name, ()),
                    values=_values(event, block, slot),
                    pool=self.pool.column(event.step),
                    block=block,
                    slot=slot,
                )
            )
            if event.name in _LOSES:
                self.block = None
        return frames

    def _move(self, event: Event) -> None:
        """Follow the block through the event. A free block that is handed out anew is lost."""
        self.pool.apply(event)
        own = event.request_id == self.request_id
        if not own and event.name == "kv.block_allocated" and self.block in _blocks(event):
            self.block = None
        table = self.pool.table(self.request_id)
        place = self.position // self.P
        if place < len(table):
            self.block = table[place]
        elif event.name == "request.scheduled" and own and self._covered_by(event):
            raise ValueError(
                f"block_size must fit the block tables, got {self.P}: {self.request_id} holds "
                f"{len(table)} blocks when its position {self.position} is scheduled"
            )

    def _stage(self, event: Event) -> str:
        """Where the token is. A mixed step computes prefill and decode: which one is ours?"""
        if event.name == "step.forward":
            return self.kinds.get(event.step, event.stage)
        return event.stage if event.stage in STAGES else "start"

    def _concerns(self, event: Event, before: int | None) -> bool:
        if event.name in _OF_THE_BATCH:
            return event.step in self.steps
        blocks = _blocks(event)
        if (blocks and event.token_range is None) or event.request_id != self.request_id:
            return bool({before, self.block} & set(blocks))
        return self._covered_by(event) or (
            event.token_range is None and (event.name in _ALWAYS or event.step in self.steps)
        )

    def _covered_by(self, event: Event) -> bool:
        if event.request_id != self.request_id or event.token_range is None:
            return False
        return event.token_range[0] <= self.position < event.token_range[1]


def _position(
    stream: Sequence[Event], requests: Sequence[str], request_id: str, position: int | None
) -> int:
    if request_id not in requests:
        known = ", ".join(requests) or "none (no requests in the events)"
        raise ValueError(f"request_id must be one of {known}, got {request_id!r}")
    own = [e for e in stream if e.request_id == request_id and e.token_range]
    end = max((e.token_range[1] for e in own if e.token_range), default=0)
    drawn = [e.token_range[0] for e in own if e.name == "token.sampled" and e.token_range]
    if position is None:
        position = drawn[0] if drawn else end - 1
    if not 0 <= position < end:
        raise ValueError(f"position must be in [0, {end}) for {request_id!r}, got {position}")
    return position


def _blocks(event: Event) -> list[int]:
    """The block ids that an event names. (Some events of the tiers count blocks instead.)"""
    blocks = event.data.get("blocks", ())
    named = list(blocks) if isinstance(blocks, Sequence) else []
    return named + [b for pair in event.data.get("copies", ()) for b in pair]


def _values(event: Event, block: int | None, slot: int | None) -> tuple[tuple[str, str], ...]:
    """What the event says, in words; times are left out, they differ from run to run."""
    values = {} if event.token_range is None else {"token_range": event.token_range}
    values |= {k: v for k, v in event.data.items() if k != "duration"}
    shown = [(key, repr(value)) for key, value in values.items()]
    if block is not None:
        shown.append(("block, slot", f"{block}, {slot}"))
    return tuple(shown)
