"""Turning requests away as they come, before they cost anything (Mooncake, FAST '25, section 7).

A request that will miss its limit is better told so at once: its prefill is not wasted, and those
behind it wait less. Mooncake refuses whose first token, or whose gaps between tokens, would be too
late; here each is a rule of its own: `PredictedTTFT` foresees prefill and nothing of decoding,
`DecodeLoad` counts those that will decode together, and no seconds.

What to look at is the question. The load of the decode nodes *now* says little about the time when
the request gets there: judged by it, requests are let in while decoding is idle and arrive together
when it is full, so the load swings. The load *predicted* for that time does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Outlook:
    """What is known of a request as it comes, with the node that it would go to.

    ttft: seconds to its first token, predicted from the prefill that is before it. decoding: how
    many requests decode now, on all nodes that do. flights: of every request that is under way,
    (seconds until its first token, predicted; 0 if it has one, seconds since that token).
    num_decode_nodes: among which the decoding is shared.
    """

    ttft: float
    decoding: int
    flights: Sequence[tuple[float, float]]
    num_decode_nodes: int


class Rejection(Protocol):
    """A rule that turns requests away."""

    def reason(self, outlook: Outlook) -> str:
        """Why this request is refused; "" when it is not."""
        ...


def _check_limit(limit: float, unit: str) -> None:
    if not limit > 0:
        raise ValueError(
            f"the limit above which requests are refused must be above 0 {unit}, got {limit}"
        )


@dataclass(frozen=True)
class PredictedTTFT:
    """Refuse what would wait longer than `limit` seconds for its first token, as far as prefill
    decides it: who waits for a seat or for KV blocks, because answers are long, waits unforeseen.
    """

    limit: float

    def __post_init__(self) -> None:
        _check_limit(self.limit, "seconds")

    def reason(self, outlook: Outlook) -> str:
        return "ttft" if outlook.ttft > self.limit else ""


@dataclass(frozen=True)
class DecodeLoad:
    """Refuse when more than `limit` requests a decode node decode at the same time.

    decode_seconds: how long a request is taken to decode; then the load is that of the time when
    this one gets its first token. None: the load as it is now, which is the naive rule.
    """

    limit: float
    decode_seconds: float | None = None

    def __post_init__(self) -> None:
        _check_limit(self.limit, "requests a decode node")
        if self.decode_seconds is not None and not self.decode_seconds > 0:
            raise ValueError(f"decode_seconds must be above 0 or None, got {self.decode_seconds}")

    def reason(self, outlook: Outlook) -> str:
        load = outlook.decoding
        if self.decode_seconds is not None:
            then, lasts = outlook.ttft, self.decode_seconds
            load = sum(
                first <= then and then - first + since < lasts for first, since in outlook.flights
            )
        return "decode load" if load >= self.limit * outlook.num_decode_nodes else ""
