"""The tier in memory: blocks by prefix, least recently used first, within a budget.

Only the engine's thread touches it. A payload is never written to once it is here, so whoever
holds a reference reads what was stored; pins only keep its memory inside the budget.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice
from typing import Any

from minifer.kv.prefix_key import PrefixKey, same_prefix
from minifer.kv.tiers.stats import TierStats
from minifer.kv.watcher import DRAM, KVWatcher

Payload = Any  # one block's keys and values; on a real engine a memoryview of its bytes


@dataclass(eq=False, slots=True)
class StoredBlock:
    """One block. pins: of requests that wait for it. writing: it is queued for the disk."""

    key: PrefixKey
    payload: Payload
    pins: int = 0
    writing: bool = False

    @property
    def pinned(self) -> bool:
        return self.pins > 0 or self.writing


class DramTier:
    """digest → block. As in the device's index a digest only suggests: prefixes are compared.

    Of one prefix the front is more recent than what follows it, whatever was touched last (see
    `touch`): a block is evicted before those in front of it, never the other way round, which
    would strand it.

    capacity: blocks. `reserved` of them are promised to blocks that are being read from disk.
    """

    def __init__(self, capacity: int, stats: TierStats) -> None:
        self.capacity = capacity
        self.reserved = 0
        self.watcher: KVWatcher | None = None
        self._blocks: OrderedDict[bytes, StoredBlock] = OrderedDict()
        self._stats = stats

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[StoredBlock]:
        """From the least to the most recently used."""
        return iter(self._blocks.values())

    @property
    def room(self) -> int:
        """Blocks that could be taken in, after evictions."""
        pinned = sum(block.pinned for block in self._blocks.values())
        return self.capacity - self.reserved - pinned

    def get(self, key: PrefixKey) -> StoredBlock | None:
        block = self._blocks.get(key.digest)
        return block if block is not None and same_prefix(block.key, key) else None

    def match(self, keys: Sequence[PrefixKey]) -> list[StoredBlock]:
        """The longest run of `keys`, from the first on, that is here."""
        found: list[StoredBlock] = []
        for key in keys:
            block = self._blocks.get(key.digest)
            if block is None:
                break
            # What was stored together shares its chain of keys: the walk ends at the block before.
            cached, before = block.key, found[-1].key if found else key.parent
            same = cached.token_ids == key.token_ids and cached.extra == key.extra
            if not same or not same_prefix(cached.parent, before):
                break
            found.append(block)
        return found

    def touch(self, key: PrefixKey | None) -> None:
        """A prefix is used: all of its blocks become recent, from the tail `key` to the head."""
        while key is not None:
            if key.digest in self._blocks:
                self._blocks.move_to_end(key.digest)
            key = key.parent

    def make_room(self, count: int = 1, keep: AbstractSet[bytes] = frozenset()) -> bool:
        """Evict until `count` more blocks fit; False when they cannot.

        keep: digests that are not evicted, beside the pinned ones.
        """
        excess = len(self._blocks) + self.reserved + count - self.capacity
        if excess <= 0:
            return True
        evictable = (d for d, b in self._blocks.items() if not b.pinned and d not in keep)
        victims = list(islice(evictable, excess))
        if len(victims) < excess:
            return False
        for digest in victims:
            evicted = self._blocks.pop(digest)
            if self.watcher is not None:
                self.watcher.removed(evicted.key, DRAM)
        self._stats.evicted["dram"] += len(victims)
        return True

    def put(
        self, key: PrefixKey, payload: Payload, keep: AbstractSet[bytes] = frozenset()
    ) -> StoredBlock | None:
        """Take a block in as the most recent; None when there is no room.

        Of two prefixes with one digest the first stays, and the second is not taken.
        """
        if key.digest in self._blocks:
            return self.get(key)
        if not self.make_room(1, keep):
            return None
        block = self._blocks[key.digest] = StoredBlock(key, payload)
        if self.watcher is not None:
            self.watcher.stored(key, DRAM)
        return block

    def clear(self) -> None:
        self._blocks.clear()
        if self.watcher is not None:
            self.watcher.cleared(DRAM)


def chain(key: PrefixKey | None) -> Iterator[PrefixKey]:
    """A key and those in front of it, from the tail to the head."""
    while key is not None:
        yield key
        key = key.parent
