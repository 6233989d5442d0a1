"""Parts of the engine that can be taken out and put in anew: what a repair of exercises 09 is.

Each part is a function of plain values. `plug` puts a function in its place in a running engine
for the length of a block; where a fault has broken the part, the new one is used instead.

| part | call | returns |
|---|---|---|
| characters | `characters(held, new)` | text that is complete, bytes still held |
| key | `key(parent, tokens, salt)` | the name of a block, bytes |
| length | `length(position)` | KV slots that a token at this position may read |
| positions | `positions(start, end)` | positions of the request's tokens start … end − 1 |
| release | `release(held, new, stops)` | text that may be sent, text still held |
| resume | `resume(prompt, output)` | the tokens that a preempted request computes again |
| slots | `slots(table, block_size, start, end)` | slots of tokens start … end − 1 |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from minifer.engine import Engine
from minifer.faults.registry import patched
from minifer.kv import manager
from minifer.kv.prefix_key import PrefixKey
from minifer.kv.step_input import StepInput
from minifer.postprocessing.detokenizer import IncrementalDetokenizer
from minifer.postprocessing.stop_strings import StopStrings
from minifer.scheduling.plan import SchedulePlan

Part = Callable[..., Any]
_EXTRA_KEYS = manager.extra_keys  # as it is without a fault
_BYTES = 256  # token ids of minifer-tiny below this are bytes


@dataclass(frozen=True)
class Place:
    """Where a part sits. plug(engine, part): a block in which it is used.

    inside: it must be put in before a fault is, which wraps what it finds.
    """

    plug: Callable[[Engine, Part], AbstractContextManager[None]]
    inside: bool = False


@contextmanager
def _characters(engine: Engine, part: Part) -> Iterator[None]:
    def push(self: Any, token_id: int) -> str:
        if token_id >= _BYTES:  # a special token shows nothing
            return ""
        text, held = part(getattr(self, "held_bytes", b""), bytes([token_id]))
        self.held_bytes = held
        return str(text)

    def flush(self: Any) -> str:
        held: bytes = getattr(self, "held_bytes", b"")
        self.held_bytes = b""
        return held.decode("utf-8", "replace")

    with patched(IncrementalDetokenizer, push=push, flush=flush):
        yield


@contextmanager
def _key(engine: Engine, part: Part) -> Iterator[None]:
    def make_key(
        parent: PrefixKey | None, tokens: Sequence[int], extra: Any, hash_: Any
    ) -> PrefixKey:
        salt = dict(extra).get("salt")
        digest = part(parent.digest if parent else None, tuple(tokens), salt)
        if not isinstance(digest, bytes):
            raise TypeError(f"key must return bytes, got {digest!r}")
        return PrefixKey(parent, tuple(tokens), extra, digest)

    # Whose salt is lost on the way to the key gets it back with the new part.
    with patched(manager, make_key=make_key, extra_keys=_EXTRA_KEYS):
        yield


@contextmanager
def _length(engine: Engine, part: Part) -> Iterator[None]:
    runner: Any = engine.runner
    forward = runner.forward

    def measured(step: StepInput) -> Any:
        step.seq_lens = [part(step.positions[end - 1]) for end in step.query_start[1:]]
        return forward(step)

    with patched(runner, forward=measured):
        yield


def _of_step(change: Callable[[Part, StepInput, Any, slice], None]) -> Place:
    """A part that fills a column of the step, request by request."""

    @contextmanager
    def plug(engine: Engine, part: Part) -> Iterator[None]:
        prepare = engine.kv.prepare

        def prepared(plan: SchedulePlan) -> StepInput:
            step = prepare(plan)
            rows = pairwise(step.query_start)
            for entry, (first, end) in zip(plan.scheduled, rows, strict=True):
                change(part, step, entry, slice(first, end))
            return step

        with patched(engine.kv, prepare=prepared):
            yield

    return Place(plug)


def _set_positions(part: Part, step: StepInput, entry: Any, rows: slice) -> None:
    step.positions[rows] = _as_many(part(entry.start, entry.end), rows, "positions")


def _set_slots(part: Part, step: StepInput, entry: Any, rows: slice) -> None:
    table = list(entry.request.block_table)
    new = part(table, step.block_size, entry.start, entry.end)
    step.slot_mapping[rows] = _as_many(new, rows, "slots")


def _as_many(values: Any, rows: slice, name: str) -> list[int]:
    found = [int(value) for value in values]
    if len(found) != rows.stop - rows.start:
        raise ValueError(f"{name} must return {rows.stop - rows.start} numbers, got {len(found)}")
    return found


@contextmanager
def _release(engine: Engine, part: Part) -> Iterator[None]:
    def push(self: StopStrings, text: str, *, armed: bool = True) -> str:
        if self.hit is not None or not self._stops:
            return "" if self.hit is not None else text
        whole = self.held + text
        ends = [(whole.find(stop) + len(stop), i) for i, stop in enumerate(self._stops)]
        ends = [(end, i) for end, i in ends if end >= len(self._stops[i])]
        if armed and ends:
            end, which = min(ends)
            self.hit, self.held = self._stops[which], ""
            return whole[: end - len(self.hit)]
        released, self.held = part(self.held, text, self._stops)
        return str(released)

    def flush(self: StopStrings, text: str = "", *, armed: bool = True) -> str:
        released = self.push(text, armed=armed) + self.held
        self.held = ""
        return released

    with patched(StopStrings, push=push, flush=flush):
        yield


@contextmanager
def _resume(engine: Engine, part: Part) -> Iterator[None]:
    waiting: Any = engine.scheduler.waiting
    put_back = waiting.put_back

    def resumed(request: Any) -> None:
        prompt = list(request.prompt_token_ids)
        output = request.token_ids[len(prompt) :]
        put_back(request)
        request.token_ids[:] = [int(token) for token in part(prompt, output)]

    with patched(waiting, put_back=resumed):
        yield


PARTS: Mapping[str, Place] = MappingProxyType(
    {
        "characters": Place(_characters),
        "key": Place(_key),
        "length": Place(_length, inside=True),
        "positions": _of_step(_set_positions),
        "release": Place(_release),
        "resume": Place(_resume),
        "slots": _of_step(_set_slots),
    }
)
