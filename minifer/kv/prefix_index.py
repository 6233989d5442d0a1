"""Which blocks hold which prefixes: one interface, and its hash-chain implementation.

An index only remembers; it owns no blocks. The `BlockPool` decides what is evicted (least
recently used first) and tells the index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from minifer.kv.prefix_key import PrefixKey, same_prefix


class PrefixIndex(Protocol):
    """A map from prefixes to block ids; made empty, without arguments."""

    def match(self, keys: Sequence[PrefixKey]) -> list[int]:
        """Blocks of the longest run of `keys`, from the first on, that is cached."""
        ...

    def insert(self, key: PrefixKey, block_id: int, previous: int | None) -> bool:
        """Publish a block; `previous` is the block before it in its request's table.

        False when it stays unpublished, because an equal block is there: the oldest stays.
        """
        ...

    def remove(self, key: PrefixKey, block_id: int) -> list[int]:
        """Forget a block; returns all blocks that can no longer be found, itself included."""
        ...


class HashChainIndex:
    """digest → block, one entry a block. The default, and how vLLM does it.

    A block is found by the digest of its whole prefix, so a prefix is looked up block by block
    until the first miss. A digest only suggests: tokens and context are compared on every hit,
    and of two prefixes that collide the second stays unpublished.
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, tuple[PrefixKey, int]] = {}

    def match(self, keys: Sequence[PrefixKey]) -> list[int]:
        found: list[int] = []
        parent: PrefixKey | None = None
        for key in keys:
            entry = self._entries.get(key.digest)
            if entry is None:
                break
            cached, block_id = entry
            same = cached.token_ids == key.token_ids and cached.extra == key.extra
            if not same or not same_prefix(cached.parent, parent):
                break
            found.append(block_id)
            parent = cached
        return found

    def insert(self, key: PrefixKey, block_id: int, previous: int | None) -> bool:
        if key.digest in self._entries:
            return False
        self._entries[key.digest] = (key, block_id)
        return True

    def remove(self, key: PrefixKey, block_id: int) -> list[int]:
        if self._entries.get(key.digest, (None, None))[1] != block_id:
            return []
        del self._entries[key.digest]
        return [block_id]
