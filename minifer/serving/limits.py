"""Who may come in: the bound on open requests, and the API key."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from minifer.serving.errors import APIError

OPEN_PATHS = ("/", "/health")  # a page to load and a probe to answer; they tell nothing


class OpenRequests:
    """How many prompts are in the house: being read, waiting, or running.

    A queue without a bound answers everybody late. This one says no at once, and when to return.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self.draining = False  # the server is going down
        self._arriving: set[asyncio.Timeout] = set()

    @contextmanager
    def seat(self, count: int = 1) -> Iterator[None]:
        """Hold `count` places; `APIError` 429 with Retry-After when there are not so many."""
        if self.draining:
            raise _shutting_down()
        if self.count + count > self.limit:
            raise APIError(
                429,
                f"{self.count} prompts are open, the limit is {self.limit}: try again later",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self.count += count
        try:
            yield
        finally:
            self.count -= count

    @asynccontextmanager
    async def arriving(self) -> AsyncIterator[None]:
        """While a body is being read: `drain` ends it, with a 503. It may be a slow one."""
        try:
            async with asyncio.timeout(None) as limit:
                self._arriving.add(limit)
                try:
                    yield
                finally:
                    self._arriving.discard(limit)
        except TimeoutError:
            raise _shutting_down() from None

    def drain(self) -> None:
        """Let nobody in any more."""
        self.draining = True
        for limit in self._arriving:
            limit.reschedule(0)


def _shutting_down() -> APIError:
    headers = {"Retry-After": "5"}
    return APIError(503, "the server is shutting down", code="shutting_down", headers=headers)


class RequireKey:
    """ASGI middleware: `Authorization: Bearer KEY` on every path but `OPEN_PATHS`.

    Compared in constant time, as bytes, so that an answer's delay tells nothing about the key.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._fits(scope):
            await self._app(scope, receive, send)
            return
        error = APIError(
            401,
            "a valid API key is needed: send it as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)

    def _fits(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1", errors="replace")
        return hmac.compare_digest(given, self._key) and scheme.lower() == "bearer"
