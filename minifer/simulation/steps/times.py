"""How long a simulated step takes.

A step computes chunks: (tokens computed, context with them), as `perf.costs` counts them. Three
ways to price one: `FixedSteps` (queueing theory), `FittedSteps` (coefficients, from a log or a
publication), and `roofline.RooflineSteps` (a device's data sheet). `find_steps` in `named.py`
reads any of them from a command line.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

Chunk = tuple[int, int]  # (tokens computed, context with them): `perf.costs` counts the same pairs


class StepTimes(Protocol):
    """Seconds of one step of an engine; a chunk of one token decodes, a longer one prefills."""

    def seconds(self, chunks: Sequence[Chunk]) -> float: ...


@dataclass(frozen=True)
class FixedSteps:
    """Every step takes as long: the service time of a queue. Raises `ValueError` below 0."""

    step: float

    def __post_init__(self) -> None:
        _check_prices(self)

    def seconds(self, chunks: Sequence[Chunk]) -> float:
        return self.step


@dataclass(frozen=True)
class PrefillPrices:
    """Seconds of a step that prefills, of each token, and of each unit of Σ (end² − start²).

    A chunk of the positions [start, end) computes (end² − start²) / 2 (query, key) pairs: of a
    whole prompt of p tokens the last term is p².
    """

    fixed: float
    per_token: float
    per_square: float = 0.0

    def __post_init__(self) -> None:
        _check_prices(self)


@dataclass(frozen=True)
class DecodePrices:
    """Seconds of a step that decodes, of each request in it, of each token of their contexts."""

    fixed: float
    per_row: float
    per_context: float = 0.0

    def __post_init__(self) -> None:
        _check_prices(self)


@dataclass(frozen=True)
class FittedSteps:
    """A sum of known parts with fitted prices, the form that serving simulators share::

        prefill   fixed + per_token · tokens + per_square · Σ (end² − start²)
        decode    fixed + per_row · B + per_context · Σ context
        both      the larger of the two fixed parts, and all the rest

    decode: from batch size on → prices, in rising order from 0: DistServe has one set below 95
    requests and one from there on. Empty: a token that decodes costs what one that prefills does.
    source: where the prices are from. decode_alone: batch size → seconds of a step that decodes so
    many requests and does nothing else, but for its contexts; in place of fixed + per_row · B. No
    line tells a CPU's products: three rows may take longer than four. Between two sizes a line
    is drawn, beyond them each request costs per_row.

    Raises `ValueError` for prices that are negative or not finite, and for batch sizes that do not
    rise: from 0 in decode, from at least 1 in decode_alone.
    """

    prefill: PrefillPrices
    decode: tuple[tuple[int, DecodePrices], ...] = ()
    source: str = ""
    decode_alone: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.decode]
        if self.decode and (sizes[0] != 0 or sizes != sorted(set(sizes))):
            raise ValueError(f"the batch sizes of decode must rise from 0, got {sizes}")
        sizes = [size for size, _ in self.decode_alone]
        if sizes and (sizes[0] < 1 or sizes != sorted(set(sizes)) or not self.decode):
            raise ValueError(
                f"the batch sizes of decode_alone must rise from at least 1, and decode must have "
                f"prices, got {sizes} and {self.decode}"
            )
        for size, seconds in self.decode_alone:
            if not 0 <= seconds < math.inf:
                raise ValueError(f"decode_alone of {size} must be at least 0 s, got {seconds}")

    def seconds(self, chunks: Sequence[Chunk]) -> float:
        rows = context = tokens = squares = 0
        if self.decode:
            for query, end in chunks:
                if query == 1:
                    rows += 1
                    context += end
                else:
                    tokens += query
                    squares += query * (2 * end - query)
        else:
            for query, end in chunks:
                tokens += query
                squares += query * (2 * end - query)
        prefill = self.prefill
        more = prefill.per_token * tokens + prefill.per_square * squares
        if not rows:
            return prefill.fixed + more
        decode = self.decode[0][1]
        for size, prices in self.decode[1:]:
            if rows < size:
                break
            decode = prices
        if self.decode_alone and not tokens:
            return self._alone(rows, decode) + decode.per_context * context
        fixed = max(prefill.fixed, decode.fixed) if tokens else decode.fixed
        return fixed + decode.per_row * rows + decode.per_context * context + more

    def _alone(self, rows: int, decode: DecodePrices) -> float:
        sizes = [size for size, _ in self.decode_alone]
        place = bisect_left(sizes, rows)
        if place == len(sizes) or (place == 0 and rows < sizes[0]):
            size, seconds = self.decode_alone[min(place, len(sizes) - 1)]
            return max(0.0, seconds + decode.per_row * (rows - size))
        size, seconds = self.decode_alone[place]
        if size == rows:
            return seconds
        before, less = self.decode_alone[place - 1]
        return less + (seconds - less) * (rows - before) / (size - before)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        decode = [{"from_batch": size, **asdict(prices)} for size, prices in self.decode]
        return {
            "source": self.source,
            "prefill": asdict(self.prefill),
            "decode": decode,
            "decode_alone": [list(pair) for pair in self.decode_alone],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FittedSteps:
        """What `to_dict` gave; further keys are not read. Raises `ValueError` for anything else."""
        try:
            prefill = PrefillPrices(**data["prefill"])
            decode = []
            for row in data.get("decode", ()):
                prices = {name: value for name, value in row.items() if name != "from_batch"}
                decode.append((int(row["from_batch"]), DecodePrices(**prices)))
            alone = tuple((int(size), float(sec)) for size, sec in data.get("decode_alone", ()))
            return cls(prefill, tuple(decode), str(data.get("source", "")), alone)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"these are no fitted step times: {error!r}") from None


def _check_prices(prices: Any) -> None:
    for field in fields(prices):
        value = getattr(prices, field.name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{field.name} must be a number of seconds, got {value!r}")
        if not 0 <= value < math.inf:
            raise ValueError(f"{field.name} must be at least 0 seconds, got {value}")
