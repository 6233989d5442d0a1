"""The task that needs depth, learned from several seeds: who is right after how many loops?

`minifer.parcae.lab.tasks` makes the task and trains on it. Here one model a seed is read out at
every depth; a question of k hops should be answered from about k loops on, and stay answered.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from minifer.parcae.lab.laws.fits import mean_and_spread
from minifer.parcae.lab.tasks import RECIPE, accuracy_by_depth, train_task

DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 24)
# The share of right answers from which a question counts as solved: a choice. Guessing has 1/6.
RIGHT = 0.5
NEARLY_ALL = 0.95  # a harder choice, beside it


@dataclass(frozen=True)
class TaskJob:
    """One training. steps: None for the task's own recipe."""

    seed: int
    steps: int | None = None


@dataclass(frozen=True)
class TaskResult:
    """accuracy: [depths][hops], the share of right answers at each of `DEPTHS`."""

    job: TaskJob
    accuracy: tuple[tuple[float, ...], ...]
    cpu_seconds: float


def run(job: TaskJob) -> TaskResult:
    """Train, then read the model out at every depth."""
    start = time.process_time()
    recipe = replace(RECIPE, seed=job.seed, steps=job.steps or RECIPE.steps)
    found = accuracy_by_depth(train_task(recipe), DEPTHS, length=recipe.length)
    accuracy = tuple(tuple(found[depth]) for depth in DEPTHS)
    return TaskResult(job, accuracy, time.process_time() - start)


@dataclass(frozen=True)
class TaskSummary:
    """mean, spread: [depths][hops] over seeds. solved_from, nearly_all_from: hops → the least of
    `DEPTHS` from which the mean stays at `RIGHT` or above, `NEARLY_ALL` or above; None if there
    is none."""

    seeds: tuple[int, ...]
    mean: tuple[tuple[float, ...], ...]
    spread: tuple[tuple[float, ...], ...]
    solved_from: tuple[int | None, ...]
    nearly_all_from: tuple[int | None, ...]


def summarise(results: Sequence[TaskResult]) -> TaskSummary:
    """All seeds together."""
    mean, spread = mean_and_spread([result.accuracy for result in results])
    return TaskSummary(
        tuple(result.job.seed for result in results),
        tuple(map(tuple, mean.tolist())),
        tuple(map(tuple, spread.tolist())),
        _stays_from(mean, RIGHT),
        _stays_from(mean, NEARLY_ALL),
    )


def _stays_from(mean: np.ndarray, share: float) -> tuple[int | None, ...]:
    """mean [depths, hops] → by hops, the least depth from which all are at least `share`."""
    found: list[int | None] = []
    for column in (mean >= share).T:  # one number of hops
        below = np.flatnonzero(~column)
        first = int(below[-1]) + 1 if len(below) else 0
        found.append(DEPTHS[first] if first < len(DEPTHS) else None)
    return tuple(found)
