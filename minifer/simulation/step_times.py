"""How long a simulated step takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Chunk = tuple[int, int]  # (tokens computed, context with them): `perf.costs` counts the same pairs


class StepTimes(Protocol):
    """Seconds of one step of an engine; a chunk of one token decodes, a longer one prefills."""

    def seconds(self, chunks: Sequence[Chunk]) -> float: ...
