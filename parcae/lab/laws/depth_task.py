"""The task that needs depth, learned from several seeds: who is right after how many loops?

`minifer.parcae.lab.tasks` makes the task and trains on it. Here one model a seed is read out at
every depth; a question of k hops should be answered from about k loops on, and stay answered.

Not all of it can be: where a row begins with the same permutation twice, the second position
averages equal values, whatever the weights, and ends in the first one's state. With one hop that is
wrong in 1/6 · 5/6 of the rows (a ∘ a = a for the identity alone): once all first answers are
right, 31/36 of the second are the most.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from minifer.parcae.lab.laws.fits import mean_and_spread
from minifer.parcae.lab.tasks import RECIPE, accuracy_by_depth, train_task

DEPTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
RIGHT = 0.5  # the share of right answers that counts; guessing has 1/6


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
    """mean, spread: [depths][hops] over seeds. solved_from: hops → the least of `DEPTHS` from
    which the mean stays at `RIGHT` or above; None if there is none."""

    seeds: tuple[int, ...]
    mean: tuple[tuple[float, ...], ...]
    spread: tuple[tuple[float, ...], ...]
    solved_from: tuple[int | None, ...]


def summarise(results: Sequence[TaskResult]) -> TaskSummary:
    """All seeds together."""
    mean, spread = mean_and_spread([result.accuracy for result in results])
    solved: list[int | None] = []
    for column in (mean >= RIGHT).T:  # one number of hops
        wrong = np.flatnonzero(~column)
        first = int(wrong[-1]) + 1 if len(wrong) else 0
        solved.append(DEPTHS[first] if first < len(DEPTHS) else None)
    return TaskSummary(
        tuple(result.job.seed for result in results),
        tuple(map(tuple, mean.tolist())),
        tuple(map(tuple, spread.tolist())),
        tuple(solved),
    )
