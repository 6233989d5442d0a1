"""Whose keys and values a slot holds: a model of the KV memory, kept in plain Python.

The KV at a position is a function of the tokens up to it and of what else the prefix key covers.
So a *tag*, a hash chain over exactly that, says what a slot must hold to be read there::

    tag(p) = hash(tag(p − 1), token p)        tag(−1) = hash(salt, …)

`ShadowKV` follows every copy, load and write of a step, and then demands that each slot the step
will read carries the reader's own tag. It sees what no look at numbers can: a block that was
reused too early, a position that was never written, another tenant's prefix. It costs one look
per position of context a step, which is why only the debug mode keeps it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from minifer.debug import DebugError
from minifer.kv.manager import extra_keys
from minifer.kv.prefix_key import ExtraKeys, PrefixKey
from minifer.kv.step_input import StepInput
from minifer.request import Request

if TYPE_CHECKING:
    from minifer.scheduling.plan import ScheduledRequest, SchedulePlan


class ShadowKV:
    """What every slot holds, as tags. block_size: P."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._tags: dict[int, int] = {}  # slot → tag; a slot without one holds nothing
        self._chains: WeakKeyDictionary[Request, list[int]] = WeakKeyDictionary()

    def follow(self, plan: SchedulePlan, step: StepInput) -> None:
        """Carry out a step's copies, loads and writes, then check its reads.

        In the order of a runner: copies, poison, loads, writes, reads. Raises `DebugError`.
        """
        P, before = self.block_size, dict(self._tags) if step.block_copies else {}
        for source, target in step.block_copies:
            for i in range(P):
                self._set(target * P + i, before.get(source * P + i))
        for block_id in step.block_poison:
            self.forget(block_id)
        for block_id, stored in step.block_loads:
            for i, tag in enumerate(key_tags(stored.key)):
                self._set(block_id * P + i, tag)
        rows = pairwise(step.query_start)
        for entry, (first, end) in zip(plan.scheduled, rows, strict=True):
            self._write(entry, step, range(first, end))
        for entry, table, length in zip(
            plan.scheduled, step.block_tables, step.seq_lens, strict=True
        ):
            self._read(entry, table, length)

    def forget(self, block_id: int) -> None:
        """The block's content is nobody's any more."""
        for slot in range(block_id * self.block_size, (block_id + 1) * self.block_size):
            self._tags.pop(slot, None)

    def _write(self, entry: ScheduledRequest, step: StepInput, rows: range) -> None:
        request, chain = entry.request, self._chain(entry.request)
        tokens = request.token_ids[: entry.end] + request.draft_token_ids
        if len(rows) != entry.num_new:
            raise DebugError(f"{request} computes {entry.num_new} tokens, {len(rows)} are laid out")
        for row, position in zip(rows, range(entry.start, entry.end), strict=True):
            token, said = tokens[position], step.token_ids[row]
            if (said, step.positions[row]) != (token, position):
                raise DebugError(
                    f"{request} is to compute token {token} at position {position}, the batch has "
                    f"token {said} at position {step.positions[row]}"
                )
            self._set(step.slot_mapping[row], chain[position])

    def _read(self, entry: ScheduledRequest, table: list[int], length: int) -> None:
        request, P, chain = entry.request, self.block_size, self._chain(entry.request)
        if length != entry.end:
            raise DebugError(
                f"{request} has {entry.end} tokens of context, attention reads {length}"
            )
        if len(table) * P < length:
            raise DebugError(f"{request} reads {length} tokens from {len(table)} blocks of {P}")
        for position in range(length):
            tag = self._tags.get(table[position // P] * P + position % P)
            if tag != chain[position]:
                what = "nothing" if tag is None else "the KV of other tokens"
                raise DebugError(
                    f"{request} reads position {position} from block {table[position // P]}, "
                    f"which holds {what} there"
                )

    def _set(self, slot: int, tag: int | None) -> None:
        if tag is None:
            self._tags.pop(slot, None)
        else:
            self._tags[slot] = tag

    def _chain(self, request: Request) -> list[int]:
        """The tags of all tokens of a request so far, and of its drafts."""
        chain = self._chains.setdefault(request, [])
        _extend(chain, request.token_ids, extra_keys(request))
        if not request.draft_token_ids:
            return chain
        chain = list(chain)  # a draft may be dropped
        _extend(chain, request.token_ids + request.draft_token_ids, extra_keys(request))
        return chain


def _extend(chain: list[int], token_ids: list[int] | tuple[int, ...], extra: ExtraKeys) -> None:
    last = chain[-1] if chain else hash(extra)
    for token in token_ids[len(chain) :]:
        last = hash((last, token))
        chain.append(last)


def key_tags(key: PrefixKey) -> list[int]:
    """The tags of the P tokens of a block, from its prefix key alone."""
    links: list[PrefixKey] = []
    link: PrefixKey | None = key
    while link is not None:
        links.append(link)
        link = link.parent
    chain: list[int] = []
    tokens = tuple(token for link in reversed(links) for token in link.token_ids)
    _extend(chain, tokens, key.extra)
    return chain[-len(key.token_ids) :]
