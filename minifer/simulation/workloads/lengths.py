"""How long prompts and answers are, together: two lognormals that move with each other.

::

    z, e ~ normal                 two independent draws
    prompt = F_prompt(z)          each length has its own distribution …
    output = F_output(r·z + √(1 − r²)·e)     … and a long prompt tends to have a long answer

A Gaussian copula: the correlation r is between the logarithms, and the two distributions stay what
they are whatever it is. It matters: memory is held for (prompt + output) · output token-seconds,
whose mean independent lengths underestimate.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

_MAX_REFUSED = 100_000  # draws in a row that do not fit into max_total


@dataclass(frozen=True)
class Lognormal:
    """A positive number whose natural logarithm is normal, kept within [least, most].

    Raises `ValueError` for a negative sigma or an empty range.
    """

    mu: float
    sigma: float
    least: float = 0.0
    most: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.sigma < math.inf or not math.isfinite(self.mu):
            raise ValueError(f"sigma must be at least 0, mu finite, got {self.sigma} and {self.mu}")
        if not 0 <= self.least <= self.most:
            raise ValueError(f"least must be in [0, most={self.most}], got {self.least}")

    @classmethod
    def of_quantiles(cls, p50: float, p90: float, **limits: float) -> Lognormal:
        """The one with this median and this 90th percentile."""
        return cls(math.log(p50), math.log(p90 / p50) / _Z90, **limits)

    @classmethod
    def constant(cls, value: float) -> Lognormal:
        return cls(math.log(value), 0.0)

    def at(self, z: float) -> float:
        """The value that a standard normal has `z` standard deviations from its mean."""
        return min(max(math.exp(self.mu + self.sigma * z), self.least), self.most)

    def draw(self, rng: random.Random) -> float:
        return self.at(rng.gauss(0.0, 1.0))

    def draw_length(self, rng: random.Random) -> int:
        """A whole number of tokens, at least 1."""
        return max(1, round(self.draw(rng)))

    def cdf(self, x: float) -> float:
        """P(value ≤ x), limits left aside."""
        if x <= 0:
            return 0.0
        if self.sigma == 0:
            return float(math.log(x) >= self.mu)
        return 0.5 * math.erfc((self.mu - math.log(x)) / (self.sigma * math.sqrt(2)))

    @property
    def mean(self) -> float:
        """Limits left aside: e^(μ + σ²/2)."""
        return math.exp(self.mu + self.sigma**2 / 2)


_Z90 = 1.2815515655446004  # 90th percentile of the standard normal


@dataclass(frozen=True)
class Lengths:
    """Prompt and output in tokens. correlation: of their logarithms, in [−1, 1].

    max_total: a pair whose sum is above it is drawn again, as one cuts a trace to what a model can
    take. That changes both distributions and their correlation.
    """

    prompt: Lognormal
    output: Lognormal
    correlation: float = 0.0
    max_total: int | None = None

    def __post_init__(self) -> None:
        if not -1 <= self.correlation <= 1:
            raise ValueError(f"correlation must be in [-1, 1], got {self.correlation}")

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """One pair. Raises `ValueError` when next to nothing fits into max_total."""
        for _ in range(_MAX_REFUSED):
            pair = self.pair(rng.gauss(0.0, 1.0), rng.gauss(0.0, 1.0))
            if self.max_total is None or sum(pair) <= self.max_total:
                return pair
        raise ValueError(
            f"max_total={self.max_total} leaves none of {_MAX_REFUSED} pairs of lengths: raise it"
        )

    def pair(self, z: float, e: float) -> tuple[int, int]:
        """The pair at two independent normal scores, of the prompt and of the rest."""
        r = self.correlation
        other = r * z + math.sqrt(1 - r * r) * e
        return max(1, round(self.prompt.at(z))), max(1, round(self.output.at(other)))
