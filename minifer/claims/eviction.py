"""Eviction policies to compare the engine's LRU with: small, plain, and one that knows the future.

A cache holds blocks of prompts. A hit counts only as part of a prompt's unbroken beginning: the
blocks before the first missing one. All policies see a request in the same way: first `hits`, then
`use`, and after it the prompt's blocks are in the cache, as far as they fit.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from minifer.kv.prefix_key import PrefixKey, make_key
from minifer.kv.tiers.dram import DramTier
from minifer.kv.tiers.stats import TierStats

NEVER = 1 << 60


@dataclass(frozen=True)
class Prompt:
    """A request's blocks, first to last: as the engine names them, and as plain numbers."""

    keys: tuple[PrefixKey, ...]
    ids: tuple[int, ...]


def prompts(requests: Iterable[Sequence[int]]) -> list[Prompt]:
    """Block names of requests → prompts. Equal names after equal names are one block."""
    known: dict[tuple[bytes, int], tuple[PrefixKey, int]] = {}
    out = []
    for names in requests:
        keys: list[PrefixKey] = []
        ids: list[int] = []
        for name in names:
            parent = keys[-1] if keys else None
            place = (parent.digest if parent else b"", name)
            if place not in known:
                known[place] = (make_key(parent, (name,)), len(known))
            key, number = known[place]
            keys.append(key)
            ids.append(number)
        if keys:
            out.append(Prompt(tuple(keys), tuple(ids)))
    return out


class Cache(Protocol):
    def hits(self, prompt: Prompt) -> int:
        """Leading blocks that are here."""
        ...

    def use(self, prompt: Prompt, when: int) -> None:
        """Serve the `when`-th request: its blocks are here afterwards."""
        ...


class EngineLRU:
    """The engine's own tier in memory (`minifer.kv.tiers.dram`), used as the engine uses it."""

    def __init__(self, size: int) -> None:
        self.tier = DramTier(size, TierStats())

    def hits(self, prompt: Prompt) -> int:
        return len(self.tier.match(prompt.keys))

    def use(self, prompt: Prompt, when: int) -> None:
        keep = {key.digest for key in prompt.keys}
        self.tier.touch(prompt.keys[-1])
        for key in prompt.keys:
            if self.tier.put(key, None, keep) is None:
                break
        self.tier.touch(prompt.keys[-1])


class _Plain(ABC):
    """A cache of block numbers; `__contains__` says what is here."""

    def __init__(self, size: int) -> None:
        self.size = size

    @abstractmethod
    def __contains__(self, block: int) -> bool: ...

    def hits(self, prompt: Prompt) -> int:
        return sum(1 for _ in takewhile(self.__contains__, prompt.ids))


class FIFO(_Plain):
    """First in, first out; a use changes nothing."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def use(self, prompt: Prompt, when: int) -> None:
        for block in reversed(prompt.ids):
            self._blocks.setdefault(block)
            if len(self._blocks) > self.size:
                self._blocks.popitem(last=False)


class LFU(_Plain):
    """Fewest uses since it came goes first; among equals the least recent."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._uses: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, int]] = []
        self._clock = 0

    def __contains__(self, block: int) -> bool:
        return block in self._uses

    def use(self, prompt: Prompt, when: int) -> None:
        for block in reversed(prompt.ids):
            self._clock += 1
            uses = self._uses[block][0] + 1 if block in self._uses else 1
            while block not in self._uses and len(self._uses) >= self.size:
                count, used, victim = heapq.heappop(self._heap)
                if self._uses.get(victim) == (count, used):
                    del self._uses[victim]
            self._uses[block] = (uses, self._clock)
            heapq.heappush(self._heap, (uses, self._clock, block))


class S3FIFO(_Plain):
    """Three queues (Yang et al., SOSP 2023): a small one that most blocks leave for good, a main
    one with second chances, and the names of those that left the small one."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._small_size = max(1, size // 10)
        self._small: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._uses

    def use(self, prompt: Prompt, when: int) -> None:
        for block in reversed(prompt.ids):
            if block in self._uses:
                self._uses[block] = min(3, self._uses[block] + 1)
                continue
            known = block in self._ghosts
            self._ghosts.pop(block, None)
            (self._main if known else self._small)[block] = None
            self._uses[block] = 0
            while len(self._uses) > self.size:
                self._evict()

    def _evict(self) -> None:
        if len(self._small) > self._small_size or not self._main:
            block, _ = self._small.popitem(last=False)
            if self._uses[block] > 1:
                self._main[block], self._uses[block] = None, 0
                return
            self._ghosts[block] = None
            if len(self._ghosts) > self.size - self._small_size:
                self._ghosts.popitem(last=False)
        else:
            block, _ = self._main.popitem(last=False)
            if self._uses[block] > 0:
                self._main[block] = None
                self._uses[block] -= 1
                return
        del self._uses[block]


class Clairvoyant(_Plain):
    """Belady: evicts what is used furthest in the future, of one prompt the last block first. It
    may refuse a block. Optimal block by block; with hits that must be unbroken nobody has proved
    it."""

    def __init__(self, size: int, future: Sequence[Sequence[int]]) -> None:
        super().__init__(size)
        self._future = future
        self._blocks: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, int]] = []

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def use(self, prompt: Prompt, when: int) -> None:
        for depth, (block, next_use) in enumerate(zip(prompt.ids, self._future[when], strict=True)):
            self._blocks[block] = (-next_use, -depth)
            heapq.heappush(self._heap, (-next_use, -depth, block))
        while len(self._blocks) > self.size:
            *key, victim = heapq.heappop(self._heap)
            if self._blocks.get(victim) == tuple(key):
                del self._blocks[victim]


def next_uses(requests: Sequence[Prompt]) -> list[list[int]]:
    """Of each block of each request: the number of the request that uses it next, or `NEVER`."""
    seen: dict[int, int] = {}
    out: list[list[int]] = [[] for _ in requests]
    for when in reversed(range(len(requests))):
        ids = requests[when].ids
        out[when] = [seen.get(block, NEVER) for block in ids]
        seen.update(dict.fromkeys(ids, when))
    return out


def hit_rate(requests: Sequence[Prompt], cache: Cache) -> float:
    """Blocks served ÷ blocks asked for."""
    hits = total = 0
    for when, prompt in enumerate(requests):
        total += len(prompt.ids)
        hits += cache.hits(prompt)
        cache.use(prompt, when)
    return hits / total


def reuse_bound(requests: Sequence[Prompt]) -> float:
    """What a cache without limit would serve: all but each block's first use."""
    total = sum(len(prompt.ids) for prompt in requests)
    return 1 - len({block for prompt in requests for block in prompt.ids}) / total


def optimal_misses(string: Sequence[int], size: int) -> int:
    """Belady's misses on single blocks, each of which must be let in (the theorem's setting)."""
    following = _next_places(string)
    held: dict[int, int] = {}
    misses = 0
    for block, after in zip(string, following, strict=True):
        if block not in held:
            misses += 1
            if len(held) == size:
                del held[max(held, key=held.__getitem__)]
        held[block] = after
    return misses


def _next_places(string: Sequence[int]) -> Iterator[int]:
    seen: dict[int, int] = {}
    out = []
    for place in reversed(range(len(string))):
        out.append(seen.get(string[place], NEVER))
        seen[string[place]] = place
    return reversed(out)
