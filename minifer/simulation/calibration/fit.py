"""An engine's own steps → prices the simulator can use.

Least squares of errors relative to what the fit itself says (`perf.step_model`, a few times over):
relative to what was measured, a step that took too long would count too little, and a noisy machine
would look faster than it is. What the log cannot tell from the rest has no price, and neither has
what came out below 0: nothing gets faster by more work.

A batch size that the log has decoding alone often enough gets its mean, whatever the prices say: on
a CPU the seconds of 1, 2, 3, 4 requests lie on no line (40, 69, 90, 72 ms of a small model on two
cores), and most steps are such steps. At the end one factor on the prices of all other steps makes
the sum of all steps what it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from minifer.perf.step_model import FIXED, fit_step_model
from minifer.simulation.calibration.step_log import LoggedStep
from minifer.simulation.steps.times import (
    DecodePrices,
    FittedSteps,
    PrefillPrices,
    StepTimes,
)

# What a step's time is a sum of, the most important first.
FEATURES = ("per_token", "per_row", "per_context", "per_square")
_ROUNDS = 6  # after which the prices stand still
_ENOUGH = 5  # steps that decode a batch of one size, to have a mean
_LEAST = 0.05  # of the median step: no error is divided by less


@dataclass(frozen=True)
class StepFit:
    """r2: share of the steps' variance that the model explains (1 where there is none). mape: mean
    absolute relative error. total: predicted ÷ measured, all steps together. left_out: feature →
    why it has no price."""

    steps: FittedSteps
    num_steps: int
    r2: float
    mape: float
    total: float
    left_out: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `steps.named.load_steps` reads the prices back."""
        rest = asdict(self)
        del rest["steps"]
        return {**self.steps.to_dict(), **rest}


@dataclass(frozen=True)
class StepErrors:
    """Of step times on steps: see `StepFit`."""

    r2: float
    mape: float
    total: float


def fit_steps(log: Sequence[LoggedStep], source: str = "") -> StepFit:
    """Prices from a log. Raises `ValueError` for a log of fewer than 2 steps, or a step that took
    no time."""
    steps = [step for step in log if step.chunks]
    if len(steps) < 2:
        raise ValueError(f"a fit needs at least 2 steps, got {len(steps)}")
    seconds = [step.seconds for step in steps]
    columns = features(steps)
    left_out = {}
    chosen = [FIXED]
    for name in FEATURES:
        if not any(columns[name]):
            left_out[name] = "the log has none"
        elif len(steps) <= len(chosen) + 1:
            left_out[name] = "the log has too few steps to check it"
        elif not _can_tell(columns, [*chosen, name], seconds):
            left_out[name] = "the log cannot tell it from the others"
        else:
            chosen.append(name)
    prices = _solve(columns, chosen, seconds)
    while len(chosen) > 1:
        worst = min(chosen, key=lambda name: prices[name] * sum(columns[name]))
        if prices[worst] >= 0:
            break
        chosen.remove(worst)  # what takes the most seconds off
        left_out[worst] = "its price came out below 0"
        prices = _solve(columns, chosen, seconds)
    fitted = _steps_of(prices, columns, seconds, source)
    errors = errors_of(fitted, steps)
    return StepFit(fitted, len(steps), **asdict(errors), left_out=left_out)


def _solve(
    columns: Mapping[str, Sequence[float]], names: Sequence[str], seconds: Sequence[float]
) -> dict[str, float]:
    """Prices of `names`; 0 of all others."""
    chosen = {name: columns[name] for name in names if name != FIXED}
    fixed = FIXED in names
    least = _LEAST * sorted(seconds)[len(seconds) // 2]
    prices = fit_step_model(chosen, seconds, fixed=fixed).prices
    for _ in range(_ROUNDS):
        predicted = [
            max(least, math.fsum(prices[name] * columns[name][i] for name in (FIXED, *chosen)))
            for i in range(len(seconds))
        ]
        prices = fit_step_model(chosen, seconds, fixed=fixed, relative_to=predicted).prices
    return {name: prices.get(name, 0.0) for name in (FIXED, *FEATURES)}


def features(steps: Sequence[LoggedStep]) -> dict[str, list[float]]:
    """One value a step of each of `FEATURES`, and of "fixed": what its price is multiplied by."""
    out: dict[str, list[float]] = {FIXED: [1.0] * len(steps), **{name: [] for name in FEATURES}}
    for step in steps:
        rows = [end for query, end in step.chunks if query == 1]
        chunks = [(query, end) for query, end in step.chunks if query > 1]
        out["per_token"].append(sum(query for query, _ in chunks))
        out["per_row"].append(len(rows))
        out["per_context"].append(sum(rows))
        out["per_square"].append(sum(query * (2 * end - query) for query, end in chunks))
    return out


def errors_of(times: StepTimes, steps: Sequence[LoggedStep]) -> StepErrors:
    """How well step times tell the steps of a log. Raises `ValueError` without steps."""
    steps = [step for step in steps if step.chunks]
    if not steps:
        raise ValueError("steps must hold at least one step, got none")
    measured = [step.seconds for step in steps]
    predicted = [times.seconds(step.chunks) for step in steps]
    mean = math.fsum(measured) / len(measured)
    spread = math.fsum((m - mean) ** 2 for m in measured)
    missed = math.fsum((p - m) ** 2 for p, m in zip(predicted, measured, strict=True))
    relative = math.fsum(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True))
    return StepErrors(
        1 - missed / spread if spread else 1.0,
        relative / len(measured),
        math.fsum(predicted) / math.fsum(measured),
    )


def _can_tell(
    columns: Mapping[str, Sequence[float]], names: Sequence[str], seconds: Sequence[float]
) -> bool:
    try:
        fit_step_model({name: columns[name] for name in names if name != FIXED}, seconds)
    except ValueError:
        if min(seconds) <= 0:
            raise
        return False
    return True


def _steps_of(
    prices: Mapping[str, float],
    columns: Mapping[str, Sequence[float]],
    seconds: Sequence[float],
    source: str,
) -> FittedSteps:
    """Prices with the factor that makes their sum right, and the means of decoding alone."""
    alone: dict[int, list[int]] = {}  # batch size → its steps
    for i, tokens in enumerate(columns["per_token"]):
        if not tokens:
            alone.setdefault(int(columns["per_row"][i]), []).append(i)
    alone = {size: found for size, found in sorted(alone.items()) if len(found) >= _ENOUGH}
    with_mean = {i for found in alone.values() for i in found}
    others = [i for i in range(len(seconds)) if i not in with_mean] or range(len(seconds))
    total = math.fsum(
        price * math.fsum(columns[name][i] for i in others) for name, price in prices.items()
    )
    factor = math.fsum(seconds[i] for i in others) / total
    get = {name: price * factor for name, price in prices.items()}
    context = columns["per_context"]
    means = tuple(
        (size, math.fsum(seconds[i] - get["per_context"] * context[i] for i in found) / len(found))
        for size, found in alone.items()
    )
    return FittedSteps(
        PrefillPrices(get[FIXED], get["per_token"], get["per_square"]),
        ((0, DecodePrices(get[FIXED], get["per_row"], get["per_context"])),),
        source,
        tuple((size, max(0.0, mean)) for size, mean in means),
    )
