"""A replica's answer on its way to the client, byte for byte.

A stream's first token is the point of no return. Until then its bytes are held back (its headers
are not), so that a second replica can begin anew if the first one dies. After it the stream ends
with an error: the rest of another answer is not the rest of this one.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing

import httpx
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minifer.serving.front import sse
from minifer.serving.front.errand import Errand, LostError, Upstream, as_error
from minifer.serving.streaming import EventStream

_GOING = ("engine_stopped", "shutting_down")  # codes of a replica's last words in a stream
_LOST = (httpx.TransportError, LostError)


async def answer_of(errand: Errand) -> Response:
    """What the replica answers that takes the errand. Raises `APIError` when none does."""
    try:
        upstream = await errand.ask()
        if upstream.headers.get("content-type", "").startswith("text/event-stream"):
            return _ForwardedStream(errand)
        return await _whole(errand)
    except BaseException:
        await errand.close()
        raise


class _ForwardedStream(EventStream):
    """Leaves the replica when it is over, even if it never began."""

    def __init__(self, errand: Errand) -> None:
        super().__init__(_stream(errand), headers=errand.labels)
        self._errand = errand

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._errand.close()


async def _whole(errand: Errand) -> Response:
    """An answer in one piece. Until all of it has come, another replica can be asked for it."""
    while True:
        assert errand.upstream is not None
        try:
            content = await errand.upstream.aread()
        except _LOST as error:
            await errand.lost(_as_lost(error))
            await errand.ask()
            continue
        if errand.upstream.status_code == 200:
            with contextlib.suppress(ValueError, AttributeError):
                errand.report(json.loads(content).get("usage"))
        response = errand.response(content)
        await errand.close()
        return response


async def _stream(errand: Errand) -> AsyncGenerator[bytes, None]:
    """The events of an answer. Raises `APIError` when it breaks off after the first token."""
    begun = False
    while True:
        assert errand.upstream is not None
        try:
            async with aclosing(_from_first_token(errand, errand.upstream)) as events:
                async for chunk in events:
                    begun = True
                    yield chunk
            return
        except _LOST as error:
            if begun:
                raise errand.broken_off() from None
            lost = _as_lost(error)
        await errand.lost(lost)
        if (await errand.ask()).status_code != 200:
            raise as_error(await _whole(errand))


async def _from_first_token(errand: Errand, upstream: Upstream) -> AsyncGenerator[bytes, None]:
    """All events; those before the first token come together with it. Raises `LostError` when the
    replica goes before, and what `httpx` does."""
    held: list[bytes] | None = []
    async with (
        aclosing(upstream.aiter_raw()) as chunks,  # type: ignore[type-var]
        aclosing(sse.whole_events(chunks)) as events,
    ):
        async for chunk in events:
            if held is not None:
                held += sse.split(chunk)
                news = next((event for event in held if not sse.is_opening(event)), None)
                if news is None:
                    continue
                error = sse.error_of(news)
                if error is not None and error.get("code") in _GOING:
                    raise LostError("unavailable")
                errand.first_token()
                chunk, held = b"".join(held), None
            errand.report(sse.usage_in(chunk))
            yield chunk
    if held:
        yield b"".join(held)


def _as_lost(error: Exception) -> LostError:
    return error if isinstance(error, LostError) else LostError("died", ran=True)
