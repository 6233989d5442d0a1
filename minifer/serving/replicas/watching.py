"""`GET /events?request_id=ID` before several replicas: whoever gets the request tells its life.

Which one that will be nobody knows when the watching begins, so all are listened to.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping

import httpx
from starlette.requests import Request
from starlette.responses import Response

from minifer.serving.errors import APIError
from minifer.serving.event_stream import PING_SECONDS
from minifer.serving.front import sse
from minifer.serving.replicas.replica import Replica
from minifer.serving.replicas.supervisor import Supervisor
from minifer.serving.streaming import EventStream, unless_gone

_END = b""  # in a watcher's queue


class Watchers:
    """All clients of the route. headers: what a replica wants to be asked with."""

    def __init__(
        self, supervisor: Supervisor, http: httpx.AsyncClient, headers: Mapping[str, str]
    ) -> None:
        self._supervisor = supervisor
        self._http = http
        self._headers = dict(headers)
        self._open: set[_Watcher] = set()

    @property
    def count(self) -> int:
        return len(self._open)

    def close(self) -> None:
        """The router goes down: streams end."""
        for watcher in self._open:
            watcher.news.put_nowait(_END)

    async def watch(self, request: Request, limit: int) -> Response:
        """The route; at most `limit` clients at once. Its headers are sent once all listen."""
        name = request.query_params.get("request_id", "")
        if not name:
            raise APIError(400, "request_id is missing: /events?request_id=ID", param="request_id")
        if self.count >= limit:
            raise APIError(
                429,
                f"{limit} clients watch already",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        watcher = _Watcher(self._supervisor.available)
        self._open.add(watcher)
        response = EventStream(watcher.stream())
        response.resources.callback(self._open.discard, watcher)
        for replica in list(watcher.silent):
            task = asyncio.create_task(self._listen(replica, name, watcher))
            response.resources.callback(task.cancel)
        watcher.check()
        try:
            await unless_gone(request.receive, watcher.all_listen.wait())
        except BaseException:
            response.resources.close()
            raise
        return response

    async def _listen(self, replica: Replica, name: str, watcher: _Watcher) -> None:
        told = False
        try:
            async with self._http.stream(
                "GET",
                f"{replica.url}/events",
                params={"request_id": name},
                headers=self._headers,
                timeout=httpx.Timeout(10.0, read=4 * PING_SECONDS),
            ) as answer:
                watcher.listens(replica)
                if answer.status_code != 200:
                    return
                async for chunk in sse.whole_events(answer.aiter_raw()):
                    news = [event for event in sse.split(chunk) if event.startswith(b"data: ")]
                    if news:
                        told = True
                        watcher.news.put_nowait(b"".join(news))
        except (httpx.TransportError, RuntimeError):  # it died: another may go on with the request
            told = False
        finally:
            watcher.leaves(replica, told)


class _Watcher:
    """One client. silent: replicas that are asked and have not answered."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.silent = set(replicas)
        self.listening: set[Replica] = set()
        self.all_listen = asyncio.Event()
        self.news: asyncio.Queue[bytes] = asyncio.Queue()

    def listens(self, replica: Replica) -> None:
        self.silent.discard(replica)
        self.listening.add(replica)
        self.check()

    def leaves(self, replica: Replica, told: bool) -> None:
        """told: it has told a request's life to its end."""
        self.silent.discard(replica)
        self.listening.discard(replica)
        if told:
            self.news.put_nowait(_END)
        self.check()

    def check(self) -> None:
        if not self.silent:
            self.all_listen.set()
            if not self.listening:
                self.news.put_nowait(_END)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        yield b": watching\n\n"
        while True:
            news = b": ping\n\n"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PING_SECONDS):
                    news = await self.news.get()
            if news == _END:
                return
            yield news
