"""Speeds from the moments at which tokens arrive; the same rule for every engine.

stamps: of each request, the times at which its tokens were there, in order, in seconds of one
clock. Engines differ in how requests start: some compute all prompts in one step, some one after
the other while the first already decode. So decoding is measured where all of them decode::

    request 0   p p p 1 . 2 . 3 . 4 . 5         p: its prompt is computed
    request 1   p p p p p p 1 . 2 . 3 . 4
                            ├───────────┤       from the last first token …
                                                … to the first last token: 2 + 2 tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Stamps = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Window:
    """start, end: seconds. tokens: that arrived after start, up to end. steps: for each moment in
    it at which tokens arrived, how many tokens each request had before."""

    start: float
    end: float
    tokens: int
    steps: tuple[tuple[int, ...], ...]

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def decode_window(stamps: Stamps) -> Window:
    """Where all requests decode: from the last first token to the first last one.

    Raises `ValueError` where they never do: no request, or one that ended before another began.
    """
    if not stamps or not all(stamps):
        raise ValueError("stamps must hold a token of at least one request, and of each, got none")
    start = max(own[0] for own in stamps)
    end = min(own[-1] for own in stamps)
    if end <= start:
        raise ValueError(
            "every request must decode while all others do; one ended before another had its "
            "first token: ask for more tokens"
        )
    moments = sorted({at for own in stamps for at in own if start < at <= end})
    before = tuple(tuple(sum(at < moment for at in own) for own in stamps) for moment in moments)
    tokens = sum(start < at <= end for own in stamps for at in own)
    return Window(start, end, tokens, before)


def first_tokens(started: float, stamps: Stamps) -> tuple[float, float]:
    """Seconds to the first token of the first and of the last request. Raises `ValueError`."""
    if not stamps or not all(stamps):
        raise ValueError("stamps must hold a token of at least one request, and of each, got none")
    firsts = [own[0] - started for own in stamps]
    return min(firsts), max(firsts)


def whole_run(started: float, stamps: Stamps) -> float:
    """Seconds until the last token of all. Raises `ValueError` without any."""
    if not any(stamps):
        raise ValueError("stamps must hold at least one token, got none")
    return max(own[-1] for own in stamps if own) - started


def same_beginning(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Share of tokens before the first that differs, over all requests; 1.0: the same replies."""
    same = total = 0
    for a, b in zip(ours, theirs, strict=True):
        total += min(len(a), len(b))
        for x, y in zip(a, b, strict=False):
            if x != y:
                break
            same += 1
    return same / total if total else 1.0
