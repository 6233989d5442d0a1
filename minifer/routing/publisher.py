"""The engine's side of the KV events: what changes in its KV, in batches for a router."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from minifer.kv.manager import KVCacheManager
from minifer.kv.prefix_key import ExtraKeys, PrefixKey, make_key
from minifer.kv.watcher import DEVICE, DRAM
from minifer.routing.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
)

MAX_PENDING = 100_000  # changes kept for a router that does not ask for them

_Change = tuple[bool, bytes, bytes | None, str]  # stored (or removed), digest, parent, medium


class KVEventPublisher:
    """Collects what changes in an engine's KV, and keeps what it holds for snapshots.

    Watches from the moment it is made, on the engine's thread or before there is one; `close` ends
    that. `take` and `snapshot` are for any thread. When nobody takes, the changes are given up
    beyond `max_pending`, and a gap in the numbers says so.

    replica: its name at the router. epoch: larger in each process that takes this name; the time
    in nanoseconds unless given.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        replica: str,
        epoch: int | None = None,
        max_pending: int = MAX_PENDING,
    ) -> None:
        self.replica = replica
        self.epoch = time.time_ns() if epoch is None else epoch
        self._kv = kv
        self._lock = threading.Lock()
        self._sequence = 0
        self._max_pending = max_pending
        self._held = held_blocks(kv)
        self._pending = self._everything()
        kv.watch(self)

    def close(self) -> None:
        """Watch no longer, unless another publisher has taken over."""
        if self._kv.pool.watcher is self:
            self._kv.watch(None)

    # -- on the engine's thread

    def stored(self, key: PrefixKey, medium: str) -> None:
        parent = key.parent.digest if key.parent is not None else None
        with self._lock:
            self._held[medium][key.digest] = parent
            self._note((True, key.digest, parent, medium))

    def removed(self, key: PrefixKey, medium: str) -> None:
        with self._lock:
            self._held[medium].pop(key.digest, None)
            self._note((False, key.digest, None, medium))

    def cleared(self, medium: str) -> None:
        with self._lock:
            self._held[medium].clear()
            self._note(AllBlocksCleared(medium))

    def _note(self, change: _Change | AllBlocksCleared) -> None:
        self._pending.append(change)
        if len(self._pending) > self._max_pending:
            self._pending.clear()
            self._sequence += 1  # a batch that will never come

    # -- on any thread

    @property
    def num_pending(self) -> int:
        """Changes that the next `take` brings."""
        return len(self._pending)

    def take(self) -> KVEventBatch:
        """What has changed since the last call, as the next batch."""
        with self._lock:
            changes, self._pending = self._pending, []
            self._sequence += 1
            sequence = self._sequence
        return KVEventBatch(self.replica, self.epoch, sequence, _runs(changes))

    def snapshot(self) -> KVEventBatch:
        """Everything that is held. What a later `take` repeats of it does no harm."""
        with self._lock:
            changes, sequence = self._everything(), self._sequence
        return KVEventBatch(self.replica, self.epoch, sequence, _runs(changes), snapshot=True)

    def _everything(self) -> list[_Change | AllBlocksCleared]:
        return [
            (True, digest, parent, medium)
            for medium, blocks in self._held.items()
            for digest, parent in blocks.items()
        ]


def held_blocks(kv: KVCacheManager) -> dict[str, dict[bytes, bytes | None]]:
    """Medium → digest → parent's digest, of every block that can be found in an engine.

    For the engine's thread.
    """
    keys: dict[str, list[PrefixKey]] = {
        DEVICE: [block.key for block in kv.pool.blocks if block.key is not None],
        DRAM: [block.key for block in kv.tiers.dram] if kv.tiers is not None else [],
    }
    return {
        medium: {key.digest: key.parent.digest if key.parent else None for key in in_medium}
        for medium, in_medium in keys.items()
    }


def prompt_digests(
    token_ids: Iterable[int], block_size: int, extra: ExtraKeys = ()
) -> tuple[bytes, ...]:
    """The keys of a prompt's full blocks, as the engine will make them: what a router looks up.

    extra: what `minifer.kv.manager.extra_keys` says of the request, such as its cache salt.
    """
    tokens = list(token_ids)
    digests: list[bytes] = []
    key: PrefixKey | None = None
    for end in range(block_size, len(tokens) + 1, block_size):
        key = make_key(key, tokens[end - block_size : end], extra)
        digests.append(key.digest)
    return tuple(digests)


def _runs(changes: Iterable[_Change | AllBlocksCleared]) -> tuple[KVEvent, ...]:
    """Changes as few events: a block joins the event before it where it goes on from there."""
    events: list[KVEvent] = []
    run: list[_Change] = []

    def end_run() -> None:
        if run:
            stored, _, parent, medium = run[0]
            hashes = tuple(digest for _, digest, _, _ in run)
            events.append(
                BlockStored(hashes, parent, medium) if stored else BlockRemoved(hashes, medium)
            )
            run.clear()

    for change in changes:
        if isinstance(change, AllBlocksCleared):
            end_run()
            events.append(change)
            continue
        stored, _, parent, medium = change
        if run:
            before = run[-1]
            joins = before[0] == stored and before[3] == medium
            if not joins or (stored and parent != before[1]):
                end_run()
        run.append(change)
    end_run()
    return tuple(events)
