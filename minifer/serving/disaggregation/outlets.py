"""How a block travels: in the stream, or in shared memory with only its header in the stream.

A block is sent as what its file would be: a header that names it and holds its checksum, and the
payload (`kv/tiers/block_file.py`). Two outlets and two inlets that belong to them::

    inline    | message: block 7 | header | payload |  ─▶
    shared    | message: block 7, slot 2 | header |    ─▶      payload in slot 2 of a segment
                                                       ◀─      | message: slot 2 is free |
"""

from __future__ import annotations

import mmap
from collections import deque
from typing import Protocol

from minifer.serving.disaggregation.frames import Bytes, Fields, Link, count_of
from minifer.serving.disaggregation.shared_memory import Segment

MAX_HEADER = 64 * 1024  # bytes


class Outlet(Protocol):
    """The sender's side."""

    async def put(self, number: int, header: Bytes, payload: Bytes) -> None:
        """Send block `number`. Raises as `Link` does."""
        ...


class Inlet(Protocol):
    """The receiver's side."""

    max_body: int

    async def take(self, fields: Fields, body: bytes) -> tuple[memoryview, bytearray]:
        """Header and payload of the block that a message brings; the payload is the caller's.

        Raises `LinkError` for a message that makes no sense.
        """
        ...


class InlineOutlet:
    """Everything through the connection, which makes a fast sender wait."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def put(self, number: int, header: Bytes, payload: Bytes) -> None:
        await self._link.send({"block": number, "header": len(header)}, header, payload)


class InlineInlet:
    def __init__(self, block_bytes: int) -> None:
        self.max_body = MAX_HEADER + block_bytes

    async def take(self, fields: Fields, body: bytes) -> tuple[memoryview, bytearray]:
        split = count_of(fields, "header", len(body) + 1)
        return memoryview(body)[:split], bytearray(memoryview(body)[split:])


class SharedOutlet:
    """A window of slots, each a block long, used again when the receiver has copied its block."""

    def __init__(self, link: Link, segment: Segment, block_bytes: int, num_slots: int) -> None:
        self._link = link
        self._segment = segment
        self._block_bytes = block_bytes
        self._num_slots = num_slots
        self._free = deque(range(num_slots))

    async def put(self, number: int, header: Bytes, payload: Bytes) -> None:
        while not self._free:
            fields, _ = await self._link.receive()
            self._free.append(count_of(fields, "free", self._num_slots))
        slot = self._free.popleft()
        self._segment.write(slot * self._block_bytes, payload)
        await self._link.send({"block": number, "slot": slot}, header)


class SharedInlet:
    max_body = MAX_HEADER

    def __init__(self, link: Link, memory: mmap.mmap, block_bytes: int, num_slots: int) -> None:
        self._link = link
        self._memory = memory
        self._block_bytes = block_bytes
        self._num_slots = num_slots

    async def take(self, fields: Fields, body: bytes) -> tuple[memoryview, bytearray]:
        slot = count_of(fields, "slot", self._num_slots)
        begin = slot * self._block_bytes
        with memoryview(self._memory) as memory:
            payload = bytearray(memory[begin : begin + self._block_bytes])
        await self._link.send({"free": slot})
        return memoryview(body), payload
