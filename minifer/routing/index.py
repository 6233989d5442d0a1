"""What each replica holds, as far as its router knows.

A copy of the replicas' own prefix indexes, kept by their KV events::

    digest    replicas that hold the block
    a1 …      A, B            match([a1, b2, c3]) = {"A": 3, "B": 1}
    b2 …      A
    c3 …      A

A digest names a whole prefix, so blocks are looked up one by one until nobody holds the next. A
copy may be wrong: events get lost, a replica does not send any. Then the index says less than is
true, or what was true some seconds ago, and a request is routed less well: never answered wrongly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from minifer.routing.holders import HolderTable
from minifer.routing.kv_events import (
    MEDIA,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
)
from minifer.routing.policy import RoutingRequest

MAX_BLOCKS = 2**18  # some 350 bytes each
_BIT = {medium: 1 << i for i, medium in enumerate(MEDIA)}
_ALL = sum(_BIT.values())


@dataclass
class _Follower:
    """How far a replica's events have been followed.

    exact: every event since its start or since a snapshot has come. truncated: blocks of it were
    dropped for want of room. unheard_since: when it was first sent something that it must report,
    after it last reported anything. snapshot: the number of the last one, or 0.
    """

    epoch: int = -1
    sequence: int = 0
    snapshot: int = 0
    exact: bool = False
    truncated: bool = False
    wants_snapshot: bool = False
    asked_at: float | None = None
    unheard_since: float | None = None


class KVIndex:
    """key → replicas, within a bound.

    A replica is followed *exactly* while its batches come without a gap, from its start or from a
    snapshot on: it holds what it reports. What it was sent (`record`) counts at once, for `ttl`
    seconds or until it reports about it, so that of two prompts that come together the second can
    follow the first. Otherwise it is followed *approximately*, by what it was sent alone; what it
    reported before is believed for `ttl` seconds more. That is how it begins, what a gap leads to
    until a snapshot has come, and what becomes of a replica that was sent a new prefix and reports
    nothing for `silence` seconds. (Without, one that publishes no events would look as if its
    cache were empty: ai-dynamo/dynamo#11473.)

    max_blocks: of all replicas together; the least recently matched are dropped first.
    snapshot_retry: seconds until a snapshot that has not come is asked for again. clock: seconds.
    One thread's. Raises `ValueError` for a bound that is none.
    """

    def __init__(
        self,
        max_blocks: int = MAX_BLOCKS,
        ttl: float = 120.0,
        silence: float = 30.0,
        snapshot_retry: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be at least 1, got {max_blocks}")
        for name, value in {"ttl": ttl, "silence": silence}.items():
            if not value > 0:
                raise ValueError(f"{name} must be above 0 seconds, got {value}")
        self.max_blocks = max_blocks
        self.ttl = ttl
        self.silence = silence
        self.snapshot_retry = snapshot_retry
        self._clock = clock
        self._table = HolderTable()
        self._followers: dict[str, _Follower] = {}

    def __len__(self) -> int:
        """Blocks; one that two replicas hold counts twice."""
        return len(self._table)

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(self._followers)

    def num_blocks(self, replica: str) -> int:
        """Blocks that the replica holds."""
        self._table.expire(self._clock())
        return self._table.num_blocks(replica)

    def add(self, replica: str) -> None:
        """Follow a replica, which holds nothing as far as we know. One that is followed stays."""
        self._followers.setdefault(replica, _Follower())

    def remove(self, replica: str) -> None:
        """The replica is gone, and all it held. What it still says is not listened to."""
        self._followers.pop(replica, None)
        self._table.clear(replica)

    # -- asking

    def match(self, keys: Sequence[Hashable]) -> dict[str, int]:
        """Replica → leading `keys` it holds, of those that hold the first; and keeps these."""
        self._table.expire(self._clock())
        found = self._table.match(keys)
        self._table.touch(keys[: max(found.values(), default=0)])
        return found

    def matched_tokens(self, request: RoutingRequest) -> Mapping[str, int]:
        """Replica → leading prompt tokens it holds: what a policy is told."""
        blocks = self.match(request.prefix_keys)
        return {replica: count * request.block_size for replica, count in blocks.items()}

    def is_approximate(self, replica: str) -> bool:
        """Is what this replica holds only concluded from what it was sent?"""
        follower = self._followers[replica]
        since = follower.unheard_since
        if follower.exact and since is not None and self._clock() - since >= self.silence:
            self._doubt(replica)
        return not follower.exact

    def snapshots_wanted(self) -> list[str]:
        """Replicas to ask for a snapshot now; each is named once in `snapshot_retry` seconds."""
        now, names = self._clock(), []
        for name, follower in self._followers.items():
            asked = follower.asked_at
            due = asked is None or now - asked >= self.snapshot_retry
            if follower.wants_snapshot and due:
                follower.asked_at = now
                names.append(name)
        return names

    # -- being told

    def record(self, replica: str, keys: Sequence[Hashable]) -> None:
        """A request with this prefix was sent there."""
        follower = self._followers.get(replica)
        if follower is None or not keys:
            return
        now = self._clock()
        self._table.expire(now)
        self.is_approximate(replica)  # after a silence nothing is sure
        table = self._table
        unsure = [k for k in keys if not table.holds(replica, k) or table.doubts(replica, k)]
        if unsure and follower.unheard_since is None:
            follower.unheard_since = now
        for key in unsure:
            table.put(replica, key, 0, end=now + self.ttl)
        table.touch(keys)
        self._shrink()

    def apply(self, batch: KVEventBatch) -> None:
        """Take a replica's events over. Batches that were seen, or are older, change nothing."""
        name = batch.replica
        follower = self._followers.get(name)
        if follower is None or batch.epoch < follower.epoch:
            return
        self._table.expire(self._clock())
        if batch.epoch > follower.epoch:  # a new process: of the one before nothing is left
            self._table.clear(name)
            follower = self._followers[name] = _Follower(epoch=batch.epoch)
        if batch.sequence < follower.sequence + (not batch.snapshot):
            return  # of a snapshot: what came since would be lost, so one more is asked for
        self.is_approximate(name)  # after a silence a snapshot is needed
        if batch.snapshot:
            self._table.clear(name)
            self._followers[name] = follower = _Follower(
                batch.epoch, snapshot=batch.sequence, exact=True
            )
        elif batch.sequence == 1:
            follower.exact = True
        elif batch.sequence > follower.sequence + 1:
            self._doubt(name)
        follower.sequence = batch.sequence
        follower.unheard_since = None
        follower.wants_snapshot |= not follower.exact
        # A snapshot has no order, nor has the first batch, which holds what was there already; and
        # what follows a snapshot may be a part of it, seen once more.
        in_order = batch.sequence > follower.snapshot + 1
        for event in batch.events:
            self._apply_event(name, follower, event, in_order)
        self._shrink()

    def _apply_event(self, name: str, follower: _Follower, event: KVEvent, in_order: bool) -> None:
        if isinstance(event, BlockStored):
            # Something was missed (vllm-project/vllm#58119). The blocks are kept: they are found
            # as soon as their parent is reported. If it was dropped here, asking would not help.
            parent = event.parent_block_hash
            unknown = parent is not None and not self._table.holds(name, parent)
            if unknown and in_order and not follower.truncated:
                follower.wants_snapshot = True
            for key in event.block_hashes:
                self._table.put(name, key, _BIT[event.medium])
            self._table.touch(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            for key in event.block_hashes:
                self._table.take(name, key, _BIT[event.medium])
        elif isinstance(event, AllBlocksCleared):
            self._table.take_all(name, _BIT[event.medium] if event.medium else _ALL)

    def _doubt(self, replica: str) -> None:
        """Something was missed: what was reported so far is believed for a while."""
        self._followers[replica].exact = False
        self._table.doubt(replica, self._clock() + self.ttl)

    def _shrink(self) -> None:
        for replica in self._table.shrink(self.max_blocks):
            self._followers[replica].truncated = True
