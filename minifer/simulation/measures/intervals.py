"""How far a mean may be off, of values that come one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Interval:
    """low, high: where 95 % of the values lie that the run could have had."""

    value: float
    low: float
    high: float


def share_interval(met: Sequence[bool], seed: int = 0, *, level: float = 0.95) -> Interval:
    """Of a share, as `mean_interval`. All or none say nothing by being drawn again: then the other
    end is the share at which n independent values come out so once in 1 / (1 - level) times (about
    3 / n, the "rule of three")."""
    if len(set(met)) != 1:
        return mean_interval([float(one) for one in met], seed, level=level)
    edge = (1 - level) ** (1 / len(met))
    return Interval(1.0, edge, 1.0) if met[0] else Interval(0.0, 0.0, 1 - edge)


def mean_interval(
    values: Sequence[float], seed: int = 0, *, level: float = 0.95, resamples: int = 1_000
) -> Interval:
    """The mean, and its interval by bootstrap of blocks: requests that come one after the other
    share a queue, so √n neighbours are drawn together (Künsch 1989, "The jackknife and the
    bootstrap for general stationary observations", Annals of Statistics 17). Values in the order
    of arrival; raises `ValueError` for none."""
    if not len(values):
        raise ValueError("an interval needs at least one value, got none")
    data = np.asarray(values, dtype=np.float64)
    count = len(data)
    length = max(1, round(math.sqrt(count)))
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, count, size=(resamples, -(-count // length)))
    sums = np.concatenate([[0.0], np.cumsum(np.concatenate([data, data[:length]]))])
    means = (sums[starts + length] - sums[starts]).sum(axis=1) / (starts.shape[1] * length)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(data.mean()), float(low), float(high))
