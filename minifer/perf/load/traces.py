"""Recorded arrivals and lengths. A trace holds no texts: contents are drawn from a seed.

The format is told by the columns:

=========  ======  ============================================================================
format     file    columns
=========  ======  ============================================================================
minifer    JSONL   time (s), input_len, output_len
simulated  JSONL   what `minifer sim workload --out` writes, where no turn waits for an answer
mooncake   JSONL   timestamp (ms), input_length, output_length, hash_ids of 512-token blocks
                   (Qin et al., "Mooncake", FAST 2025; github.com/kvcache-ai/Mooncake)
bailian    JSONL   chat_id, parent_chat_id, timestamp (s), input_length, output_length, hash_ids of
                   16-token blocks (Wang et al., "KVCache cache in the wild", ATC 2025;
                   github.com/alibaba-edu/qwen-bailian-usagetraces-anon)
azure      CSV     TIMESTAMP (date and time), ContextTokens, GeneratedTokens
                   (Patel et al., "Splitwise", ISCA 2024; github.com/Azure/AzurePublicDataset)
burstgpt   CSV     Timestamp (s), Request tokens, Response tokens, and others that are not read;
                   a response of 0 tokens is a request that failed and is left out
                   (Wang et al., "BurstGPT", arXiv 2401.17644; github.com/HPMLL/BurstGPT)
=========  ======  ============================================================================

Any of them may be compressed with gzip.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from minifer.perf.load.trace_rows import HASH_BLOCK, HASH_BLOCKS, MARKS, TraceRow, read_row
from minifer.perf.load.workload import Session, Turn, Vocabulary, draw

__all__ = ["HASH_BLOCK", "Trace", "TraceRow", "load_trace"]


@dataclass(frozen=True)
class Trace:
    """Rows in order of time. The counts say what was done to the file's rows.

    num_failed: left out because the recorded request failed. num_unsorted: stood behind a later
    one. num_too_long: left out by `select`. hash_block: tokens behind one of the rows' hash ids.
    """

    format: str
    rows: tuple[TraceRow, ...]
    num_failed: int = 0
    num_unsorted: int = 0
    num_too_long: int = 0
    hash_block: int = HASH_BLOCK

    def select(self, limit: int | None = None, max_total_len: int | None = None) -> Trace:
        """The first `limit` rows of those whose input and output fit into `max_total_len`."""
        rows = [
            row
            for row in self.rows
            if max_total_len is None or row.input_len + row.output_len <= max_total_len
        ]
        if not rows:
            raise ValueError(f"max_total_len={max_total_len} leaves none of {len(self.rows)} rows")
        too_long = len(self.rows) - len(rows)
        return replace(self, rows=_from_zero(rows[:limit]), num_too_long=too_long)

    def spread(self, jitter: float, seed: int) -> Trace:
        """Move each row by up to `jitter` seconds: a clock of 3-s ticks makes bursts of its own."""
        if not 0 <= jitter < math.inf:
            raise ValueError(f"trace_jitter must be at least 0 seconds, got {jitter}")
        rng = random.Random(f"{seed}/jitter")
        moved = [replace(row, time=row.time + jitter * rng.random()) for row in self.rows]
        return replace(self, rows=_from_zero(sorted(moved, key=lambda row: row.time)))

    def sessions(self, vocabulary: Vocabulary, seed: int, speed_up: float = 1.0) -> list[Session]:
        """One turn each. speed_up: the trace's seconds in one of ours."""
        if not 0 < speed_up < math.inf:
            raise ValueError(f"speed_up must be above 0, got {speed_up}")
        contents = random.Random(f"{seed}/contents")
        size = self.hash_block
        sessions = []
        for row in self.rows:
            pieces: list[Any] = []
            for block in row.hash_ids[: -(-row.input_len // size)]:
                rng = random.Random(f"{seed}/block/{block}")
                pieces += draw(rng, vocabulary, min(size, row.input_len - len(pieces)))
            pieces += draw(contents, vocabulary, row.input_len - len(pieces))
            turn = Turn(tuple(pieces), row.output_len)
            sessions.append(Session((turn,), row.time / speed_up))
        return sessions


def load_trace(path: str | Path) -> Trace:
    """Read a trace in one of the formats above.

    Raises `ValueError` naming file, line and column for a row that cannot be read, for columns of
    no known format, and for a file without requests.
    """
    with _open(path) as file:
        first = file.readline()
        if not first:
            raise ValueError(f"{path} is empty")
        file.seek(0)
        lines = _json_rows(path, file) if first.lstrip().startswith("{") else _csv_rows(path, file)
        rows: list[TraceRow] = []
        chosen, failed = "", 0
        for line, fields in lines:
            chosen = chosen or _format_of(path, fields)
            try:
                row = read_row(chosen, fields)
            except ValueError as error:
                raise ValueError(f"{path}, line {line}: {error} ({chosen} format)") from None
            if row.output_len == 0 and chosen == "burstgpt":
                failed += 1
            elif row.output_len == 0:
                raise ValueError(f"{path}, line {line}: output length must be at least 1, got 0")
            else:
                rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no requests but {failed} failed ones")
    times = [row.time for row in rows]
    latest = itertools.accumulate(times, max)
    unsorted = sum(time < before for time, before in zip(times, latest, strict=True))
    ordered = sorted(rows, key=lambda row: row.time)
    block = HASH_BLOCKS.get(chosen, HASH_BLOCK)
    return Trace(chosen, _from_zero(ordered), failed, unsorted, hash_block=block)


def _from_zero(rows: Sequence[TraceRow]) -> tuple[TraceRow, ...]:
    return tuple(replace(row, time=row.time - rows[0].time) for row in rows)


def _open(path: str | Path) -> TextIO:
    """As text, compressed or not."""
    with open(path, "rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
    if compressed:
        return gzip.open(path, "rt", newline="", encoding="utf-8-sig")
    return open(path, newline="", encoding="utf-8-sig")


# -- rows of a file


def _json_rows(path: str | Path, file: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for line, text in enumerate(file, 1):
        if text.strip():
            try:
                fields = json.loads(text)
            except ValueError as error:
                raise ValueError(f"{path}, line {line}: not JSON: {error}") from None
            if not isinstance(fields, dict):
                raise ValueError(f"{path}, line {line}: must be a JSON object, got {text.strip()}")
            yield line, fields


def _csv_rows(path: str | Path, file: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(file)
    _format_of(path, dict.fromkeys(reader.fieldnames or ()))
    for fields in reader:
        yield reader.line_num, fields


def _format_of(path: str | Path, fields: Mapping[str, Any]) -> str:
    for name, marks in MARKS.items():
        if marks <= fields.keys():
            return name
    known = "; ".join(f"{name}: {', '.join(sorted(marks))}" for name, marks in MARKS.items())
    found = ", ".join(map(str, fields)) or "nothing"
    raise ValueError(f"{path} is no known trace: its columns are {found}; known are {known}")
