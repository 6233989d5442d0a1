"""How the loss of a trained loop model falls with the number of loops it is run with.

A pure loop (no prelude, one core layer, no coda: with them, characters need no depth) is trained on
the help topics for 250 steps, with its depth drawn in one of three ways, and its validation loss is
taken at T = 1 … 24. The published law is L(T) = L∞ + Z exp(−zT), with z ∝ 1/μ
(https://arxiv.org/abs/2604.12946, section 5.3 and appendix O); here it is compared with two power
laws, on all depths and, fitted on T ≤ μ alone, on those beyond.

What a toy can show, with its seeds: which form fits, whether z μ is constant, and what happens to a
model that is looped on past the depths it was trained with. It cannot show the law's size.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from minifer.parcae.lab.data import help_topics, sample_rows
from minifer.parcae.lab.laws.fits import CurveFit, beyond_error, fit_curve, huber, mean_and_spread
from minifer.parcae.lab.models import lab_model
from minifer.parcae.model import Parcae
from minifer.parcae.monitor import loss_by_depth
from minifer.parcae.train import Recipe, train

DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24)
COMPARED = ("exponential", "shifted power", "power")
SETTINGS = (
    ("poisson", 2),
    ("poisson", 4),
    ("poisson", 8),
    ("poisson", 12),
    ("poisson-batch", 8),
    ("constant", 8),
    ("constant", 4),
    ("constant", 2),
)
LENGTH, ROWS, VALIDATION_ROWS = 32, 8, 256
corpus = cache(help_topics)  # once a process


@dataclass(frozen=True)
class DepthJob:
    """One training. depth: how depths are drawn (`minifer.parcae.depth`); mu: their mean."""

    depth: str
    mu: int
    seed: int
    steps: int = 250


@dataclass(frozen=True)
class DepthCurve:
    """losses: nats a token at each of `DEPTHS`, on validation text. cpu_seconds: of the process."""

    job: DepthJob
    losses: tuple[float, ...]
    cpu_seconds: float


def jobs(
    settings: Iterable[tuple[str, int]] = SETTINGS,
    seeds: Sequence[int] = (0, 1, 2),
    steps: int = 250,
) -> list[DepthJob]:
    """Every setting (how depth is drawn, μ) with every seed."""
    return [
        DepthJob(depth, mu, seed, steps) for (depth, mu), seed in itertools.product(settings, seeds)
    ]


def run(job: DepthJob) -> DepthCurve:
    """Train, then read the model out at every depth."""
    start = time.process_time()
    text = corpus()
    model = lab_model(
        text.num_symbols,
        layers=(0, 1, 0),
        length=LENGTH,
        mean_recurrence=job.mu,
        seed=job.seed,
    )
    recipe = Recipe(
        steps=job.steps,
        rows=ROWS,
        length=LENGTH,
        learning_rate=1e-2,
        mean_recurrence=job.mu,
        depth=job.depth,
        seed=job.seed,
    )
    train(model, lambda g: sample_rows(text.train, ROWS, LENGTH, g), recipe)
    losses = validation_losses(model, DEPTHS)
    return DepthCurve(job, losses, time.process_time() - start)


def validation_losses(model: Parcae, depths: Sequence[int]) -> tuple[float, ...]:
    """Nats a token at each depth, from h₀ = 0, on the same rows for every model."""
    rows = sample_rows(
        corpus().validation, VALIDATION_ROWS, LENGTH, torch.Generator().manual_seed(7)
    )
    found = loss_by_depth(model, rows, depths)
    return tuple(found[depth] for depth in depths)


# -- what the curves say


@dataclass(frozen=True)
class FormFit:
    """A form fitted to one curve. huber: of log residuals, × 1e-7, as the published table's.

    seen: the fit on T ≤ μ alone; beyond: its largest error in nats at T > μ. None where fewer
    than 4 depths are seen, or none is beyond.
    """

    fit: CurveFit
    huber: float
    seen: CurveFit | None
    beyond: float | None


def fit_forms(curve: DepthCurve, forms: Sequence[str] = COMPARED) -> dict[str, FormFit]:
    """Each form on one curve."""
    found, mu = {}, curve.job.mu
    inside = sum(depth <= mu for depth in DEPTHS)  # they ascend
    for form in forms:
        fit = fit_curve(DEPTHS, curve.losses, form)
        seen, beyond = None, None
        if 4 <= inside < len(DEPTHS):
            seen = fit_curve(DEPTHS[:inside], curve.losses[:inside], form)
            beyond = beyond_error(DEPTHS, curve.losses, form, mu)[0]
        found[form] = FormFit(fit, 1e7 * huber(fit, DEPTHS, curve.losses), seen, beyond)
    return found


@dataclass(frozen=True)
class Group:
    """The seeds of one setting. spread: standard deviation over seeds.

    best: the depth of the lowest mean loss. overshoot: mean over seeds of L(24) − min L, in nats:
    what is lost by looping on; overshoot_spread: its deviation.
    """

    depth: str
    mu: int
    seeds: tuple[int, ...]
    mean: tuple[float, ...]
    spread: tuple[float, ...]
    best: int
    overshoot: float
    overshoot_spread: float


def group(curves: Sequence[DepthCurve]) -> list[Group]:
    """One a setting, in the order in which they come."""
    settings = dict.fromkeys((curve.job.depth, curve.job.mu) for curve in curves)
    groups = []
    for depth, mu in settings:
        own = [curve for curve in curves if (curve.job.depth, curve.job.mu) == (depth, mu)]
        mean, spread = mean_and_spread([curve.losses for curve in own])
        over, over_spread = mean_and_spread([[c.losses[-1] - min(c.losses)] for c in own])
        groups.append(
            Group(
                depth,
                mu,
                tuple(curve.job.seed for curve in own),
                tuple(mean.tolist()),
                tuple(spread.tolist()),
                DEPTHS[int(np.argmin(mean))],
                float(over[0]),
                float(over_spread[0]),
            )
        )
    return groups
