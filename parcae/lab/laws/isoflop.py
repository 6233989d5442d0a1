"""A budget of FLOPs, spent on more loops or on more tokens: an experiment sized in minutes.

For each budget C and mean depth μ the number of steps is what C pays for, so that a deeper model
sees fewer tokens; the validation loss at T = μ is taken, a parabola in log μ is laid through a
budget's losses, and its lowest point is μ*(C) (the published protocol: https://arxiv.org/abs/2604.12946,
section 5.2 and appendix K, on budgets 10⁸ times as large).

**Noisy, and no scaling law.** The model has 17 thousand parameters, the text is characters, three
budgets span a factor of 4, and seeds differ by as much as depths. It shows the protocol and what
such a curve looks like; what comes out is reported, also when a parabola has no minimum inside.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from minifer.parcae.lab.data import sample_rows
from minifer.parcae.lab.laws.depth_law import LENGTH, ROWS, corpus, validation_losses
from minifer.parcae.lab.laws.fits import (
    LogParabola,
    PowerLaw,
    fit_log_parabola,
    fit_power_law,
    mean_and_spread,
)
from minifer.parcae.lab.laws.flops import training_flops
from minifer.parcae.lab.models import lab_model
from minifer.parcae.model import Parcae
from minifer.parcae.train import Recipe, train

MUS = (1, 2, 4, 8)
BUDGETS = (5e9, 1e10, 2e10)  # FLOPs


@dataclass(frozen=True)
class IsoFlopJob:
    """One training: `budget` FLOPs at mean depth `mu` (1: a plain model of fixed depth)."""

    budget: float
    mu: int
    seed: int


@dataclass(frozen=True)
class IsoFlopPoint:
    """loss: nats a token at T = μ, on validation text. tokens: of training. flops: spent."""

    job: IsoFlopJob
    loss: float
    tokens: int
    flops: float
    cpu_seconds: float


def jobs(
    budgets: Sequence[float] = BUDGETS,
    mus: Sequence[int] = MUS,
    seeds: Sequence[int] = (0, 1, 2),
) -> list[IsoFlopJob]:
    """Every budget with every μ and seed. Raises `ValueError` for a budget below one step."""
    made = [IsoFlopJob(*values) for values in itertools.product(budgets, mus, seeds)]
    for job in made:
        num_steps(job)
    return made


def expected_loops(mu: int, max_backward: int) -> tuple[float, float]:
    """(mean loops, mean loops with gradient) of T = max(1, Poisson(μ)), k = min(T, max_backward).

    Neither is its nominal value: at μ = 2 the mean is 2.14. At μ = 1 the depth is fixed: (1, 1).
    """
    if mu == 1:
        return 1.0, 1.0
    mean = tracked = 0.0
    probability = math.exp(-mu)  # of n loops drawn
    for n in range(20 * mu + 40):
        T = max(1, n)
        mean += probability * T
        tracked += probability * min(T, max_backward)
        probability *= mu / (n + 1)
    return mean, tracked


def flops_per_token(mu: int) -> float:
    """Training FLOPs of a token at mean depth μ: what is done for rows that are still looping."""
    loops, tracked = expected_loops(mu, math.ceil(mu / 2))
    return training_flops(_model(mu, 0).config, loops, backward=tracked, hoisted=True)


def num_steps(job: IsoFlopJob) -> int:
    """Steps the budget pays for, rounded down."""
    steps = int(job.budget / (flops_per_token(job.mu) * ROWS * LENGTH))
    if steps < 1:
        raise ValueError(
            f"budget must pay for a step, {flops_per_token(job.mu) * ROWS * LENGTH:.3g} FLOPs at "
            f"mu={job.mu}, got {job.budget:g}"
        )
    return steps


def run(job: IsoFlopJob) -> IsoFlopPoint:
    """Train what the budget pays for. The learning rate falls over the last half."""
    start = time.process_time()
    text, steps = corpus(), num_steps(job)
    model = _model(job.mu, job.seed)
    recipe = Recipe(
        steps=steps,
        rows=ROWS,
        length=LENGTH,
        learning_rate=1e-2,
        cooldown=0.5,
        mean_recurrence=job.mu,
        depth="poisson" if job.mu > 1 else "constant",
        seed=job.seed,
    )
    train(model, lambda g: sample_rows(text.train, ROWS, LENGTH, g), recipe)
    loss = validation_losses(model, [job.mu])[0]
    tokens = steps * ROWS * LENGTH
    flops = tokens * flops_per_token(job.mu)
    return IsoFlopPoint(job, loss, tokens, flops, time.process_time() - start)


def _model(mu: int, seed: int) -> Parcae:
    symbols = corpus().num_symbols
    return lab_model(symbols, layers=(0, 1, 0), length=LENGTH, mean_recurrence=mu, seed=seed)


# -- what the points say


@dataclass(frozen=True)
class Budget:
    """One budget: mean and spread (over seeds) of the loss at each μ, tokens, and the parabola
    through the means; None with fewer than 3 depths."""

    budget: float
    mus: tuple[int, ...]
    mean: tuple[float, ...]
    spread: tuple[float, ...]
    tokens: tuple[int, ...]
    parabola: LogParabola | None

    @property
    def best(self) -> int:
        """The measured μ with the lowest mean loss."""
        return self.mus[self.mean.index(min(self.mean))]


def by_budget(points: Sequence[IsoFlopPoint]) -> list[Budget]:
    """Budgets ascending, μ ascending."""
    found = []
    for budget in sorted({point.job.budget for point in points}):
        own = [point for point in points if point.job.budget == budget]
        mus = tuple(sorted({point.job.mu for point in own}))
        columns = [[p for p in own if p.job.mu == mu] for mu in mus]
        stats = [mean_and_spread([[p.loss] for p in column]) for column in columns]
        mean = tuple(float(m[0]) for m, _ in stats)
        found.append(
            Budget(
                budget,
                mus,
                mean,
                tuple(float(s[0]) for _, s in stats),
                tuple(column[0].tokens for column in columns),
                fit_log_parabola(mus, mean) if len(mus) >= 3 else None,
            )
        )
    return found


def scaling(budgets: Sequence[Budget]) -> PowerLaw | None:
    """μ* ∝ C^p through the parabolas' minima; None unless every budget, of at least 2, has one
    inside its depths."""
    minima = [(b.budget, b.parabola.best) for b in budgets if b.parabola and b.parabola.inside]
    if len(minima) < max(2, len(budgets)):
        return None
    return fit_power_law([c for c, _ in minima], [mu for _, mu in minima])
