"""Blocks that change engines: what came from another one waits here, pinned, for its request.

::

    prefill engine                                     decode engine
    device ─▶ DRAM ─▶ KVTiers.export ─ a link ─▶ Imports.take ─▶ DRAM ─▶ device

To the engine that gets them they are blocks like any others in its DRAM tier: the request they
came for finds them there, and computes what is missing. Nobody can tell a block that was handed
over from one that was computed here.
"""

from __future__ import annotations

from collections.abc import Sequence

from minifer.kv.prefix_key import PrefixKey
from minifer.kv.tiers.dram import DramTier, Payload, StoredBlock, chain


class Imports:
    """For the engine's thread. Pins end with `release`, which may be called at any time."""

    def __init__(self, dram: DramTier) -> None:
        self._dram = dram
        self._held: dict[str, list[StoredBlock]] = {}

    def __len__(self) -> int:
        """Requests that something is held for."""
        return len(self._held)

    @property
    def blocks(self) -> list[StoredBlock]:
        """What is pinned, once for each request it is held for."""
        return [block for held in self._held.values() for block in held]

    def take(self, request_id: str, keys: Sequence[PrefixKey], payloads: Sequence[Payload]) -> int:
        """Put blocks that follow each other into DRAM, for a request that is about to come.

        Returns how many of them, the first ones, found room.
        """
        held = self._held.setdefault(request_id, [])
        before = len(held)
        keep = {link.digest for link in chain(keys[-1])} if keys else set()
        for key, payload in zip(keys, payloads, strict=True):
            block = self._dram.put(key, payload, keep)
            if block is None:
                break
            block.pins += 1
            held.append(block)
        if keys:
            self._dram.touch(keys[-1])
        if not held:
            del self._held[request_id]
        return len(held) - before

    def release(self, request_id: str) -> None:
        """The request runs, or never will: its blocks may be evicted."""
        for block in self._held.pop(request_id, ()):
            block.pins -= 1
