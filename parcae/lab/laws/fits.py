"""Curves with two or three parameters through a few measured points: numpy, and no start values.

How the loss falls with the depth T of a trained loop model is fitted by

    L(T) = L∞ + Z · basis(T, z)

where the basis is exp(−zT), (1 + T)^−z or T^−z (https://arxiv.org/abs/2604.12946, section 5.3 and
appendix L). For a given z the other two follow by linear least squares, so the search has one
dimension: a grid over log z, refined around its best point. There is no optimiser that could end
in the wrong valley.

Power laws y = c · x^p are straight lines in logarithms; the minimum of a budget's losses over the
depth is a parabola's in log depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Form:
    """A way for a loss to fall with depth. floor: has it an L∞, or does it fall to 0?"""

    formula: str
    basis: Callable[[Array, float], Array]
    floor: bool = True


FORMS: Mapping[str, Form] = {
    "exponential": Form("L∞ + Z exp(−zT)", lambda T, z: np.exp(-z * T)),
    "shifted power": Form("L∞ + Z (1 + T)^−z", lambda T, z: (1 + T) ** -z),
    "power": Form("L∞ + Z T^−z", lambda T, z: T**-z),
    "power without floor": Form("Z T^−z", lambda T, z: T**-z, floor=False),
}
GRID = (1e-3, 10.0)  # z, per loop or as an exponent
HUBER_DELTA = 1e-3  # of the published fits, on log loss


@dataclass(frozen=True)
class CurveFit:
    """L(T) = floor + scale · basis(T, z). rmse: in the unit of the losses, over what was fitted."""

    form: str
    floor: float
    scale: float
    z: float
    rmse: float

    def __call__(self, depths: ArrayLike) -> Array:
        """depths [n] → losses [n]."""
        return self.floor + self.scale * FORMS[self.form].basis(_floats(depths), self.z)

    @property
    def determined(self) -> bool:
        """Does the curve fall, and at more than its first depth? Otherwise z means nothing: any
        large one fits a curve that is flat from T = 2 on."""
        first, second = FORMS[self.form].basis(np.array([1.0, 2.0]), self.z)
        return bool(self.scale > 0 and 0.02 < second / first < 0.98)


def fit_curve(depths: ArrayLike, losses: ArrayLike, form: str = "exponential") -> CurveFit:
    """The least-squares fit of a form to losses [n] at depths [n].

    Raises `ValueError` for an unknown form, for fewer points than the form has parameters, and
    for depths below 1 or losses that are not finite.
    """
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    T, L = _points(depths, losses, "depths", "losses", least=3 if FORMS[form].floor else 2)
    if T.min() < 1:
        raise ValueError(f"depths must be at least 1, got {T.min():g}")
    ends = low, high = math.log(GRID[0]), math.log(GRID[1])
    best = math.exp(low)
    for _ in range(10):  # each round looks 20 times closer, around the best so far
        candidates = np.append(np.exp(np.linspace(low, high, 121)), best)
        best = float(candidates[np.argmin(_errors(T, L, form, candidates))])
        half = (high - low) / 40
        low, high = max(ends[0], math.log(best) - half), min(ends[1], math.log(best) + half)
    return _solve(T, L, form, best)


def _errors(T: Array, L: Array, form: str, z: Array) -> Array:
    """Squared error of the best floor and scale at each z [n] → [n]: a regression on the basis."""
    x = np.stack([FORMS[form].basis(T, value) for value in z])
    y = np.broadcast_to(L, x.shape)
    if FORMS[form].floor:
        x, y = x - x.mean(axis=1, keepdims=True), y - L.mean()
    scale = (x * y).sum(axis=1) / (x * x).sum(axis=1)
    return ((scale[:, None] * x - y) ** 2).sum(axis=1)


def _solve(T: Array, L: Array, form: str, z: float) -> CurveFit:
    """Floor and scale for a given z."""
    column = FORMS[form].basis(T, z)
    columns = [column, np.ones_like(T)] if FORMS[form].floor else [column]
    design = np.stack(columns, axis=1)
    found = np.linalg.lstsq(design, L, rcond=None)[0]
    rmse = float(np.sqrt(np.mean((design @ found - L) ** 2)))
    return CurveFit(form, float(found[1]) if FORMS[form].floor else 0.0, float(found[0]), z, rmse)


def beyond_error(
    depths: ArrayLike, losses: ArrayLike, form: str, seen: float
) -> tuple[float, float]:
    """Fit on depths ≤ seen only. (largest absolute, root mean square) error at deeper ones.

    Raises `ValueError` as `fit_curve`, and where no depth is beyond `seen`.
    """
    T, L = _points(depths, losses, "depths", "losses", least=1)
    inside = seen >= T
    if inside.all():
        raise ValueError(f"seen must be below the largest depth {T.max():g}, got {seen:g}")
    error = fit_curve(T[inside], L[inside], form)(T[~inside]) - L[~inside]
    return float(np.abs(error).max()), float(np.sqrt(np.mean(error**2)))


def huber(fit: CurveFit, depths: ArrayLike, losses: ArrayLike, delta: float = HUBER_DELTA) -> float:
    """Mean Huber loss of log residuals: the unit of the published comparison of forms.

    Quadratic up to delta, linear beyond. Without a unit.
    """
    T, L = _points(depths, losses, "depths", "losses", least=1)
    predicted = fit(T)
    if predicted.min() <= 0 or L.min() <= 0:
        raise ValueError("losses, measured and fitted, must be above 0 to compare their logarithms")
    r = np.abs(np.log(predicted) - np.log(L))
    return float(np.mean(np.where(r <= delta, 0.5 * r**2, delta * (r - 0.5 * delta))))


@dataclass(frozen=True)
class PowerLaw:
    """y = coefficient · x^exponent. rmse: of log y."""

    coefficient: float
    exponent: float
    rmse: float

    def __call__(self, x: ArrayLike) -> Array:
        return self.coefficient * _floats(x) ** self.exponent


def fit_power_law(x: ArrayLike, y: ArrayLike) -> PowerLaw:
    """A straight line through (log x, log y) [n]. Raises `ValueError` for values of 0 or less."""
    X, Y = _points(x, y, "x", "y", least=2)
    if X.min() <= 0 or Y.min() <= 0:
        raise ValueError(f"x and y must be above 0, got {X.min():g} and {Y.min():g}")
    slope, start = np.polyfit(np.log(X), np.log(Y), 1)
    residual = start + slope * np.log(X) - np.log(Y)
    return PowerLaw(float(np.exp(start)), float(slope), float(np.sqrt(np.mean(residual**2))))


@dataclass(frozen=True)
class LogParabola:
    """y = lowest + curvature · (log x − log best)². inside: is `best` a minimum within the data?

    A budget whose losses only rise or only fall with depth has its vertex outside, or bends the
    wrong way: then `best` says nothing.
    """

    best: float
    lowest: float
    curvature: float
    rmse: float
    inside: bool

    def __call__(self, x: ArrayLike) -> Array:
        return self.lowest + self.curvature * (np.log(_floats(x)) - math.log(self.best)) ** 2


def fit_log_parabola(x: ArrayLike, y: ArrayLike) -> LogParabola:
    """A parabola in log x through points [n]. Raises `ValueError` for x of 0 or less, and for
    points on a straight line, which have no vertex."""
    X, Y = _points(x, y, "x", "y", least=3)
    if X.min() <= 0:
        raise ValueError(f"x must be above 0, got {X.min():g}")
    u = np.log(X)
    a, b, c = (float(value) for value in np.polyfit(u, Y, 2))
    if abs(a) <= 1e-12 * max(abs(b), abs(c), 1e-300):
        raise ValueError("y must bend over log x: a straight line has no vertex")
    vertex = -b / (2 * a)
    inside = a > 0 and u.min() < vertex < u.max()
    best = math.exp(min(max(vertex, -700.0), 700.0))  # a nearly straight line's is anywhere
    rmse = float(np.sqrt(np.mean((np.polyval((a, b, c), u) - Y) ** 2)))
    return LogParabola(best, c - b * b / (4 * a), a, rmse, bool(inside))


def mean_and_spread(rows: ArrayLike) -> tuple[Array, Array]:
    """[seeds, …] → mean […] and the standard deviation over seeds […] (n − 1; 0 for one seed)."""
    values = np.asarray(rows, dtype=np.float64)
    spread = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1:])
    return values.mean(axis=0), spread


def _floats(values: ArrayLike) -> Array:
    return np.asarray(values, dtype=np.float64)


def _points(
    x: ArrayLike, y: ArrayLike, x_name: str, y_name: str, least: int
) -> tuple[Array, Array]:
    X, Y = _floats(x), _floats(y)
    if X.ndim != 1 or X.shape != Y.shape:
        raise ValueError(
            f"{x_name} and {y_name} must be two lists of one length, got {X.shape} and {Y.shape}"
        )
    if len(np.unique(X)) < least:
        raise ValueError(f"{x_name} must hold at least {least} different values, got {X.tolist()}")
    if not (np.isfinite(X).all() and np.isfinite(Y).all()):
        raise ValueError(f"{x_name} and {y_name} must be finite, got {Y.tolist()}")
    return X, Y
