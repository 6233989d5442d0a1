"""Small tiers: block files of 64 bytes, a disk that answers when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

from minifer.kv.prefix_key import PrefixKey, make_key
from minifer.kv.tiers.block_file import BlockFormat
from minifer.kv.tiers.disk import DiskTier
from minifer.kv.tiers.dram import StoredBlock
from minifer.kv.tiers.stats import TierStats
from minifer.kv.tiers.tiers import KVTiers
from minifer.kv.tiers.transfer import Prefetch, WriteJob

FORMAT = BlockFormat((("config", "tiny"), ("weights", "w")), "F32", (2, 4, 1, 2))  # 64 bytes


def make_chain(*blocks: Sequence[int], extra=(), **options) -> list[PrefixKey]:
    """Keys of the blocks of one prefix."""
    keys: list[PrefixKey] = []
    for tokens in blocks:
        keys.append(make_key(keys[-1] if keys else None, tokens, extra, **options))
    return keys


def numbered(count: int, start: int = 0) -> list[PrefixKey]:
    """A prefix of `count` blocks."""
    return make_chain(*[(start + i, 1, 2, 3) for i in range(count)])


def content(key: PrefixKey, size: int = FORMAT.num_bytes) -> bytes:
    """A payload that is different for every prefix."""
    return (key.digest * (size // 32 + 1))[:size]


def disk_tier(
    folder: Path, capacity: int = 1 << 20, block_format: BlockFormat = FORMAT
) -> DiskTier:
    return DiskTier(folder, block_format, capacity, TierStats())


class MemoryDisk:
    """A disk that is a dictionary. `broken`: digests that cannot be read."""

    def __init__(self) -> None:
        self.writable = True
        self.blocks: dict[bytes, object] = {}
        self.broken: set[bytes] = set()
        self.touched: list[list[PrefixKey]] = []

    def __contains__(self, key: PrefixKey) -> bool:
        return key.digest in self.blocks

    def read(self, key: PrefixKey) -> object | None:
        if key.digest in self.broken:
            self.blocks.pop(key.digest, None)
        return self.blocks.get(key.digest)

    def write(self, key: PrefixKey, payload: object) -> bool:
        return self.blocks.setdefault(key.digest, payload) is payload

    def touch(self, keys: Sequence[PrefixKey]) -> None:
        self.touched.append(list(keys))


class ManualTransfers:
    """Reader and writer without threads: they work when the test calls them."""

    def __init__(self, store, queue_limit: int, stats: TierStats) -> None:
        self.store, self.queue_limit = store, queue_limit
        self.reads: list[Prefetch] = []
        self.writes: list[WriteJob] = []
        self.done: list[StoredBlock] = []
        self.slept = 0
        self.instant = False  # work as soon as there is any

    def start(self, prefetch: Prefetch) -> None:
        self.reads.append(prefetch)
        if self.instant:
            self.finish_read(prefetch)

    def write(self, job: WriteJob) -> int:
        queued = sum(len(other.blocks) for other in self.writes)
        job.blocks = job.blocks[: self.queue_limit - queued]
        self.writes.append(job)
        taken = len(job.blocks)
        if self.instant:
            self.finish_writes()
        return taken

    def written(self) -> list[StoredBlock]:
        done, self.done = self.done, []
        return done

    def wait(self, prefetches: Sequence[Prefetch], seconds: float) -> None:
        self.slept += 1

    def close(self, seconds: float) -> bool:
        return True

    # -- for the test

    def read_one(self, prefetch: Prefetch) -> bool:
        """One block arrives; False when there was none to read."""
        index = len(prefetch.payloads)
        if prefetch.cancelled or index == len(prefetch.keys):
            return False
        payload = self.store.read(prefetch.keys[index])
        if payload is not None:
            prefetch.payloads.append(payload)
        return payload is not None

    def finish_read(self, prefetch: Prefetch, give_up: bool = False) -> None:
        while not give_up and self.read_one(prefetch):
            pass
        self.reads.remove(prefetch)
        prefetch.done = True

    def finish_writes(self) -> None:
        for job in self.writes:
            self.store.touch([job.used] if job.used else [])
            for block in job.blocks:
                self.store.write(block.key, block.payload)
            self.done += job.blocks
        self.writes = []


def manual_tiers(
    capacity: int, disk: MemoryDisk | None = None, instant: bool = False
) -> Callable[..., KVTiers]:
    """For `ScheduleDriver`: tiers with `capacity` blocks of DRAM and a disk the test works."""

    def make(config, read_block) -> KVTiers:
        with patch("minifer.kv.tiers.tiers.Transfers", ManualTransfers):
            tiers = KVTiers(config, read_block, 64, capacity, disk)
        if disk is not None:
            tiers._transfers.instant = instant
        return tiers

    return make


def check_tiers(tiers: KVTiers) -> None:
    """What must hold beside `check_invariants`, with the threads' side seen through."""
    dram, prefetcher = tiers.dram, tiers._prefetcher
    if prefetcher is None:
        assert not any(block.pinned for block in dram)
        return
    assert dram.reserved == sum(prefetch.reserved for prefetch in prefetcher._reading)
    held = [block for wait in prefetcher._waits.values() for block in wait.held]
    assert all(block.pins == sum(block is other for other in held) for block in dram)
    assert all(dram.get(block.key) is block for block in held), "a pinned block was evicted"
