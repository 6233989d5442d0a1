"""Fits find the parameters that a curve was made from, and the best ones where it was not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from minifer.parcae.lab.laws.fits import (
    FORMS,
    LogParabola,
    beyond_error,
    fit_curve,
    fit_log_parabola,
    fit_power_law,
    huber,
    mean_and_spread,
)

DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24)
# Each form written out, from (T, L∞, Z, z): no code of the module
CURVES = {
    "exponential": lambda T, floor, scale, z: floor + scale * math.exp(-z * T),
    "shifted power": lambda T, floor, scale, z: floor + scale / (1 + T) ** z,
    "power": lambda T, floor, scale, z: floor + scale / T**z,
    "power without floor": lambda T, floor, scale, z: scale / T**z,
}

# Measured: lab.laws.depth_law.run(DepthJob("poisson", 8, seed=2)), a pure loop of width 32 after
# 250 steps; 2026-11-29, torch 2.13.0+cpu, Intel Xeon, one thread. Nats a token.
MEASURED = (2.4771, 2.2952, 2.199, 2.1789, 2.1761, 2.174, 2.1743, 2.1746, 2.1749, 2.175, 2.1751)


def curve(form: str, floor: float, scale: float, z: float) -> list[float]:
    return [CURVES[form](T, floor, scale, z) for T in DEPTHS]


@pytest.mark.parametrize("z", [0.05, 0.31, 1.07, 2.9])
@pytest.mark.parametrize("scale", [0.7, -0.2])
@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_recovered_from_its_own_curve(form: str, scale: float, z: float) -> None:
    floor = 0.0 if form == "power without floor" else 2.2
    fit = fit_curve(DEPTHS, curve(form, floor, scale, z), form)
    assert (fit.floor, fit.scale, fit.z) == pytest.approx((floor, scale, z), rel=1e-8)
    assert fit.rmse < 1e-12
    assert fit(DEPTHS) == pytest.approx(curve(form, floor, scale, z), abs=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_no_neighbour_of_a_noisy_fit_is_better(form: str) -> None:
    losses = np.array(curve("exponential", 2.2, 0.9, 0.5))
    losses += np.random.default_rng(3).normal(0, 0.02, len(DEPTHS))
    fit = fit_curve(DEPTHS, losses, form)
    moves = (0.99, 1.0, 1.01)
    around = [
        [CURVES[form](T, fit.floor * a, fit.scale * b, fit.z * c) for T in DEPTHS]
        for a in moves
        for b in moves
        for c in moves
    ]
    rmse = [math.sqrt(np.mean((losses - values) ** 2)) for values in around]
    assert min(rmse) == pytest.approx(fit.rmse, rel=1e-9)


def test_a_fit_on_shallow_depths_extrapolates_its_own_form_and_no_other() -> None:
    losses = curve("exponential", 2.2, 0.9, 0.5)
    assert beyond_error(DEPTHS, losses, "exponential", 8)[0] < 1e-10
    largest, root = beyond_error(DEPTHS, losses, "power", 8)
    assert largest >= root > 0.02


def test_the_exponential_beats_both_power_laws_on_a_measured_curve() -> None:
    fits = {form: fit_curve(DEPTHS, MEASURED, form) for form in CURVES}
    assert fits["exponential"].rmse == pytest.approx(0.0062, abs=1e-4)
    assert fits["exponential"].rmse < fits["shifted power"].rmse < fits["power"].rmse
    assert fits["power"].rmse < fits["power without floor"].rmse
    beyond = {form: beyond_error(DEPTHS, MEASURED, form, 8)[0] for form in CURVES}
    assert 2 * beyond["exponential"] < beyond["shifted power"] < beyond["power"]
    assert fits["exponential"].determined
    assert 8 * fits["exponential"].z == pytest.approx(8.2, abs=0.1)  # z μ


def test_huber_is_quadratic_below_delta_and_linear_above() -> None:
    fit = fit_curve(DEPTHS, curve("exponential", 2.0, 0.5, 0.4))
    predicted = fit(DEPTHS)
    assert huber(fit, DEPTHS, predicted * math.exp(5e-4)) == pytest.approx(0.5 * 5e-4**2)
    assert huber(fit, DEPTHS, predicted * math.exp(-4e-3)) == pytest.approx(1e-3 * 3.5e-3)


def test_a_power_law_is_recovered() -> None:
    x = np.array([1e18, 2e18, 8e18, 64e18])
    law = fit_power_law(x, 3e-8 * x**0.4)
    assert (law.coefficient, law.exponent) == pytest.approx((3e-8, 0.4), rel=1e-9)
    assert law(1e19) == pytest.approx(3e-8 * 1e19**0.4)


def test_a_parabola_in_log_depth_is_recovered_and_says_if_it_has_a_minimum() -> None:
    x = np.array([1.0, 2.0, 4.0, 8.0])

    def y(best: float, curvature: float) -> LogParabola:
        return fit_log_parabola(x, 2.5 + curvature * np.log(x / best) ** 2)

    found = y(3.0, 0.1)
    assert (found.best, found.lowest, found.curvature) == pytest.approx((3.0, 2.5, 0.1))
    assert found.inside and found.rmse < 1e-12
    assert found(6.0) == pytest.approx(2.5 + 0.1 * math.log(2) ** 2)
    assert not y(0.5, 0.1).inside  # falls towards what was not tried
    assert not y(16.0, 0.1).inside
    assert not y(3.0, -0.1).inside  # a maximum


def test_spread_is_the_deviation_over_seeds() -> None:
    mean, spread = mean_and_spread([[1.0, 5.0], [3.0, 5.0], [2.0, 5.0]])
    assert mean.tolist() == [2.0, 5.0] and spread.tolist() == [1.0, 0.0]
    assert mean_and_spread([[1.0, 2.0]])[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: fit_curve(DEPTHS, [2.0] * 11, "spline"), "form must be one of exponential"),
        (lambda: fit_curve([1, 2], [3.0, 2.0]), "depths must hold at least 3 different"),
        (lambda: fit_curve([1, 1, 2], [3.0, 3.0, 2.0]), "depths must hold at least 3 different"),
        (lambda: fit_curve([0, 1, 2], [3.0, 2.0, 1.0]), "depths must be at least 1, got 0"),
        (lambda: fit_curve([1, 2, 3], [3.0, math.nan, 1.0]), "must be finite"),
        (lambda: fit_curve([1, 2, 3], [3.0, 1.0]), "two lists of one length"),
        (lambda: beyond_error(DEPTHS, [2.0] * 11, "power", 24), "seen must be below"),
        (lambda: fit_power_law([1, 2], [0.0, 1.0]), "must be above 0"),
        (lambda: fit_log_parabola([0, 1, 2], [1.0, 2.0, 3.0]), "x must be above 0"),
        (lambda: fit_log_parabola([1, 2, 4], [1.0, 2.0, 3.0]), "straight line"),
    ],
)
def test_what_cannot_be_fitted_is_refused(call: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        call()  # type: ignore[operator]
