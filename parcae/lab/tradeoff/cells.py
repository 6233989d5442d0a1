"""How numbers of `study` are written: cells of a table, parts of a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Data = Mapping[str, Any]


def signed(value: float) -> str:
    """Nats a token."""
    return format(round(value, 4) + 0.0, "+.4f")  # no −0.0000


def difference(value: float, error: float) -> str:
    """Nats a token, with the standard error."""
    return f"{signed(value)} ± {error:.4f}"


def median_and_range(ratio: Data) -> str:
    """Of a ratio over rounds (`minifer.perf.bench.Summary`)."""
    return f"{ratio['median']:.2f}× ({ratio['min']:.2f} to {ratio['max']:.2f})"
