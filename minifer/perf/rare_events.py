"""How often must one look to see something rare, and what does seeing nothing prove?

A fault that garbles one reply in 100,000 passes every test of a thousand replies. The arithmetic is
that of independent trials: n of them all miss an event of probability p with (1 − p)ⁿ.
"""

from __future__ import annotations

import math


def trials_to_see(rate: float, confidence: float = 0.95) -> int:
    """Trials after which an event of this rate was seen at least once, with this confidence.

    The smallest n with 1 − (1 − rate)ⁿ ≥ confidence: 299,572 for 1e-5 and 95 %.
    Raises `ValueError` unless both are in (0, 1).
    """
    _check("rate", rate)
    _check("confidence", confidence)
    return math.ceil(math.log1p(-confidence) / math.log1p(-rate))


def rate_bound(num_trials: int, confidence: float = 0.95) -> float:
    """The highest rate that `num_trials` trials without a single event leave possible.

    Exactly 1 − (1 − confidence)^(1/n). The *rule of three* is its size at 95 %: 3/n (J. A. Hanley,
    A. Lippman-Hand, "If nothing goes wrong, is everything all right?", JAMA 1983).
    Raises `ValueError` for fewer than 1 trial or a confidence outside (0, 1).
    """
    if isinstance(num_trials, bool) or not isinstance(num_trials, int) or num_trials < 1:
        raise ValueError(f"num_trials must be an integer of at least 1, got {num_trials!r}")
    _check("confidence", confidence)
    return -math.expm1(math.log1p(-confidence) / num_trials)


def _check(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name} must be between 0 and 1, got {value!r}")
