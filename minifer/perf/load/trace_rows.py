"""One row of a trace, as each format writes it. Errors name the column."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

HASH_BLOCK = 512  # tokens behind one of Mooncake's hash ids
HASH_BLOCKS: Mapping[str, int] = {"bailian": 16}  # behind those of another format

MARKS: Mapping[str, set[str]] = {  # one that has all columns of another stands before it
    "minifer": {"time", "input_len", "output_len"},
    "simulated": {"time", "prompt_len", "output_len", "block_names", "waits"},
    "bailian": {"chat_id", "parent_chat_id", "timestamp", "input_length", "output_length"},
    "mooncake": {"timestamp", "input_length", "output_length"},
    "azure": {"TIMESTAMP", "ContextTokens", "GeneratedTokens"},
    "burstgpt": {"Timestamp", "Request tokens", "Response tokens"},
}


@dataclass(frozen=True)
class TraceRow:
    """One request. time: seconds after the first. hash_ids: equal ids are equal blocks."""

    time: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()


def read_row(kind: str, fields: Mapping[str, Any]) -> TraceRow:
    """A row of the format `kind`, its time as the format counts it, in seconds. Raises
    `ValueError` naming the column."""
    row = _READERS[kind](fields)
    if not math.isfinite(row.time):
        raise ValueError(f"time must be finite, got {row.time}")
    if row.input_len < 1:
        raise ValueError(f"input length must be at least 1, got {row.input_len}")
    if row.output_len < 0:
        raise ValueError(f"output length must not be negative, got {row.output_len}")
    return row


def _minifer(fields: Mapping[str, Any]) -> TraceRow:
    return TraceRow(
        _number(fields, "time"), _whole(fields, "input_len"), _whole(fields, "output_len")
    )


def _simulated(fields: Mapping[str, Any]) -> TraceRow:
    if _value(fields, "waits"):
        raise ValueError("this turn waits for the answer before it, and a trace has times")
    return TraceRow(
        _number(fields, "time"),
        _whole(fields, "prompt_len"),
        _whole(fields, "output_len"),
        _blocks(fields, "block_names"),
    )


def _mooncake(fields: Mapping[str, Any]) -> TraceRow:
    return TraceRow(
        _number(fields, "timestamp") / 1000,
        _whole(fields, "input_length"),
        _whole(fields, "output_length"),
        _blocks(fields, "hash_ids"),
    )


def _bailian(fields: Mapping[str, Any]) -> TraceRow:
    return TraceRow(
        _number(fields, "timestamp"),
        _whole(fields, "input_length"),
        _whole(fields, "output_length"),
        _blocks(fields, "hash_ids"),
    )


def _azure(fields: Mapping[str, Any]) -> TraceRow:
    text = _value(fields, "TIMESTAMP")
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"TIMESTAMP must be a date and a time, got {text!r}") from None
    since = when - datetime(1970, 1, 1, tzinfo=when.tzinfo)
    return TraceRow(
        since.total_seconds(), _whole(fields, "ContextTokens"), _whole(fields, "GeneratedTokens")
    )


def _burstgpt(fields: Mapping[str, Any]) -> TraceRow:
    return TraceRow(
        _number(fields, "Timestamp"),
        _whole(fields, "Request tokens"),
        _whole(fields, "Response tokens"),
    )


_READERS: Mapping[str, Callable[[Mapping[str, Any]], TraceRow]] = {
    "minifer": _minifer,
    "simulated": _simulated,
    "mooncake": _mooncake,
    "bailian": _bailian,
    "azure": _azure,
    "burstgpt": _burstgpt,
}


def _value(fields: Mapping[str, Any], name: str) -> Any:
    value = fields.get(name)
    if value is None:  # JSON's null, or a line of CSV that is too short
        raise ValueError(f"{name} is missing")
    return value


def _number(fields: Mapping[str, Any], name: str) -> float:
    value = _value(fields, name)
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None


def _whole(fields: Mapping[str, Any], name: str) -> int:
    number = _number(fields, name)
    if not number.is_integer():  # neither are infinity and NaN
        raise ValueError(f"{name} must be a whole number, got {fields[name]!r}")
    return int(number)


def _blocks(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    blocks = fields.get(name, ())
    if not isinstance(blocks, (list, tuple)) or not all(type(block) is int for block in blocks):
        raise ValueError(f"{name} must be a list of whole numbers, got {blocks!r}")
    return tuple(blocks)
