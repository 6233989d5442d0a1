"""`GET /events?request_id=ID`: watch a request's life, stage by stage, as it happens.

The engine writes an event only when somebody listens, so the hub is among the engine's sinks only
while there is a subscriber. The engine's thread never waits for one: a subscriber that does not
read loses its oldest events, and is told how many.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from minifer.events import Event
from minifer.serving.errors import APIError
from minifer.serving.streaming import EventStream, event, unless_gone

if TYPE_CHECKING:
    from minifer.serving.app import Server

MAX_PENDING = 4096  # events kept for a subscriber that does not read
PING_SECONDS = 15.0  # a comment, so that proxies do not take a quiet stream for dead
IDLE_SECONDS = 300.0  # then a stream whose request never came ends


class Subscriber:
    """One client that watches one request.

    Gets the request's own events, those of its n sequences, and those of the engine's steps while
    one of them is alive.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self.num_lost = 0
        self.ended = False
        self._seen: set[str] = set()  # sequences of the request,
        self._alive: set[str] = set()  # and those that have not finished
        self._pending: deque[Event] = deque(maxlen=MAX_PENDING)
        self._news = asyncio.Event()
        self._woken = False

    # -- on the engine's thread

    def write(self, new: Event) -> None:
        """Take one event, if it concerns the request."""
        if self.ended or not self._concerns(new):
            return
        if len(self._pending) == MAX_PENDING:
            self.num_lost += 1
        self._pending.append(new)
        if new.name == "request.finished":
            self._alive.discard(new.request_id or "")
            self.ended = not self._alive
        self.wake()

    def _concerns(self, new: Event) -> bool:
        if new.request_id is None:
            return bool(self._alive)
        own = new.request_id == self.request_id or new.data.get("parent") in self._alive
        if own and new.request_id not in self._seen:
            self._seen.add(new.request_id)
            self._alive.add(new.request_id)
        return new.request_id in self._alive

    def wake(self) -> None:
        """One wake-up for any number of events; from any thread."""
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._news.set)

    # -- on the event loop

    async def take(self) -> list[Event]:
        """What has come since the last call; [] after `PING_SECONDS` without any, or at the end."""
        if not self.ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PING_SECONDS):
                    await self._news.wait()
        self._news.clear()
        self._woken = False
        events = []
        while self._pending:
            events.append(self._pending.popleft())
        return events


class EventHub:
    """The sink that hands the engine's events to subscribers."""

    def __init__(self) -> None:
        self.subscribers: list[Subscriber] = []
        self.closed = False

    def write(self, new: Event) -> None:
        """On the engine's thread."""
        for subscriber in list(self.subscribers):
            subscriber.write(new)

    def close(self) -> None:
        """The server goes down: streams end."""
        self.closed = True
        for subscriber in self.subscribers:
            subscriber.ended = True
            subscriber.wake()


async def events(server: Server, request: Request) -> Response:
    """The route. The stream's headers are sent once the hub listens: post the request then."""
    request_id = request.query_params.get("request_id", "")
    if not request_id:
        raise APIError(400, "request_id is missing: /events?request_id=ID", param="request_id")
    hub, limit = server.hub, server.settings.max_subscribers
    if len(hub.subscribers) >= limit:
        raise APIError(
            429, f"{limit} clients watch already", code="queue_full", headers={"Retry-After": "1"}
        )
    subscriber = Subscriber(request_id)
    hub.subscribers.append(subscriber)
    response = EventStream(_stream(server, subscriber))
    response.resources.callback(server.unsubscribe, subscriber)
    try:
        await unless_gone(request.receive, server.llm.call(server.attach_hub))
    except BaseException:
        response.resources.close()
        raise
    return response


async def _stream(server: Server, subscriber: Subscriber) -> AsyncGenerator[bytes, None]:
    quiet = 0.0
    yield b": watching\n\n"
    while True:
        ended = subscriber.ended  # before the events are taken: none is left behind
        new = await subscriber.take()
        if subscriber.num_lost and new:
            count, subscriber.num_lost = subscriber.num_lost, 0
            yield event(
                Event(
                    new[0].time, new[0].step, None, "engine", "events.lost", None, {"count": count}
                ).to_dict()
            )
        for one in new:
            yield event(one.to_dict())
        quiet = 0.0 if new else quiet + PING_SECONDS
        if ended or quiet > IDLE_SECONDS:
            return
        if not new:
            yield b": ping\n\n"
