"""Tables and deviations of the laws' report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minifer.parcae.lab.laws.fits import mean_and_spread


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table; the first column is left-aligned."""
    lines = [f"| {' | '.join(headings)} |", f"|---|{'---:|' * (len(headings) - 1)}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def spread(values: Sequence[float], form: str = ".4f") -> str:
    """mean ± deviation over seeds; without ± for one."""
    mean, deviation = mean_and_spread([[value] for value in values])
    return plus_minus(float(mean[0]), float(deviation[0]), len(values), form)


def plus_minus(mean: float, deviation: float, seeds: int, form: str) -> str:
    """The same from numbers that are known. form: of `format`."""
    text = format(mean, form)
    return f"{text} ± {format(deviation, form)}" if seeds > 1 else text
