"""Reading a replica's stream of server-sent events without changing a byte of it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

END = b"\n\n"


async def whole_events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The same bytes, cut after events: who is cut off in the middle of one has not begun it.

    What follows the last event is left out.
    """
    pending = bytearray()
    async for chunk in chunks:
        pending += chunk
        end = pending.rfind(END) + len(END)
        if end >= len(END):
            yield bytes(pending[:end])
            del pending[:end]


def split(chunk: bytes) -> list[bytes]:
    """The events of a chunk of `whole_events`."""
    return [event + END for event in chunk.split(END) if event]


def data_of(event: bytes) -> Any:
    """What an event says in JSON; None for a comment, or `[DONE]`."""
    if not event.startswith(b"data: {"):
        return None
    return json.loads(event.removeprefix(b"data: "))


def is_opening(event: bytes) -> bool:
    """Does it only announce a reply? Such events a chat stream begins with, before any token."""
    data = data_of(event)
    choices = (data.get("choices") if data else None) or []
    return bool(choices) and all(
        choice.get("delta") == {"role": "assistant", "content": ""}
        and choice.get("finish_reason") is None
        for choice in choices
    )


def error_of(event: bytes) -> dict[str, Any] | None:
    """The error that ends a stream, in OpenAI's envelope."""
    data = data_of(event)
    return data.get("error") if data else None


def usage_in(chunk: bytes) -> dict[str, Any] | None:
    """The usage that a stream ends with, if this chunk brings it."""
    if b'"usage":{' not in chunk:
        return None
    for event in split(chunk):
        data = data_of(event)
        if data and data.get("usage"):
            usage: dict[str, Any] = data["usage"]
            return usage
    return None
