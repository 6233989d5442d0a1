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
from minifer.kv.tiers.hand_over import Imports
from minifer.kv.tiers.prefetching import Prefetcher
from minifer.kv.tiers.stats import TIERS, TierStats
from minifer.kv.tiers.transfer import BlockStore, Transfers, WriteJob
from minifer.kv.tiers.write_policy import GHOSTS_PER_BLOCK, SecondTouch, WriteThrough
from minifer.request import Request

CLOSE_SECONDS = 10.0  # for what is still to be written when the engine closes
POLL_SECONDS = 0.02  # how long a step without work sleeps at most


@dataclass
class TierHit:
    """What of a request's prefix lies below the device: `blocks` to load, in order.

    short: tokens that the last of them lacks to be full, as it may when it is no tier's block.
    refused: blocks a tier has and that are not loaded, because computing them is faster.
    """

    blocks: list[StoredBlock] = field(default_factory=list)
    short: int = 0
    refused: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))

    def __len__(self) -> int:
        return len(self.blocks)


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
        self.imports = Imports(self.dram)
        self.disk = disk
        self.break_even = BreakEven(block_bytes / config.block_size)
        self.events = EventBus()  # the KV manager puts the engine's here
        self._config = config
        self._read_block = read_block
        self._block_bytes = block_bytes
        second = config.kv_write_policy == "second_touch"
        self._policy = SecondTouch(GHOSTS_PER_BLOCK * capacity) if second else WriteThrough()
        self._transfers: Transfers | None = None
        self._prefetcher: Prefetcher | None = None
        if disk is not None:
            self._transfers = Transfers(disk, max(1, capacity // 2), self.stats)
            timeout = config.kv_load_timeout
            self._prefetcher = Prefetcher(self.dram, self._transfers, timeout, self.stats)
            # Also when the process ends, or the engine is dropped, without a word.
            self._close = weakref.finalize(self, self._transfers.close, CLOSE_SECONDS)

    # -- looking up

    def lookup(self, request: Request, keys: Sequence[PrefixKey]) -> TierHit | None:
        """The longest run of `keys`, which follow the device's, that is worth loading.

        None while blocks are on their way from the disk: ask again after `collect`. They are
        waited for until `kv_load_timeout` has passed since the first such answer.
        """
        if self.is_waiting(request):
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
        assert self._prefetcher is not None  # there is a disk
        prefetch = self._prefetcher.ask(request, keys, self.events.clock())
        if prefetch is None:
            return False
        self._report("kv.prefetch_started", request, blocks=len(prefetch.keys))
        return True

    # -- waiting

    def is_waiting(self, request: Request) -> bool:
        """Are blocks of this request on their way from the disk?"""
        return self._prefetcher is not None and self._prefetcher.is_waiting(request)

    def collect(self) -> None:
        """Take over what the threads have done; end the waits that are over."""
        if self._transfers is None or self._prefetcher is None:
            return
        for block in self._transfers.written():
            block.writing = False
        for prefetch in self._prefetcher.collect(self.events.clock()):
            blocks, seconds = len(prefetch.payloads), prefetch.seconds
            self.stats.loads["disk"].add(blocks, blocks * self._block_bytes, seconds)
            self.break_even.bandwidth["disk"].observe(blocks * self._block_bytes, seconds)
            self._report("kv.prefetch_done", asked=len(prefetch.keys), blocks=blocks)

    def wait(self) -> None:
        """Sleep a little, until something arrives: there is nothing else to do."""
        if self._prefetcher is not None:
            self._prefetcher.sleep(POLL_SECONDS)

    def release(self, request: Request) -> list[StoredBlock]:
        """A request runs now, or never will: let go of what came for it; returns what the disk
        gave."""
        self.imports.release(request.request_id)
        return [] if self._prefetcher is None else self._prefetcher.release(request)

    def admitted(self, request: Request, hit: TierHit, num_cached: int) -> None:
        """Count a request that starts to run with `hit`, after `num_cached` tokens on the device.

        The tokens of a preempted request have been counted the first time.
        """
        P = self._config.block_size
        waited_for = set(self.release(request))
        from_disk = sum(block in waited_for for block in hit.blocks)
        loaded = {"dram": (len(hit) - from_disk) * P, "disk": from_disk * P}
        for tier in TIERS:
            if loaded[tier] or hit.refused[tier]:
                self.break_even.admitted(tier, loaded[tier] > 0)
        if not request.num_preemptions:
            self.stats.num_queries += request.num_tokens - num_cached
            for tier in TIERS:
                self.stats.hits[tier] += loaded[tier]
                self.stats.refused[tier] += hit.refused[tier] * P
        if hit.blocks:
            span = (num_cached, num_cached + len(hit) * P)
            self._report("kv.tier_hit", request, span, **loaded)

    def export(self, keys: Sequence[PrefixKey]) -> list[Payload]:
        """For another engine: the longest run of `keys`, from the first on, that is in DRAM.

        Payloads are never written to: whoever has one may read it on any thread, for ever.
        """
        return [block.payload for block in self.dram.match(keys)]

    # -- storing

    def store(self, blocks: Sequence[Block]) -> None:
        """Keep published blocks of the device, in the order of their prefix; it is being used.

        They have been computed; a block with NaN is not kept, nor what follows it.
        """
        published = [(block, block.key) for block in blocks if block.key is not None]
        if not published:
            return  # all of them were withdrawn
        tail = published[-1][1]
        keep = {key.digest for key in chain(tail)}
        to_write: list[StoredBlock] = []
        on_disk: PrefixKey | None = None
        copied = 0
        for block, key in published:
            held = self.dram.get(key)
            if held is None:
                if not self._policy.admits(key.digest):
                    continue
                held = self._copy(block, key, keep)
                if held is None:
                    break
                copied += 1
            if self.disk is not None and key in self.disk:
                on_disk = key
            elif not held.writing:
                to_write.append(held)
        self.dram.touch(tail)
        self._write_behind(to_write, on_disk)
        if copied:
            self._report("kv.block_stored", blocks=copied)

    def _copy(self, block: Block, key: PrefixKey, keep: set[bytes]) -> StoredBlock | None:
        if not self.dram.make_room(1, keep):
            return None
        started = time.perf_counter()
        payload = self._read_block(block.block_id)
        if payload is None:
            self.stats.rejected += 1
            return None
        held = self.dram.put(key, payload, keep)
        if held is not None:
            seconds = time.perf_counter() - started
            self.stats.stores["dram"].add(1, self._block_bytes, seconds)
        return held

    def _write_behind(self, blocks: list[StoredBlock], used: PrefixKey | None) -> None:
        if self._transfers is None or self.disk is None or not self.disk.writable:
            return
        if blocks or used is not None:
            taken = self._transfers.write(WriteJob(list(blocks), used))
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

    def _report(
        self,
        name: str,
        request: Request | None = None,
        span: tuple[int, int] | None = None,
        **data: int,
    ) -> None:
        if self.events:
            request_id = None if request is None else request.request_id
            self.events.emit("kv", name, request_id, span, **data)


def _closed(block_id: int) -> Payload | None:
    raise RuntimeError("the KV tiers are closed")
