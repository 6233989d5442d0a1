"""The published scaling laws of Parcae as functions, and what follows from them.

Everything here is **reported** by the source that is named, or computed from what it reports;
nothing is measured. P: https://arxiv.org/abs/2604.12946.

    L(μ, D)     = E + X N(μ)^−x + Y D^−y                     training, at T = μ   (P, section 5.2)
    L(T)        = L∞ + Z exp(−z T)                           one model at depth T (P, section 5.3)
    L(T | μ, D) = E + X N(μ)^−x + Y D^−y + Z exp(−z T / μ)   both                 (P, appendix O)

L: nats a token on FineWeb-Edu. μ: mean loops in training. D: tokens. N(μ): parameters with the
core counted μ times; the paper does not pin down which parameters. With all of them, tables
included, the law meets the paper's own models best (`held_out_errors`), so that is what N is here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from minifer.parcae.lab.laws.flops import (
    public_script_flops,
    training_flops,
    unrolled_parameters,
)
from minifer.parcae.presets import PRESETS

SOURCE = "https://arxiv.org/abs/2604.12946"


@dataclass(frozen=True)
class TrainingLaw:
    """E [nats a token], X and x over N [parameters], Y and y over D [tokens]. huber: of the fit."""

    E: float
    X: float
    x: float
    Y: float
    y: float
    huber: float


# The preset → its law (P, appendix K: 36 models of 140M, 18 of 370M)
LAWS: Mapping[str, TrainingLaw] = {
    "parcae-140m": TrainingLaw(2.662, 522733.307, 0.771, 25420.102, 0.525, 0.44e-4),
    "parcae-370m": TrainingLaw(2.439, 832134.346, 0.775, 6386.865, 0.448, 0.01e-4),
}
BUDGETS = {"parcae-140m": (1e18, 64e18), "parcae-370m": (32e18, 128e18)}  # FLOPs it was fitted on
MU_EXPONENT, TOKENS_EXPONENT = 0.40, 0.78  # μ* ∝ C^0.40, D* ∝ C^0.78 (P, section 5.2)


def training_loss(mu: float, tokens: float, size: str) -> float:
    """L(μ, D) in nats a token, of a preset trained at mean depth μ on D tokens and run at T = μ.

    Raises `ValueError` for a size without a published law, μ below 1, no tokens.
    """
    law = _law(size)
    N = unrolled_parameters(PRESETS[size], _at_least(1, "mu", mu))
    return float(law.E + law.X * N**-law.x + law.Y * _above(0, "tokens", tokens) ** -law.y)


def unified_loss(loops: float, mu: float, tokens: float, size: str, Z: float, z: float) -> float:
    """L(T | μ, D) in nats a token. Z [nats] and z [per T / μ] are not published: bring your own.

    A fitted exponent of μ was 1.19 (140M) and 1.17 (370M); the paper keeps 1.
    """
    _at_least(0, "loops", loops)
    return training_loss(mu, tokens, size) + Z * math.exp(-z * loops / mu)


def scale_allocation(mu: float, tokens: float, budget_ratio: float) -> tuple[float, float]:
    """The best (μ, tokens) at a budget, carried to one `budget_ratio` times as large."""
    _above(0, "budget_ratio", budget_ratio)
    return (
        _at_least(1, "mu", mu) * budget_ratio**MU_EXPONENT,
        _above(0, "tokens", tokens) * budget_ratio**TOKENS_EXPONENT,
    )


def implied_tokens_exponent(
    size: str, *, script: bool = False, start: float = 2.0, ratio: float = 64.0
) -> float:
    """The exponent of D* that a count of FLOPs allows, given μ* ∝ C^0.40 from μ = `start`.

    D = C / c(μ), and c(μ), FLOPs a token, is affine in μ: the exponents of μ* and D* need not sum
    to 1. Half of the loops carry gradient. script: count as the public estimator does. Compare
    with the published 0.78.
    """
    _law(size)
    count = public_script_flops if script else training_flops
    end = start * ratio**MU_EXPONENT
    cost = [count(PRESETS[size], mu, backward=mu / 2) for mu in (start, end)]
    return 1 - math.log(cost[1] / cost[0]) / math.log(ratio)


def best_recurrence(budget: float, size: str, *, script: bool = False) -> tuple[float, float]:
    """(μ, loss) where the law is lowest for a budget in FLOPs, over 1 ≤ μ ≤ 64.

    What the law says if it is minimised at given FLOPs; not what the paper read off its parabolas.
    Outside `BUDGETS` it is an extrapolation.
    """
    _law(size), _above(0, "budget", budget)
    count = public_script_flops if script else training_flops
    grid = np.geomspace(1, 64, 1201)
    losses = [
        training_loss(mu, budget / count(PRESETS[size], mu, backward=max(1.0, mu / 2)), size)
        for mu in grid
    ]
    best = int(np.argmin(losses))
    return float(grid[best]), losses[best]


# -- the paper's tables


@dataclass(frozen=True)
class Comparison:
    """A row of P, table 5: validation perplexities on FineWeb-Edu, and Core, centred accuracy."""

    size: str
    tokens: float
    transformer_perplexity: float
    parcae_perplexity: float
    transformer_core: float
    parcae_core: float

    @property
    def parcae_loss(self) -> float:
        """Nats a token."""
        return math.log(self.parcae_perplexity)


COMPARISONS = (
    Comparison("parcae-140m", 11.2e9, 21.48, 19.06, 13.00, 14.04),
    Comparison("parcae-370m", 29.6e9, 15.79, 14.49, 17.46, 20.00),
    Comparison("parcae-770m", 61.6e9, 13.08, 12.49, 22.42, 25.07),
    Comparison("parcae-1.3b", 104e9, 11.95, 11.42, 25.45, 28.44),
)


def held_out_errors() -> dict[str, tuple[float, float, float]]:
    """Preset → (the law at μ = 8, table 5, relative error), for models it was not fitted on."""
    found = {}
    for row in COMPARISONS:
        if row.size in LAWS:
            predicted = training_loss(8, row.tokens, row.size)
            found[row.size] = predicted, row.parcae_loss, predicted / row.parcae_loss - 1
    return found


@dataclass(frozen=True)
class IsoFlopRow:
    """A row of P, table 6: (Core, Core-Extended) at the best μ of a budget, and at μ = 1."""

    size: str
    budget: float  # FLOPs
    mu: int
    looped: tuple[float, float]
    fixed: tuple[float, float]


ISOFLOP_ROWS = (
    IsoFlopRow("parcae-140m", 1e18, 2, (7.6, 5.7), (7.9, 6.1)),
    IsoFlopRow("parcae-140m", 2e18, 2, (9.0, 6.2), (10.5, 6.4)),
    IsoFlopRow("parcae-140m", 4e18, 4, (11.2, 8.4), (10.7, 8.1)),
    IsoFlopRow("parcae-140m", 8e18, 6, (10.5, 7.8), (11.8, 7.7)),
    IsoFlopRow("parcae-140m", 16e18, 8, (14.6, 9.8), (13.0, 8.8)),
    IsoFlopRow("parcae-140m", 64e18, 10, (16.2, 11.0), (15.0, 9.5)),
    IsoFlopRow("parcae-370m", 32e18, 4, (15.2, 10.1), (16.8, 11.2)),
    IsoFlopRow("parcae-370m", 64e18, 6, (18.1, 11.6), (18.1, 12.1)),
    IsoFlopRow("parcae-370m", 128e18, 6, (20.1, 13.0), (18.1, 12.0)),
)

# Form → preset → (Huber × 1e-7 on all depths, extrapolating to T > μ), P, appendix L
PUBLISHED_FORMS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "exponential": {"parcae-140m": (2.52, 3.18), "parcae-370m": (1.88, 2.29)},
    "shifted power": {"parcae-140m": (5.42, 21.41), "parcae-370m": (5.26, 18.51)},
    "power": {"parcae-140m": (11.11, 43.99), "parcae-370m": (10.77, 38.68)},
    "no floor": {"parcae-140m": (112.89, 397.90), "parcae-370m": (104.95, 369.83)},
}


def _law(size: str) -> TrainingLaw:
    if size not in LAWS:
        raise ValueError(f"size must be one of {', '.join(LAWS)}, got {size!r}")
    return LAWS[size]


def _at_least(limit: float, name: str, value: float) -> float:
    if not (math.isfinite(value) and value >= limit):
        raise ValueError(f"{name} must be at least {limit:g}, got {value!r}")
    return value


def _above(limit: float, name: str, value: float) -> float:
    if not (math.isfinite(value) and value > limit):
        raise ValueError(f"{name} must be above {limit:g}, got {value!r}")
    return value
