"""What other people measured that a reader of Parcae's headline should know. All of it reported.

The headline compares models of equal parameters and equal tokens. A looped model of μ = 8 costs
about twice the training FLOPs of itself at μ = 1, so equal compute is another question, and a state
that stays bounded is not yet one that more loops improve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from minifer.parcae.lab.laws.training_law import ISOFLOP_ROWS, IsoFlopRow

RECURRENCE_SOURCE = "https://arxiv.org/abs/2604.21106"
PHI, PHI_INTERVAL = 0.46, (0.41, 0.53)  # 116 runs, r in 1, 2, 4, 8; 95 % confidence
PHI_TRUNCATED, PHI_HYPER_CONNECTIONS = 0.38, 0.65  # truncated backpropagation; hyper-connections


def equivalent_parameters(once: float, recurrent: float, loops: float, phi: float = PHI) -> float:
    """N_once + r^φ N_rec: the plain model that reaches the loss of one looped r times.

    φ = 1: a loop is worth as much as layers of its own; 0: nothing. The cost is that of φ = 1.
    (https://arxiv.org/abs/2604.21106). Raises `ValueError` for counts below 0 or loops below 1.
    """
    if once < 0 or recurrent < 0:
        raise ValueError(f"once and recurrent must be at least 0, got {once!r} and {recurrent!r}")
    if not loops >= 1:
        raise ValueError(f"loops must be at least 1, got {loops!r}")
    return once + loops**phi * recurrent


def split_from(total: float, equivalent: float, loops: float, phi: float = PHI) -> float:
    """N_rec of a looped model of `total` parameters that behaves like one of `equivalent`."""
    if not loops > 1:
        raise ValueError(f"loops must be above 1, got {loops!r}")
    return (equivalent - total) / (loops**phi - 1)


@dataclass(frozen=True)
class Evidence:
    """A claim, and the numbers as they were reported: depth → value, in `unit`."""

    claim: str
    unit: str
    by_depth: Mapping[int, float]
    source: str


DEPTH_CURVES = (
    Evidence(
        "trained at a constant 8 loops (Parcae-style, 118M): a V around the trained depth",
        "perplexity",
        {8: 57.9, 16: 170.7},
        "https://github.com/kyegomez/OpenMythos/issues/28",
    ),
    Evidence(
        "the same with random loops out of 4, 6, 8, 12, 16: flat from 4 on, nothing below",
        "perplexity",
        {1: 1217.0, 2: 401.3, 4: 65.3, 6: 65.2, 8: 65.2, 12: 65.2, 16: 65.2},
        "https://github.com/kyegomez/OpenMythos/pull/58",
    ),
    Evidence(
        "the same without its halting unit: falls, then flat, rises a little far beyond",
        "perplexity",
        {1: 131.3, 2: 77.7, 4: 62.8, 6: 60.3, 8: 59.7, 12: 59.5, 16: 59.6, 24: 60.5, 64: 61.7},
        "https://github.com/kyegomez/OpenMythos/pull/58",
    ),
    Evidence(
        "Ouro 1.4B, trained at 4 loops: collapses beyond",
        "GSM8K accuracy",
        {1: 0.203, 2: 0.635, 3: 0.759, 4: 0.790, 6: 0.742, 10: 0.592, 20: 0.017},
        "a third party's measurement of https://arxiv.org/abs/2510.25741's model; peaks and "
        "collapses of its kind: https://arxiv.org/abs/2605.26733",
    ),
)


def rows_that_lose() -> tuple[IsoFlopRow, ...]:
    """Rows of the paper's own table 6 in which the best μ scores below μ = 1 on Core."""
    return tuple(row for row in ISOFLOP_ROWS if row.looped[0] < row.fixed[0])
