"""Messages over a byte stream: lengths, fields in JSON, and a body of bytes.

::

    | 4 bytes | 8 bytes | fields | body |
      length    length
      of the    of the
      fields    body

A length is checked before anything of that length is read, and every wait has an end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from typing import Any

Bytes = bytes | bytearray | memoryview
Fields = dict[str, Any]

MAX_FIELDS = 64 * 1024  # bytes
STREAM_LIMIT = 4 * 1024**2  # bytes the reader takes in before it makes the sender wait
_LENGTHS = struct.Struct("!IQ")


class LinkError(Exception):
    """The other side is gone, or says what nobody can understand: the link is of no use."""


class Link:
    """One connection, which it closes.

    patience: seconds that one message may take to be taken or to arrive; then `TimeoutError`.
    last_sent: when we last said something, by the loop's clock.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, patience: float
    ) -> None:
        self._reader = reader
        self._writer = writer
        # A small message must not wait for the acknowledgement of the one before, which may take
        # 40 ms. asyncio sees to that only where the listening socket names its protocol.
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.patience = patience
        self.last_sent = asyncio.get_running_loop().time()

    @classmethod
    async def connect(cls, host: str, port: int, patience: float) -> Link:
        """Raises `OSError`, and `TimeoutError`."""
        async with asyncio.timeout(patience):
            streams = await asyncio.open_connection(host, port, limit=STREAM_LIMIT)
        return cls(*streams, patience)

    async def send(self, fields: Fields, *body: Bytes) -> None:
        """Raises `LinkError` when the other side has left."""
        text = json.dumps(fields).encode()
        size = sum(len(part) for part in body)
        self.last_sent = asyncio.get_running_loop().time()
        try:
            self._writer.write(_LENGTHS.pack(len(text), size) + text)
            for part in body:
                self._writer.write(part)
            async with asyncio.timeout(self.patience):
                await self._writer.drain()
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise LinkError(f"the link broke: {error}") from error

    async def receive(self, max_body: int = 0) -> tuple[Fields, bytes]:
        """The next message. max_body: bytes of its body; more is a `LinkError`, unread."""
        try:
            async with asyncio.timeout(self.patience):
                return await self._receive(max_body)
        except asyncio.IncompleteReadError as error:
            raise LinkError("the other side has left") from error
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise LinkError(f"the link broke: {error}") from error

    async def _receive(self, max_body: int) -> tuple[Fields, bytes]:
        head = await self._reader.readexactly(_LENGTHS.size)
        text_size, body_size = _LENGTHS.unpack(head)
        if text_size > MAX_FIELDS or body_size > max_body:
            raise LinkError(
                f"a message must have at most {MAX_FIELDS} bytes of fields and {max_body} of body, "
                f"got {text_size} and {body_size}"
            )
        text = await self._reader.readexactly(text_size)
        body = await self._reader.readexactly(body_size)
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise LinkError("the fields of a message are no JSON") from error
        if not isinstance(fields, dict):
            raise LinkError("the fields of a message are no object")
        return fields, body

    def close(self) -> None:
        """At once: what the other side has not read yet is lost. Safe to call twice."""
        self._writer.transport.abort()

    @property
    def is_closed(self) -> bool:
        """By either side."""
        reader = self._reader
        return reader.at_eof() or reader.exception() is not None or self._writer.is_closing()

    async def until_closed(self) -> None:
        """Wait for the other side to close, which it does when it has read everything.

        Closed by us first, with something of its unread, what we sent last might never arrive.
        """
        with contextlib.suppress(LinkError, TimeoutError):
            while True:
                await self.receive()


def text_of(fields: Fields, name: str) -> str:
    """A string among fields; `LinkError` when it is none."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise LinkError(f"{name} must be a string, got {value!r:.60}")
    return value


def count_of(fields: Fields, name: str, limit: int) -> int:
    """An integer in [0, limit) among fields; `LinkError` when it is none."""
    value = fields.get(name)
    if type(value) is not int or not 0 <= value < limit:
        raise LinkError(f"{name} must be an integer in [0, {limit}), got {value!r:.60}")
    return value
