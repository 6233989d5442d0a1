"""Which replicas hold which blocks: the table inside `KVIndex`, without clock or protocol."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import count


class HolderTable:
    """key → replicas, replica → keys, and the end of those that are only believed for a while.

    A block is held in some media, given as bits; in none of them (0) while it is only assumed.
    Keys are kept from the least to the most recently used, and of one prefix the front is more
    recent than what follows it. The replicas of a key are one number, a bit for each: a look-up
    of thousands of blocks is so many ANDs.
    """

    def __init__(self) -> None:
        self._holders: OrderedDict[Hashable, int] = OrderedDict()
        self._bits: dict[str, int] = {}  # replica → its bit, while it holds anything
        self._blocks: dict[str, dict[Hashable, int]] = {}  # replica → key → media
        self._ends: OrderedDict[tuple[str, Hashable], float] = OrderedDict()  # sorted by time
        self._size = 0

    def __len__(self) -> int:
        """Blocks; one that two replicas hold counts twice."""
        return self._size

    def num_blocks(self, replica: str) -> int:
        return len(self._blocks.get(replica, ()))

    def holds(self, replica: str, key: Hashable) -> bool:
        return key in self._blocks.get(replica, ())

    def doubts(self, replica: str, key: Hashable) -> bool:
        """Will this block be forgotten at some time, whether reported or not?"""
        return (replica, key) in self._ends

    def match(self, keys: Sequence[Hashable]) -> dict[str, int]:
        """Replica → leading `keys` it holds, of those that hold the first. Nothing is touched."""
        found: dict[str, int] = {}
        holders = self._holders
        alive = holders.get(keys[0], 0) if keys else 0
        depth = 0
        while alive:
            depth += 1
            still = alive & holders.get(keys[depth], 0) if depth < len(keys) else 0
            if still != alive:
                found.update(dict.fromkeys(self._names(alive & ~still), depth))
                alive = still
        return found

    def _names(self, bits: int) -> list[str]:
        return [replica for replica, bit in self._bits.items() if bits & bit]

    def touch(self, keys: Iterable[Hashable]) -> None:
        """These are used, in the order of their prefix."""
        for key in reversed(tuple(keys)):
            if key in self._holders:
                self._holders.move_to_end(key)

    def put(self, replica: str, key: Hashable, media: int, end: float | None = None) -> None:
        """A replica holds a block; `end`: believed until then, which is never before another's."""
        blocks = self._blocks.setdefault(replica, {})
        if key not in blocks:
            self._size += 1
            self._holders[key] = self._holders.get(key, 0) | self._bit(replica)
        blocks[key] = blocks.get(key, 0) | media
        self._ends.pop((replica, key), None)
        if end is not None:
            self._ends[replica, key] = end

    def _bit(self, replica: str) -> int:
        if replica not in self._bits:
            used = set(self._bits.values())
            self._bits[replica] = next(1 << i for i in count() if 1 << i not in used)
        return self._bits[replica]

    def take(self, replica: str, key: Hashable, media: int) -> None:
        """A replica no longer holds a block in these media; and if in no other, not at all."""
        blocks = self._blocks.get(replica, {})
        if key in blocks:
            blocks[key] &= ~media
            if not blocks[key]:
                self._drop(replica, key)

    def take_all(self, replica: str, media: int) -> None:
        for key in list(self._blocks.get(replica, ())):
            self.take(replica, key, media)

    def clear(self, replica: str) -> None:
        for key in list(self._blocks.get(replica, ())):
            self._drop(replica, key)
        self._blocks.pop(replica, None)
        self._bits.pop(replica, None)

    def doubt(self, replica: str, end: float) -> None:
        """What the replica holds is believed until `end`; what was doubted before, no longer."""
        for key in self._blocks.get(replica, ()):
            self._ends.setdefault((replica, key), end)

    def expire(self, now: float) -> None:
        """Forget what is believed no longer."""
        while self._ends:
            (replica, key), end = next(iter(self._ends.items()))
            if end > now:
                break
            self._drop(replica, key)

    def shrink(self, max_blocks: int) -> set[str]:
        """Drop the least recently used keys until so many blocks are left; whose they were."""
        lost: set[str] = set()
        while self._size > max_blocks:
            key, bits = next(iter(self._holders.items()))
            for replica in self._names(bits):
                self._drop(replica, key)
                lost.add(replica)
        return lost

    def _drop(self, replica: str, key: Hashable) -> None:
        del self._blocks[replica][key]
        self._ends.pop((replica, key), None)
        self._size -= 1
        self._holders[key] &= ~self._bits[replica]
        if not self._holders[key]:
            del self._holders[key]
