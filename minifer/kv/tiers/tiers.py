"""Device → DRAM → disk: where a prefix is looked for, and what is kept of it.

A prompt of seven blocks, two of them on the device (P tokens a block)::

    blocks     | 0 | 1 | 2 | 3 | 4 | 5 | 6 |
    found in   |device |  DRAM |disk|  new   |
    done with    shared  copied  read  computed
                         in the  ahead
                         step

Tiers are inclusive and written through: after a step the blocks it filled are copied to DRAM, and
from there to disk in the background. Blocks on disk are read into DRAM before their request is
scheduled, which waits for them outside of the queue; the copy from DRAM to the device is part of
the step, so no block on the device is ever half loaded.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from minifer.config import EngineConfig
from minifer.events import EventBus
from minifer.kv.block_pool import Block
from minifer.kv.prefix_key import PrefixKey
from minifer.kv.tiers.break_even import BreakEven
from minifer.kv.tiers.dram import DramTier, Payload, StoredBlock, chain
from minifer.kv.tiers.stats import TIERS, TierStats
from minifer.kv.tiers.transfer import BlockStore, Prefetch, Transfers, WriteJob
from minifer.kv.tiers.write_policy import GHOSTS_PER_BLOCK, SecondTouch, WriteThrough
from minifer.request import Request

CLOSE_SECONDS = 10.0  # for what is still to be written when the engine closes
POLL_SECONDS = 0.02  # how long a step without work sleeps at most


@dataclass
class TierHit:
    """What of a request's prefix lies below the device: `blocks` to load, in order.

    refused: blocks a tier has and that are not loaded, because computing them is faster.
    """

    blocks: list[StoredBlock] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))

    def __len__(self) -> int:
        return len(self.blocks)


@dataclass(eq=False)
class _Wait:
    """A request that asked the disk. held: blocks that came for it, pinned until it runs."""

    digests: frozenset[bytes]
    deadline: float
    prefetch: Prefetch | None = None
    held: list[StoredBlock] = field(default_factory=list)
    fruitless: bool = False  # it asked and nothing came: it does not ask again


class KVTiers:
    """The tiers of one engine. All methods are for the engine's thread.

    read_block: block id → payload, or None when the block holds NaN or infinity.
    block_bytes: of a payload. capacity: blocks in DRAM. disk: None for none.
    """

    def __init__(
        self,
        config: EngineConfig,
        read_block: Callable[[int], Payload | None],
        block_bytes: int,
        capacity: int,
        disk: BlockStore | None = None,
        stats: TierStats | None = None,
    ) -> None:
        self.stats = stats if stats is not None else TierStats()
        self.dram = DramTier(capacity, self.stats)
        self.disk = disk
        self.break_even = BreakEven(block_bytes / config.block_size)
        self.events = EventBus()  # the KV manager puts the engine's here
        self._config = config
        self._read_block = read_block
        self._block_bytes = block_bytes
        second = config.kv_write_policy == "second_touch"
        self._policy = SecondTouch(GHOSTS_PER_BLOCK * capacity) if second else WriteThrough()
        self._waits: dict[Request, _Wait] = {}
        self._prefetches: list[Prefetch] = []  # the reader has not let go of these
        self._transfers: Transfers | None = None
        if disk is not None:
            self._transfers = Transfers(disk, max(1, capacity // 2), self.stats)
            # Also when the process ends, or the engine is dropped, without a word.
            self._close = weakref.finalize(self, self._transfers.close, CLOSE_SECONDS)

    # -- looking up

    def lookup(self, request: Request, keys: Sequence[PrefixKey]) -> TierHit | None:
        """The longest run of `keys`, which follow the device's, that is worth loading.

        None while blocks are on their way from the disk: ask again after `collect`. They are
        waited for until `kv_load_timeout` has passed since the first such answer.
        """
        wait = self._waits.get(request)
        if wait is not None and wait.prefetch is not None:
            return None
        hit = TierHit()
        in_dram = self.dram.match(keys)
        if in_dram and not self._worthwhile("dram", len(in_dram)):
            hit.refused["dram"] = len(in_dram)
            return hit
        hit.blocks = in_dram
        if self.disk is not None:
            on_disk = list(takewhile(self.disk.__contains__, keys[len(in_dram) :]))
            if on_disk and not self._worthwhile("disk", len(on_disk)):
                hit.refused["disk"] = len(on_disk)
            elif on_disk and self._prefetch(request, on_disk):
                return None
        return hit

    def _worthwhile(self, tier: str, num_blocks: int) -> bool:
        if self._config.kv_load_policy == "always":
            return True
        backlog = self.dram.reserved * self._block_bytes if tier == "disk" else 0
        return self.break_even.wins(tier, num_blocks * self._config.block_size, backlog)

    def _prefetch(self, request: Request, keys: list[PrefixKey]) -> bool:
        """Have blocks read, or wait with others for the same ones; False: go without them."""
        assert self._transfers is not None
        now = self.events.clock()
        wait = self._waits.get(request)
        if wait is None:
            digests = frozenset(key.digest for key in keys)
            wait = _Wait(digests, now + self._config.kv_load_timeout)
        # While the disk hangs on what somebody has given up, nobody else needs to wait for it.
        stuck = any(prefetch.overdue for prefetch in self._prefetches)
        if wait.fruitless or now >= wait.deadline or stuck:
            return False
        for prefetch in self._prefetches:
            if not prefetch.cancelled and any(k.digest == keys[0].digest for k in prefetch.keys):
                break
        else:
            keys = keys[: self.dram.room]
            keep = {key.digest for key in chain(keys[-1])} if keys else set()
            if not keys or not self.dram.make_room(len(keys), keep):
                return False
            self.dram.reserved += len(keys)
            prefetch = Prefetch(keys)
            self._prefetches.append(prefetch)
            self._transfers.start(prefetch)
            self._report("kv.prefetch_started", request, blocks=len(keys))
        wait.prefetch = prefetch
        self._waits[request] = wait
        return True

    # -- waiting

    def is_waiting(self, request: Request) -> bool:
        """Are blocks of this request on their way from the disk?"""
        wait = self._waits.get(request)
        return wait is not None and wait.prefetch is not None

    def collect(self) -> None:
        """Take over what the threads have done; end the waits that are over."""
        if self._transfers is None:
            return
        for block in self._transfers.written():
            block.writing = False
        now = self.events.clock()
        for prefetch in [p for p in self._prefetches if p.done]:
            self._prefetches.remove(prefetch)
            self.dram.reserved -= len(prefetch.keys)
            moved = len(prefetch.payloads) * self._block_bytes
            self.stats.loads["disk"].add(len(prefetch.payloads), moved, prefetch.seconds)
            self.break_even.bandwidth["disk"].observe(moved, prefetch.seconds)
        for request, wait in self._waits.items():
            prefetch_or_none = wait.prefetch
            if prefetch_or_none is None:
                continue
            if not prefetch_or_none.done:
                if now < wait.deadline:
                    continue
                self.stats.timeouts += 1
                prefetch_or_none.overdue = True
            self._arrive(request, wait, prefetch_or_none)

    def _arrive(self, request: Request, wait: _Wait, prefetch: Prefetch) -> None:
        """Move what has come into DRAM, pinned for the request that waited."""
        keep = {key.digest for key in chain(prefetch.keys[-1])}
        before = len(wait.held)
        for key, payload in zip(prefetch.keys, list(prefetch.payloads), strict=False):
            block = self.dram.put(key, payload, keep)
            if block is None:
                break
            if key.digest in wait.digests:
                block.pins += 1
                wait.held.append(block)
        self.dram.touch(prefetch.keys[-1])
        self._leave(wait)
        wait.fruitless = len(wait.held) == before
        self._report("kv.prefetch_done", request, blocks=len(wait.held) - before)

    def _leave(self, wait: _Wait) -> None:
        """Nobody reads on for this wait, unless others wait for the same blocks."""
        prefetch, wait.prefetch = wait.prefetch, None
        if prefetch is not None:
            others = any(other.prefetch is prefetch for other in self._waits.values())
            prefetch.cancelled = not others

    def wait(self) -> None:
        """Sleep a little, until something arrives: there is nothing else to do."""
        if self._transfers is not None and self._prefetches:
            self._transfers.wait(self._prefetches, POLL_SECONDS)

    def release(self, request: Request) -> list[StoredBlock]:
        """A request runs now, or never will: unpin what came for it; returns that."""
        wait = self._waits.pop(request, None)
        if wait is None:
            return []
        self._leave(wait)
        for block in wait.held:
            block.pins -= 1
        return wait.held

    def admitted(self, request: Request, hit: TierHit, num_queries: int) -> None:
        """Count a request that starts to run with `hit`.

        num_queries: tokens looked up, 0 when it is not the first time this request runs.
        """
        P = self._config.block_size
        waited_for = set(self.release(request))
        from_disk = sum(block in waited_for for block in hit.blocks)
        loaded = {"dram": len(hit) - from_disk, "disk": from_disk}
        self.stats.num_queries += num_queries
        for tier in TIERS:
            if loaded[tier] or hit.refused[tier]:
                self.break_even.admitted(tier, loaded[tier] > 0)
            if num_queries:
                self.stats.hits[tier] += loaded[tier] * P
                self.stats.refused[tier] += hit.refused[tier] * P
        if hit.blocks:
            self._report("kv.tier_hit", request, **{t: n * P for t, n in loaded.items()})

    # -- storing

    def store(self, blocks: Sequence[Block]) -> None:
        """Keep published blocks of the device, a prefix in order; they have been computed.

        A block with NaN is not kept, nor what follows it.
        """
        keys = [block.key for block in blocks if block.key is not None]
        if not keys:
            return  # all of them were withdrawn
        keep = {key.digest for key in chain(keys[-1])}
        self.dram.touch(keys[-1])
        to_write: list[StoredBlock] = []
        for block, key in zip((b for b in blocks if b.key is not None), keys, strict=True):
            held = self.dram.get(key)
            if held is None:
                if not self._policy.admits(key.digest):
                    continue
                held = self._copy(block, key, keep)
                if held is None:
                    break
            if self.disk is not None and not held.writing and key not in self.disk:
                to_write.append(held)
        self.dram.touch(keys[-1])
        if self._transfers is not None:
            self._write_behind(self._transfers, to_write, keys[-1])

    def _copy(self, block: Block, key: PrefixKey, keep: set[bytes]) -> StoredBlock | None:
        started = time.perf_counter()
        payload = self._read_block(block.block_id)
        if payload is None:
            self.stats.rejected += 1
            return None
        held = self.dram.put(key, payload, keep)
        if held is not None:
            seconds = time.perf_counter() - started
            self.stats.stores["dram"].add(1, self._block_bytes, seconds)
            if self.events:
                self.events.emit("kv", "kv.block_stored", None, block=block.block_id, tier="dram")
        return held

    def _write_behind(
        self, transfers: Transfers, blocks: list[StoredBlock], tail: PrefixKey
    ) -> None:
        assert self.disk is not None
        if not self.disk.writable:
            blocks = []
        taken = transfers.write(WriteJob(list(blocks), tail))
        self.stats.dropped += len(blocks) - taken
        for block in blocks[:taken]:
            block.writing = True

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A step with prefill computed so many tokens in this time."""
        self.break_even.prefill.observe(num_tokens, seconds)

    def observe_loads(self, num_blocks: int, seconds: float) -> None:
        """A step copied so many blocks from DRAM to the device."""
        self.stats.loads["dram"].add(num_blocks, num_blocks * self._block_bytes, seconds)
        self.break_even.bandwidth["dram"].observe(num_blocks * self._block_bytes, seconds)

    # -- the end

    def flush(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Wait until everything stored so far is on disk; False when time ran out."""
        done = self._transfers is None or self._transfers.flush(seconds)
        self.collect()
        return done

    def close(self) -> None:
        """Write what is queued, within bounds, end the threads, let go of the memory."""
        if self._transfers is not None:
            self._close()
        self.dram.clear()
        self._read_block = _closed

    def _report(self, name: str, request: Request, **data: int) -> None:
        if self.events:
            self.events.emit("kv", name, request.request_id, None, **data)


def _closed(block_id: int) -> Payload | None:
    raise RuntimeError("the KV tiers are closed")
