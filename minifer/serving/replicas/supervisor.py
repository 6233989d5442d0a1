"""Keeps the replicas running: starts them, asks how they are, replaces those that are not well.

::

    STARTING ─▶ HEALTHY ─▶ DEAD ─▶ (backoff) ─▶ STARTING …      a crash, or no answer
                   └─▶ DRAINING ─▶ DEAD ─▶ STARTING …           a restart that loses nothing
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Sequence

import httpx

from minifer.serving.replicas.replica import Process, Replica, Status
from minifer.serving.replicas.settings import ReplicaSettings

log = logging.getLogger("minifer.serving.replicas")

FIRST_BACKOFF = 1.0  # seconds; after a process that did not stay up
STAYED_UP = 10.0  # seconds after which a process counts as one that did
STARTING_PERIOD = 0.1  # seconds between two questions to one that is starting


class Supervisor:
    """One task a replica. Belongs to one event loop.

    start: makes a replica's process and returns when it listens; raises `RuntimeError`.
    patience: seconds that a process may take to end by itself. on_up, on_down: told when
    a process begins and ceases to serve.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        settings: ReplicaSettings,
        http: httpx.AsyncClient,
        start: Callable[[Replica], Awaitable[Process]],
        patience: float = 12.0,
    ) -> None:
        self.replicas = list(replicas)
        self.on_up: list[Callable[[Replica], None]] = []
        self.on_down: list[Callable[[Replica], None]] = []
        self._settings = settings
        self._http = http
        self._start = start
        self._patience = patience
        self._keepers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._pokes = {replica.name: asyncio.Event() for replica in replicas}
        self._restarting = asyncio.Lock()

    # -- for the router

    @property
    def available(self) -> list[Replica]:
        """Those that may be sent a request, in a fixed order."""
        return [replica for replica in self.replicas if replica.is_available]

    def suspect(self, replica: Replica) -> None:
        """A connection to it broke: nothing more is sent there until it answers a check."""
        if replica.status in (Status.HEALTHY, Status.DRAINING):
            replica.is_suspect = True
            self._pokes[replica.name].set()
            self.notify()

    def notify(self) -> None:
        """Something changed that somebody may wait for in `until`."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for something about the replicas to be so."""
        while not holds():
            await self._changed.wait()

    # -- the whole

    async def open(self) -> None:
        """Start all; returns when each is healthy. Raises `RuntimeError` when one does not start,
        after the others have been ended."""
        loop = asyncio.get_running_loop()
        ready: list[asyncio.Future[None]] = []
        for replica in self.replicas:
            first: asyncio.Future[None] = loop.create_future()
            ready.append(first)
            self._keepers.append(asyncio.create_task(self._keep(replica, first)))
        try:
            await asyncio.gather(*ready)
        except BaseException:
            await self.close(now=True)
            raise
        finally:
            for first in ready:
                first.cancel()

    async def close(self, now: bool = False) -> None:
        """End all. now: without waiting for what they are doing. Safe to call twice."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers.clear()
        for replica in self.replicas:
            self._set(replica, Status.STOPPED)
        running = [r.process for r in self.replicas if r.process is not None]
        await asyncio.gather(*(p.kill() if now else p.stop(self._patience) for p in running))
        for replica in self.replicas:
            replica.process = None

    def cut_short(self) -> None:
        """Have every replica end its open requests, and itself; none is replaced any more."""
        for keeper in self._keepers:
            keeper.cancel()
        for replica in self.replicas:
            if replica.process is not None:
                replica.process.cut_short()

    async def restart(self) -> None:
        """Replace one process after the other; no request is lost.

        Each gets nothing new, finishes what it has (for `drain_timeout` seconds at most), and the
        next one is touched when its successor is healthy. Returns when all are new.
        """
        async with self._restarting:
            for replica in self.replicas:
                await self._replace(replica)

    async def _replace(self, replica: Replica) -> None:
        await self.until(lambda: replica.status in (Status.HEALTHY, Status.STOPPED))
        if replica.status is Status.STOPPED:
            return
        process, generation = replica.process, replica.generation
        self._set(replica, Status.DRAINING)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_timeout):
                await self.until(lambda: replica.num_open == 0 or replica.generation != generation)
        if replica.process is process and process is not None:
            await process.stop(self._patience)
        await self.until(
            lambda: (
                replica.status is Status.STOPPED
                or (replica.status is Status.HEALTHY and replica.generation > generation)
            )
        )

    # -- one replica

    async def _keep(self, replica: Replica, first: asyncio.Future[None]) -> None:
        """Run a process, and after it the next one, for ever."""
        loop = asyncio.get_running_loop()
        backoff = 0.0
        while True:
            self._set(replica, Status.STARTING)
            began = math.inf
            try:
                await self._bring_up(replica)
            except Exception as error:
                reason = str(error) or repr(error)
                if not first.done():
                    first.set_exception(error)
                    return
            else:
                began = loop.time()
                if not first.done():
                    first.set_result(None)
                reason = await self._watch(replica)
            planned = replica.status is Status.DRAINING
            await self._bury(replica, reason)
            replica.num_restarts += 1
            if not planned:
                log.warning("%s is replaced: %s", replica.name, reason)
                stayed = loop.time() - began >= STAYED_UP  # never, if it did not come up
                await asyncio.sleep(0 if stayed else backoff)
                grown = max(2 * backoff, FIRST_BACKOFF)
                backoff = 0.0 if stayed else min(grown, self._settings.max_backoff)

    async def _bring_up(self, replica: Replica) -> None:
        replica.generation += 1
        replica.process = await self._start(replica)
        try:
            async with asyncio.timeout(self._settings.start_timeout):
                while not await self._is_well(replica):
                    if replica.process.status is not None:
                        status = replica.process.status
                        raise RuntimeError(f"{replica.name} ended with status {status}")
                    await asyncio.sleep(STARTING_PERIOD)
        except TimeoutError:
            raise RuntimeError(f"{replica.name} did not become healthy in time") from None
        self._set(replica, Status.HEALTHY)
        for told in self.on_up:
            told(replica)

    async def _watch(self, replica: Replica) -> str:
        """Until it must be replaced; returns why."""
        assert replica.process is not None
        settings, poke = self._settings, self._pokes[replica.name]
        exited = asyncio.ensure_future(replica.process.wait())
        misses = 0
        try:
            while misses < settings.health_threshold:
                poked = asyncio.ensure_future(poke.wait())
                try:
                    await asyncio.wait(
                        {exited, poked},
                        timeout=settings.health_interval,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                finally:
                    poked.cancel()
                poke.clear()
                if exited.done():
                    return f"it ended with status {exited.result()}"
                if await self._is_well(replica):
                    misses = 0
                    if replica.is_suspect:
                        replica.is_suspect = False
                        self.notify()
                else:
                    misses += 1
            return f"it answered none of {misses} health checks"
        finally:
            exited.cancel()

    async def _is_well(self, replica: Replica) -> bool:
        try:
            answer = await self._http.get(
                f"{replica.url}/health", timeout=self._settings.health_timeout
            )
        except httpx.TransportError:
            return False
        return answer.status_code == 200

    async def _bury(self, replica: Replica, reason: str) -> None:
        replica.last_words = reason
        if replica.status is not Status.STARTING:  # it has served
            for told in self.on_down:
                told(replica)
        self._set(replica, Status.DEAD)
        if replica.process is not None:
            await replica.process.kill()
            replica.process = None

    def _set(self, replica: Replica, status: Status) -> None:
        replica.status, replica.is_suspect = status, False
        self.notify()
