"""A step's seconds as a sum of known parts with unknown prices, fitted to a log of steps.

`seconds ≈ fixed + bytes / bandwidth` has two prices; `fixed + a · tokens + b · Σ p²` has three
(how serving simulators describe prefill, https://arxiv.org/abs/2311.18677). Fitted to the engine's
own steps they say where the time beyond the roofline's floor goes: into each step, whatever it
does, or into every byte and token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

FIXED = "fixed"


@dataclass(frozen=True)
class StepModel:
    """prices: seconds of one unit of each feature, "fixed" among them. error: mean absolute
    relative error over the log it was fitted to (MAPE)."""

    prices: Mapping[str, float]
    error: float

    def seconds(self, features: Mapping[str, float]) -> float:
        """Seconds of a step. Raises `KeyError` for a feature the log did not have."""
        prices = self.prices
        return prices[FIXED] + sum(prices[name] * value for name, value in features.items())


def fit_step_model(
    features: Mapping[str, Sequence[float]],
    seconds: Sequence[float],
    *,
    fixed: bool = True,
    relative_to: Sequence[float] | None = None,
) -> StepModel:
    """Least squares of the relative errors: a step of 1 ms counts as much as one of 1 s.

    features: name → one value a step ("bytes", "tokens", …). fixed: add a part that every step
    has; else it is 0. relative_to: seconds that each error is divided by; None: the measured ones,
    which makes a noisy log look fast, as a step that took too long counts less. Raises
    `ValueError` for columns of unequal length, seconds that are not above 0, or a log that cannot
    tell the features apart.
    """
    measured = np.asarray(seconds, dtype=np.float64)
    if measured.size == 0 or not bool((measured > 0).all()):
        raise ValueError(f"seconds must be above 0, got {list(seconds)}")
    for name, values in features.items():
        if len(values) != len(measured):
            raise ValueError(
                f"{name} must have one value for each of {len(measured)} steps, got {len(values)}"
            )
    divisor = measured if relative_to is None else np.asarray(relative_to, dtype=np.float64)
    ones = {FIXED: np.ones_like(measured)} if fixed else {}
    names = [*ones, *features]
    columns = np.array([*ones.values(), *features.values()], dtype=np.float64).T
    relative = columns / divisor[:, None]
    scale = np.abs(relative).max(axis=0)  # bytes and 1 differ by many orders of magnitude
    scale[scale == 0] = 1.0
    solution, _, rank, _ = np.linalg.lstsq(relative / scale, measured / divisor, rcond=1e-10)
    if rank < len(names):
        raise ValueError(
            f"the log of {len(measured)} steps cannot tell {', '.join(names)} apart: "
            "it needs steps in which they differ"
        )
    prices = solution / scale
    error = float(np.abs(columns @ prices / measured - 1).mean())
    priced = dict(zip(names, prices.tolist(), strict=True))
    return StepModel({FIXED: 0.0, **priced}, error)
