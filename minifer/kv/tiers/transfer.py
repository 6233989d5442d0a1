"""Two threads beside the engine's: one reads blocks from the disk ahead, one writes them behind.

::

    engine thread        start(prefetch) ──▶ reader ──▶ prefetch.payloads, done
                         write(blocks)   ──▶ writer ──▶ written()      (unpin)

They see keys and payloads, never a tier in memory: that stays with the engine's thread. Neither
can hold the engine up, a disk that no longer answers included: what is not there in time is
computed, and a full queue takes no more.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from minifer.kv.prefix_key import PrefixKey
from minifer.kv.tiers.dram import Payload, StoredBlock, chain
from minifer.kv.tiers.stats import TierStats


class BlockStore(Protocol):
    """What the threads need of a `DiskTier`; tests bring slow, failing and stuck ones."""

    writable: bool

    def __contains__(self, key: PrefixKey) -> bool: ...

    def read(self, key: PrefixKey) -> Payload | None: ...

    def write(self, key: PrefixKey, payload: Payload) -> bool: ...

    def touch(self, keys: Sequence[PrefixKey]) -> None: ...


@dataclass(eq=False)
class Prefetch:
    """Blocks on their way from the disk, in order. `payloads` grows until `done`."""

    keys: list[PrefixKey]
    payloads: list[Payload] = field(default_factory=list)
    seconds: float = 0.0
    reserved: int = 0  # blocks of DRAM kept free for it
    done: bool = False  # the reader has let go of it
    cancelled: bool = False  # nobody waits for it any more
    overdue: bool = False  # somebody gave up waiting


@dataclass(eq=False)
class WriteJob:
    """Blocks to write; and the end of a prefix that is used: its files become recent first."""

    blocks: list[StoredBlock]
    used: PrefixKey | None


class Transfers:
    """The threads and their queues. They start with the first job and end with `close`.

    queue_limit: blocks that may wait to be written.
    """

    def __init__(self, store: BlockStore, queue_limit: int, stats: TierStats) -> None:
        self.store = store
        self.queue_limit = queue_limit
        self._stats = stats
        self._changed = threading.Condition()
        self._reads: deque[Prefetch] = deque()
        self._writes: deque[WriteJob] = deque()
        self._written: list[StoredBlock] = []
        self._num_queued = 0
        self._closing = False
        self._threads: dict[str, threading.Thread] = {}

    # -- for the engine's thread

    def start(self, prefetch: Prefetch) -> None:
        with self._changed:
            self._reads.append(prefetch)
            self._run("kv-reader", self._read_loop)

    def write(self, job: WriteJob) -> int:
        """Queue a job; returns how many of its blocks, the first ones, were taken."""
        with self._changed:
            if self._closing or len(self._writes) >= self.queue_limit:
                return 0
            taken = min(len(job.blocks), self.queue_limit - self._num_queued)
            job.blocks = job.blocks[:taken]
            self._num_queued += taken
            self._writes.append(job)
            self._run("kv-writer", self._write_loop)
            return taken

    def written(self) -> list[StoredBlock]:
        """Blocks the writer is done with since the last call, written or not."""
        with self._changed:
            blocks, self._written = self._written, []
            return blocks

    def wait(self, prefetches: Sequence[Prefetch], seconds: float) -> None:
        """Sleep until one of them is done, at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: any(p.done for p in prefetches), seconds)

    def flush(self, seconds: float) -> bool:
        """Wait until everything queued is written; False when `seconds` were not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._writes, seconds)

    def close(self, seconds: float) -> bool:
        """Write what is queued, end the threads; False when one is stuck and stays behind."""
        with self._changed:
            for prefetch in self._reads:
                prefetch.cancelled = True
            self._closing = True
            self._changed.notify_all()
        deadline = time.monotonic() + seconds
        own = threading.current_thread()  # where the garbage collector may call this from
        threads = [thread for thread in self._threads.values() if thread is not own]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    # -- the threads

    def _run(self, name: str, loop: Callable[[], None]) -> None:
        if name not in self._threads:
            self._threads[name] = threading.Thread(target=loop, name=name, daemon=True)
            self._threads[name].start()
        self._changed.notify_all()

    def _read_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._reads or self._closing)
                if not self._reads:
                    return
                prefetch = self._reads[0]  # in the queue until it is done
            try:
                self._read(prefetch)
            except Exception:  # costs the rest of these blocks, not the thread
                traceback.print_exc()
            finally:
                with self._changed:
                    self._reads.popleft()
                    prefetch.done = True
                    self._changed.notify_all()

    def _read(self, prefetch: Prefetch) -> None:
        started = time.perf_counter()
        for key in prefetch.keys:
            if prefetch.cancelled:
                break
            payload = self.store.read(key)
            if payload is None:
                break  # what follows a gap is of no use
            prefetch.payloads.append(payload)
            prefetch.seconds = time.perf_counter() - started

    def _write_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._writes or self._closing)
                if not self._writes:
                    return
                job = self._writes[0]
            try:
                self._write(job)
            except Exception:  # costs the rest of these blocks, not the thread
                traceback.print_exc()
            finally:
                with self._changed:
                    self._writes.popleft()
                    self._num_queued -= len(job.blocks)
                    self._written += job.blocks
                    self._changed.notify_all()

    def _write(self, job: WriteJob) -> None:
        self.store.touch(list(chain(job.used)))
        for block in job.blocks:
            started = time.perf_counter()
            if self.store.write(block.key, block.payload):
                seconds = time.perf_counter() - started
                self._stats.stores["disk"].add(1, len(block.payload), seconds)
