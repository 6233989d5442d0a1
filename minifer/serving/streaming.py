"""Server-sent events, and what happens when the client goes away.

A client that is gone must not cost another step. Every route that waits for the engine runs beside
a watcher of its connection, streaming or not: when the connection closes, the work is cancelled,
which aborts the engine's requests on its way out.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import ExitStack, aclosing
from typing import Any, TypeVar

from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minifer.serving.errors import EXPECTED, as_api_error

log = logging.getLogger("minifer.serving")

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """One server-sent event holding JSON; a newline cannot occur in it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return f"data: {text}\n\n".encode()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do some work while the client is there; call it after the request's body has been read.

    Raises `ClientDisconnect`, after the work has been cancelled, when the client leaves first.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientDisconnect
    finally:
        watcher.cancel()
        worker.cancel()
        await asyncio.gather(watcher, worker, return_exceptions=True)
    return worker.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response that sends events as they are made, until they end or the client leaves.

    events: chunks of bytes. An exception in it becomes an error event, in OpenAI's envelope, and
    the end of the stream; without `[DONE]`, so that nobody takes it for complete.
    resources: closed when the response is over, however it ends, even if it never began.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: dict[str, str] | None = None,
        background: BackgroundTask | None = None,
    ) -> None:
        super().__init__(headers=headers, background=background)
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # nginx would collect the tokens
        self.resources = ExitStack()
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.resources:
            start = {"type": "http.response.start", "status": self.status_code}
            await send(start | {"headers": self.raw_headers})
            try:
                if scope["method"] != "HEAD":  # which has no body to wait for
                    await unless_gone(receive, self._send_all(send))
            except ClientDisconnect:
                return
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                async for chunk in events:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except Exception as error:
                if not isinstance(error, EXPECTED):
                    log.exception("a stream broke")
                last = event(as_api_error(error).envelope)
                await send({"type": "http.response.body", "body": last, "more_body": True})
