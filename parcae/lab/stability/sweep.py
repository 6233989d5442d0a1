"""Three injections, four learning rates, several seeds: who keeps ρ below 1, and what follows.

Each run trains a model of width 32 with layers 1/2/1 and a mean depth of 8 for 120 steps on the
help topics, then lets it loop on validation text and compares every state with its bound. Parcae
has a norm after the prelude, the baselines as published have none. As that norm bounds e by itself,
the diagonal injection runs without it too, and concat with it.

What to expect, and what not, is in `stability`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minifer.parcae.lab.data import sample_rows
from minifer.parcae.lab.models import lab_model
from minifer.parcae.lab.stability.forced import (
    BoundCheck,
    check_bound,
    text,
    trace,
    validation_rows,
)
from minifer.parcae.train import Recipe, StepRecord, train

LEARNING_RATES = (1e-3, 1e-2, 3e-2, 1e-1)
SEEDS = (0, 1, 2)
STEPS = 120
LOOPS = 8  # the mean depth of training, and the depth of the numbers on validation text
BOUND_LOOPS = 32  # how far the bound is followed
TAIL = 20  # steps whose loss is averaged


@dataclass(frozen=True)
class Arm:
    """An injection, with a norm after the prelude or without."""

    injection: str
    prelude_norm: bool

    @property
    def name(self) -> str:
        """The injection; what differs from its paper is said."""
        if self in PUBLISHED:
            return self.injection
        return self.injection + (" + norm" if self.prelude_norm else " − norm")


PUBLISHED = (Arm("diagonal", True), Arm("concat", False), Arm("add", False))
ISOLATED = (Arm("diagonal", False), Arm("concat", True))
ISOLATED_RATES = LEARNING_RATES[2:]


@dataclass(frozen=True)
class Run:
    """One training run."""

    arm: Arm
    learning_rate: float
    seed: int
    steps: int = STEPS


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    loss: mean of the last 20 training losses, nats a character. rho: at the end; max_rho: over all
    steps. state_norm, relative_residual: mean ‖h_8‖ of validation text, and that of the last
    iteration over it. last_state_norm, max_state_norm: mean ‖h_T‖ of the last training batch, and
    the largest of all. check: the bound on validation text. records: every step.
    """

    run: Run
    loss: float
    rho: float
    max_rho: float
    state_norm: float
    relative_residual: float
    last_state_norm: float
    last_relative_residual: float
    max_state_norm: float
    check: BoundCheck
    records: tuple[StepRecord, ...]


def plan(
    arms: Sequence[Arm],
    learning_rates: Sequence[float],
    seeds: Sequence[int] = SEEDS,
    steps: int = STEPS,
) -> list[Run]:
    """Every combination. Raises `ValueError` for a list that is empty or holds a bad value."""
    for name, values in (("arms", arms), ("learning_rates", learning_rates), ("seeds", seeds)):
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name} must name at least one, each once, got {list(values)}")
    if bad := [rate for rate in learning_rates if not 0 < rate < math.inf]:
        raise ValueError(f"learning_rates must be above 0 and finite, got {bad[0]}")
    if bad_seeds := [seed for seed in seeds if not 0 <= seed < 2**31]:
        raise ValueError(f"seeds must be 0 to {2**31 - 1}, got {bad_seeds[0]}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    return [Run(*run, steps) for run in itertools.product(arms, learning_rates, seeds)]


def full_plan(seeds: Sequence[int] = SEEDS, steps: int = STEPS) -> list[Run]:
    """The published arms at every learning rate, the isolated ones at the two highest."""
    return plan(PUBLISHED, LEARNING_RATES, seeds, steps) + plan(
        ISOLATED, ISOLATED_RATES, seeds, steps
    )


def quick_plan(seeds: Sequence[int] = SEEDS[:1], steps: int = STEPS // 3) -> list[Run]:
    """A look in seconds: the published arms at two learning rates."""
    return plan(PUBLISHED, (LEARNING_RATES[1], LEARNING_RATES[3]), seeds, steps)


def train_run(run: Run) -> Outcome:
    """Train, then look. On one thread the same run gives the same numbers on the same machine."""
    corpus = text()
    model = lab_model(
        corpus.num_symbols,
        injection=run.arm.injection,
        prelude_norm=run.arm.prelude_norm,
        mean_recurrence=LOOPS,
        seed=run.seed,
    )
    recipe = Recipe(
        steps=run.steps, learning_rate=run.learning_rate, mean_recurrence=LOOPS, seed=run.seed
    )

    def batches(generator: torch.Generator) -> Tensor:
        return sample_rows(corpus.train, recipe.rows, recipe.length, generator)

    records = train(model, batches, recipe)
    start = torch.Generator().manual_seed(run.seed)
    seen = trace(model, validation_rows(4, seed=run.seed), BOUND_LOOPS, start)
    loops = min(LOOPS, seen.num_loops)
    rho = model.adapter.spectral_radius()
    tail = [record.loss for record in records[-TAIL:]]
    return Outcome(
        run=run,
        loss=sum(tail) / len(tail),
        rho=rho,
        max_rho=max(rho, *(record.rho for record in records)),
        state_norm=float(seen.state[loops].mean()),
        relative_residual=seen.relative_residual(loops),
        last_state_norm=records[-1].state_norm,
        last_relative_residual=records[-1].relative_residual,
        max_state_norm=max(record.state_norm for record in records),
        check=check_bound(model, seen),
        records=tuple(records),
    )
