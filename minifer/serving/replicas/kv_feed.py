"""Follows what the replicas hold: one connection each to `/kv_events`, into the router's index.

While a connection is down, or nothing comes, the index goes by the router's own decisions
(`KVIndex`, approximately); each new connection begins with everything the replica holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Mapping

import httpx

from minifer.routing.kv_events import decode
from minifer.routing.router import Router
from minifer.serving.front import sse
from minifer.serving.replicas.metrics import RouterMetrics
from minifer.serving.replicas.replica import Replica

log = logging.getLogger("minifer.serving.replicas")

SILENCE = 10.0  # seconds; a replica gives a sign of life every second
RECONNECT = 1.0  # seconds between two connections to a replica
_LOAD = b"event: load\ndata: "


class KVFeed:
    """One task for each replica that is up. headers: what a replica wants to be asked with."""

    def __init__(
        self,
        router: Router,
        http: httpx.AsyncClient,
        metrics: RouterMetrics,
        headers: Mapping[str, str],
    ) -> None:
        self._router = router
        self._http = http
        self._metrics = metrics
        self._headers = dict(headers)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def up(self, replica: Replica) -> None:
        """A process begins to serve: it is followed from now on."""
        self._router.index.add(replica.name)
        self._tasks[replica.name] = asyncio.create_task(self._follow(replica))

    def down(self, replica: Replica) -> None:
        """It is gone, with all it held."""
        if (task := self._tasks.pop(replica.name, None)) is not None:
            task.cancel()
        self._router.index.remove(replica.name)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, replica: Replica) -> None:
        url = replica.url
        while True:
            with contextlib.suppress(httpx.TransportError):
                await self._listen(replica.name, url)
            await asyncio.sleep(RECONNECT)

    async def _listen(self, name: str, url: str) -> None:
        """One connection, until it breaks, is ended, or says something that is no batch."""
        timeout = httpx.Timeout(SILENCE, read=SILENCE)
        async with self._http.stream(
            "GET",
            f"{url}/kv_events",
            params={"replica": name},
            headers=self._headers,
            timeout=timeout,
        ) as answer:
            if answer.status_code != 200:
                log.warning("%s: /kv_events answers with status %d", name, answer.status_code)
                return
            self._metrics.count("kv_snapshots", name)
            async for chunk in sse.whole_events(answer.aiter_raw()):
                try:
                    for event in sse.split(chunk):
                        self._take(name, event)
                except ValueError as error:
                    log.warning("%s: %s", name, error)
                    return

    def _take(self, name: str, event: bytes) -> None:
        """Raises `ValueError` for what is no event of this route, and when some are missing."""
        if event.startswith(_LOAD):
            usage = json.loads(event.removeprefix(_LOAD))["kv_usage"]
            self._router.tracker.report(name, kv_usage=usage)
            return
        batch = decode(event.removeprefix(b"data: "))
        self._router.index.apply(batch)
        self._metrics.count("kv_events", name, by=len(batch.events))
        if name in self._router.index.snapshots_wanted():
            raise ValueError("some of its KV events are missing, all are asked for again")
