"""One plain sentence for every event the engine has, made from the event's data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minifer.events import Event


@dataclass(frozen=True)
class Moment:
    """An event as one token sees it. block, slot: where the token's KV lies, if anywhere yet."""

    event: Event
    request_id: str
    position: int
    block_size: int
    block: int | None
    slot: int | None

    @property
    def own(self) -> bool:
        return self.event.request_id == self.request_id

    @property
    def who(self) -> str:
        return named(self.event.request_id or "")

    @property
    def span(self) -> str:
        start, end = self.event.token_range or (0, 0)
        return f"position {start}" if end == start + 1 else f"positions {start} to {end - 1}"

    @property
    def count(self) -> int:
        start, end = self.event.token_range or (0, 0)
        return end - start

    @property
    def where(self) -> str:
        return f"block {self.block}, offset {self.position % self.block_size}"

    def data(self, key: str) -> Any:
        return self.event.data.get(key)


def named(request_id: str) -> str:
    """ "request A"; an id that says so itself stays as it is."""
    return request_id if request_id.startswith("request") else f"request {request_id}"


def sentence(moment: Moment) -> str:
    """What happened, in one sentence; an event without words of its own says its name."""
    words = SENTENCES.get(moment.event.name)
    text = f"{moment.event.name} is reported." if words is None else words(moment)
    return text[0].upper() + text[1:]


def _several(count: Any, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _admitted(m: Moment) -> str:
    here = (
        f"ours is number {m.position}, counted from 0"
        if m.position < m.count
        else "ours is to come"
    )
    return f"{m.who} enters the queue with {_several(m.count, 'token')}; {here}."


def _scheduled(m: Moment) -> str:
    if m.count == 1:
        return f"the scheduler gives {m.who} one token of this step's budget: ours."
    return f"the scheduler gives {m.who} {m.count} tokens of this step's budget, {m.span}."


def _hit(m: Moment) -> str:
    if m.own:
        return (
            f"the first {m.count} tokens of {m.who} are found in the cache: ours lies in "
            f"{m.where}, and is not computed again."
        )
    return (
        f"{m.who} begins with the same tokens: it finds block {m.block}, our keys and values in it."
    )


def _allocated(m: Moment) -> str:
    if m.own:
        return (
            f"the pool hands {m.who} {_listed(m.data('blocks'))}; our token's place is {m.where}."
        )
    return f"the pool hands block {m.block} to {m.who}: what is left of our token is overwritten."


def _listed(blocks: Any) -> str:
    names = ", ".join(map(str, blocks))
    return f"block {names}" if len(blocks) == 1 else f"blocks {names}"


def _copied(m: Moment) -> str:
    pairs = ", ".join(f"{source} to {target}" for source, target in m.data("copies"))
    return f"{m.who} will write into a shared block and copies it first: {pairs}."


def _published(m: Moment) -> str:
    if m.own:
        return f"block {m.block} will be full with this step: others can find it from now on."
    return f"block {m.block} is offered to others by {m.who}."


def _freed(m: Moment) -> str:
    return f"nobody holds block {m.block} any more: it is free, and its content stays for now."


def _evicted(m: Moment) -> str:
    return (
        f"block {m.block} is needed anew: it leaves the prefix index, our keys and values are lost."
    )


def _forward(m: Moment) -> str:
    prefill, decode = m.data("num_prefill_tokens") or 0, m.data("num_decode_tokens") or 0
    loops = m.data("core_applications")  # of a loop model
    return (
        f"one forward pass computes {_several(prefill + decode, 'token')}, ours among them: "
        f"{prefill} of prefill, {decode} of decode."
        + (f" It applies the core {loops} times." if loops else "")
    )


def _finished(m: Moment) -> str:
    why = {"length": "it has all the tokens it asked for", "stop": "it met a stop"}
    reason = m.data("finish_reason")
    return f"{m.who} is finished: {why.get(reason, f'the reason is {reason}')}."


def _held(m: Moment) -> str:
    held = m.data("held")
    why = f"{held!r} may begin a stop string" if held else "its bytes are no whole character yet"
    return f"nothing is shown: {why}."


def _tier(m: Moment) -> str:
    dram, disk = m.data("dram") or 0, m.data("disk") or 0
    return f"{m.span} of {m.who} come from the tiers: {dram} tokens from DRAM, {disk} from disk."


SENTENCES: dict[str, Callable[[Moment], str]] = {
    "request.admitted": _admitted,
    "request.scheduled": _scheduled,
    "request.preempted": lambda m: (
        f"{m.who} is preempted: its blocks are needed elsewhere, it will be computed again."
    ),
    "request.forked": lambda m: f"{m.who} branches off {m.data('parent')} and shares its blocks.",
    "request.finished": _finished,
    "step.started": lambda m: f"step {m.event.step} begins.",
    "step.scheduled": lambda m: f"the plan of step {m.event.step} is made.",
    "step.prepared": lambda m: (
        f"every token of the step gets its slot; ours is slot {m.slot}, in {m.where}."
    ),
    "step.drafted": lambda m: "the next tokens are guessed; the step will judge them.",
    "step.forward": _forward,
    "step.sampled": lambda m: "a token is drawn for every request that has caught up.",
    "step.postprocessed": lambda m: f"step {m.event.step} ends.",
    "kv.prefix_hit": _hit,
    "kv.tier_hit": _tier,
    "kv.prefetch_started": lambda m: (
        f"{_several(m.data('blocks'), 'block')} of {m.who} are asked for from the disk."
    ),
    "kv.prefetch_done": lambda m: f"{_several(m.data('blocks'), 'block')} came from the disk.",
    "kv.block_allocated": _allocated,
    "kv.block_copied": _copied,
    "kv.block_published": _published,
    "kv.block_unpublished": lambda m: f"block {m.block} is taken out of the prefix index.",
    "kv.block_evicted": _evicted,
    "kv.block_freed": _freed,
    "kv.block_stored": lambda m: f"{_several(m.data('blocks'), 'block')} are copied to a tier.",
    "draft.judged": lambda m: (
        f"{m.data('num_accepted')} of {_several(len(m.data('token_ids')), 'draft')} of {m.who} "
        "are what the model would have written."
    ),
    "token.sampled": lambda m: (
        f"the sampler draws token {m.data('token_id')} for position {m.position} of {m.who}."
    ),
    "text.released": lambda m: f"the text {m.data('text')!r} can be shown.",
    "text.held_back": _held,
    "guard.tripped": lambda m: f"the guard {m.data('guard')} raises an alarm: {m.data('reason')}.",
}
