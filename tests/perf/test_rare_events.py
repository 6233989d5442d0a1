"""The arithmetic of rare events, against exact fractions and published values."""

from __future__ import annotations

from fractions import Fraction

import pytest

from minifer.perf.rare_events import rate_bound, trials_to_see


def test_f14_one_in_a_hundred_thousand_takes_three_hundred_thousand_trials() -> None:
    assert trials_to_see(1e-5) == trials_to_see(1e-5, 0.95) == 299_572


@pytest.mark.parametrize("rate", [Fraction(1, 2), Fraction(1, 10), Fraction(3, 100)])
@pytest.mark.parametrize("confidence", [Fraction(1, 2), Fraction(9, 10), Fraction(19, 20)])
def test_f14_it_is_the_smallest_number_of_trials(rate: Fraction, confidence: Fraction) -> None:
    n = trials_to_see(float(rate), float(confidence))
    assert 1 - (1 - rate) ** n >= confidence > 1 - (1 - rate) ** (n - 1)


def test_f14_the_rule_of_three() -> None:
    for n in (30, 500, 10_000, 299_572):
        assert rate_bound(n) == pytest.approx(3 / n, rel=0.05)
        assert rate_bound(n) < 3 / n
    assert rate_bound(1) == pytest.approx(0.95)
    assert rate_bound(500) == pytest.approx(0.0059736, abs=1e-7)


def test_f14_the_two_are_inverse() -> None:
    for n in (1, 7, 500, 299_572):
        bound = rate_bound(n)
        assert trials_to_see(bound * 1.000001) == n
        assert trials_to_see(bound * 0.999999) == n + 1


@pytest.mark.parametrize("value", [0, 1, -0.1, 1.5, float("nan")])
def test_f14_bad_values_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="rate must be between 0 and 1"):
        trials_to_see(value)
    with pytest.raises(ValueError, match="confidence must be between 0 and 1"):
        rate_bound(5, value)
    with pytest.raises(ValueError, match="num_trials must be an integer of at least 1"):
        rate_bound(0)
