"""When requests come: a gamma process (Poisson at burstiness 1), made from a seed alone."""

from __future__ import annotations

import itertools
import math
import random


def arrival_times(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds from the first request to each of `count`, in order.

    rate: requests a second on average; infinity: all at once. burstiness: shape k of the gamma
    distribution of the gaps, whose coefficient of variation is 1/√k: 1 is a Poisson process, less
    comes in bursts, more is more regular, infinity is a metronome (the parameter of `vllm bench
    serve`; the times are not stretched afterwards to end at count ÷ rate: that is no Poisson
    process).

    Raises `ValueError` for a rate or burstiness that is not above 0.
    """
    if not rate > 0:
        raise ValueError(f"request_rate must be above 0 requests/s, got {rate}")
    if not burstiness > 0:
        raise ValueError(f"burstiness must be above 0, got {burstiness}")
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(f"{seed}/arrivals")
    gaps = (_gap(rng, rate, burstiness) for _ in range(count - 1))
    return list(itertools.accumulate(gaps, initial=0.0))[:count]


def _gap(rng: random.Random, rate: float, burstiness: float) -> float:
    if math.isinf(burstiness):
        return 1 / rate
    return rng.gammavariate(burstiness, 1 / (rate * burstiness))
