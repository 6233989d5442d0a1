"""Who waits for which blocks from the disk, and for how long.

A request that waits owns nothing on the device; what has come for it is pinned in DRAM until it
runs or is gone. It takes what came in time and computes the rest: a disk that is slow, broken or
hanging costs a request its timeout, once, and nobody anything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minifer.kv.prefix_key import PrefixKey
from minifer.kv.tiers.dram import DramTier, StoredBlock, chain
from minifer.kv.tiers.stats import TierStats
from minifer.kv.tiers.transfer import Prefetch, Transfers
from minifer.request import Request


@dataclass(eq=False)
class _Wait:
    """A request that asked the disk. held: blocks that came for it, pinned until it runs."""

    deadline: float
    prefetch: Prefetch | None = None  # what it waits for at the moment
    held: list[StoredBlock] = field(default_factory=list)
    fruitless: bool = False  # it asked and nothing came: it does not ask again


class Prefetcher:
    """Reads blocks ahead into DRAM. Requests that need the same blocks wait for one read.

    timeout: seconds a request waits in all, from its first question on.
    """

    def __init__(
        self, dram: DramTier, transfers: Transfers, timeout: float, stats: TierStats
    ) -> None:
        self._dram = dram
        self._transfers = transfers
        self._timeout = timeout
        self._stats = stats
        self._waits: dict[Request, _Wait] = {}
        self._reading: list[Prefetch] = []  # the reader has not let go of these

    def is_waiting(self, request: Request) -> bool:
        wait = self._waits.get(request)
        return wait is not None and wait.prefetch is not None

    def ask(self, request: Request, keys: list[PrefixKey], now: float) -> Prefetch | None:
        """Have `keys` read for a request; None: it should go on without them."""
        wait = self._waits.get(request)
        if wait is None:
            wait = _Wait(now + self._timeout)
        # While the disk hangs on what somebody has given up, nobody else needs to wait for it.
        hangs = any(prefetch.overdue for prefetch in self._reading)
        if wait.fruitless or now >= wait.deadline or hangs:
            return None
        prefetch = self._read_already(keys[0]) or self._start(keys)
        if prefetch is not None:
            wait.prefetch = prefetch
            self._waits[request] = wait
        return prefetch

    def _read_already(self, key: PrefixKey) -> Prefetch | None:
        for prefetch in self._reading:
            if not prefetch.cancelled and any(k.digest == key.digest for k in prefetch.keys):
                return prefetch
        return None

    def _start(self, keys: list[PrefixKey]) -> Prefetch | None:
        """As many as DRAM can take in; their room is reserved until the reader is done."""
        keys = keys[: self._dram.room]
        if not keys or not self._dram.make_room(len(keys), _ancestry(keys[-1])):
            return None
        self._dram.reserved += len(keys)
        prefetch = Prefetch(keys, reserved=len(keys))
        self._reading.append(prefetch)
        self._transfers.start(prefetch)
        return prefetch

    def collect(self, now: float) -> list[Prefetch]:
        """End the waits that are over; returns what the reader is done with since the last call."""
        done = [prefetch for prefetch in self._reading if prefetch.done]
        for prefetch in done:
            self._reading.remove(prefetch)
            self._dram.reserved -= prefetch.reserved
            prefetch.reserved = 0
        for wait in self._waits.values():
            if wait.prefetch is None:
                continue
            if not wait.prefetch.done:
                if now < wait.deadline:
                    continue
                wait.prefetch.overdue = True
                self._stats.timeouts += 1
            self._take_over(wait, wait.prefetch)
        return done

    def _take_over(self, wait: _Wait, prefetch: Prefetch) -> None:
        """Move what has come into DRAM, and pin it for the request."""
        keep, before = _ancestry(prefetch.keys[-1]), len(wait.held)
        for key, payload in zip(prefetch.keys, list(prefetch.payloads), strict=False):
            if prefetch.reserved and self._dram.get(key) is None:
                prefetch.reserved -= 1  # it moves into the room that was reserved for it
                self._dram.reserved -= 1
            block = self._dram.put(key, payload, keep)
            if block is None:
                break
            block.pins += 1
            wait.held.append(block)
        self._dram.touch(prefetch.keys[-1])
        wait.fruitless = len(wait.held) == before
        self._leave(wait)

    def _leave(self, wait: _Wait) -> None:
        """Reading on is in vain, unless others wait for the same blocks."""
        prefetch, wait.prefetch = wait.prefetch, None
        if prefetch is not None:
            prefetch.cancelled = not any(w.prefetch is prefetch for w in self._waits.values())
            if prefetch.cancelled:  # the reader, even one that hangs, holds one block more at most
                self._dram.reserved -= prefetch.reserved
                prefetch.reserved = 0

    def release(self, request: Request) -> list[StoredBlock]:
        """A request runs now, or never will: unpin what came for it; returns that."""
        wait = self._waits.pop(request, None)
        if wait is None:
            return []
        self._leave(wait)
        for block in wait.held:
            block.pins -= 1
        return wait.held

    def sleep(self, seconds: float) -> None:
        """Until the reader is done with something, at most so long."""
        self._transfers.wait(self._reading, seconds)


def _ancestry(key: PrefixKey) -> set[bytes]:
    return {link.digest for link in chain(key)}
