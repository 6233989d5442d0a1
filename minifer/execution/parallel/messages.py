"""What rank 0 tells the others, over a socket: JSON, each message behind its length.

A step's input is a few kilobytes of integers. Weights, KV and activations never come this way.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

from minifer.kv.step_input import StepInput

_LENGTH = struct.Struct("!Q")
# What a forward pass reads of a step, and no more.
_STEP = (
    "block_size",
    "token_ids",
    "positions",
    "slot_mapping",
    "query_start",
    "seq_lens",
    "block_tables",
    "block_copies",
    "block_poison",
    "logits_rows",
    "greedy",
)


def step_message(step: StepInput) -> dict[str, Any]:
    return {name: getattr(step, name) for name in _STEP}


def step_of(message: Mapping[str, Any]) -> StepInput:
    return StepInput(**message)


def encoded(message: Mapping[str, Any]) -> bytes:
    """A message as `receive` reads it."""
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


def receive(channel: socket.socket) -> dict[str, Any]:
    """The next message. Raises `EOFError` when the other side is gone, `TimeoutError` when it is
    silent for longer than the socket's timeout."""
    (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
    message: dict[str, Any] = json.loads(_exactly(channel, length))
    return message


def _exactly(channel: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        got = channel.recv(count - len(parts))
        if not got:
            raise EOFError("the other side is gone")
        parts += got
    return bytes(parts)
