"""How far tokens have come in the loop: within a step, and between two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from minifer.scheduling.plan import ScheduledRequest


@dataclass
class Span:
    """Rows of one request that go through the loop together.

    loops, depth: iterations run, and to run. threshold: of a token that may leave early.
    """

    rows: range
    depth: int
    threshold: float | None = None
    loops: int = 0
    looping: bool = True


@dataclass(frozen=True)
class SuspendedLoops:
    """What a request keeps between steps while its tokens are between two iterations.

    h: [n, D], the state. term: float32 [n, D], what every iteration adds to it. loops, looping: of
    each of its spans.
    """

    h: Tensor
    term: Tensor
    loops: tuple[int, ...]
    looping: tuple[bool, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.h)


def make_spans(entry: ScheduledRequest, first: int) -> list[Span]:
    """A request's tokens from row `first` on. Only generated ones may leave early; each of them
    is on its own then. A suspended request goes on where it was."""
    request, end = entry.request, first + entry.num_new
    depth, threshold = request.num_loops or 1, request.params.exit_threshold
    alone = end  # rows from here on may leave
    if threshold is not None:
        alone = min(end, max(first, first + request.num_prompt_tokens - entry.start))
    spans = [Span(range(first, alone), depth)] if alone > first else []
    spans += [Span(range(row, row + 1), depth, threshold) for row in range(alone, end)]
    if (state := request.suspended) is not None:
        for span, loops, looping in zip(spans, state.loops, state.looping, strict=True):
            span.loops, span.looping = loops, looping
    return spans
