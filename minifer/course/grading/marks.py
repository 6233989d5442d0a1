"""What a test file says of its tests: exercise, points, and probes that tell mistakes apart."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
_EXERCISE = re.compile(r"\d{1,2}\.\d{1,2}")


@dataclass(frozen=True)
class Points:
    """Worth of one test. exercise: "4.3". hidden: not run by `check()` in a notebook."""

    exercise: str
    points: float
    hidden: bool = False


def points(
    exercise: str, points: float, *, hidden: bool = False
) -> Callable[[_Function], _Function]:
    """Mark a test as worth `points` of an exercise.

    Raises `ValueError` for an exercise that is not "N.M" or points not above 0.
    """
    _check_exercise(exercise)
    if not points > 0:
        raise ValueError(f"points must be above 0, got {points}")

    def mark(function: _Function) -> _Function:
        function.__dict__["grading_points"] = Points(exercise, points, hidden)
        return function

    return mark


def probe(exercise: str) -> Callable[[_Function], _Function]:
    """Mark `function(target)` as a probe: on fixed inputs it returns what the answer does.

    Not a test. What a probe returns (plain values, lists, tensors) is compared with what each known
    mistake returns; when all probes of the exercise agree with one, the learner is told which.
    """
    _check_exercise(exercise)

    def mark(function: _Function) -> _Function:
        function.__dict__["grading_probe"] = exercise
        return function

    return mark


def points_of(function: Callable[..., Any]) -> Points | None:
    return getattr(function, "grading_points", None)


def probe_of(function: Callable[..., Any]) -> str | None:
    return getattr(function, "grading_probe", None)


def _check_exercise(exercise: str) -> None:
    if not _EXERCISE.fullmatch(exercise):
        raise ValueError(f'exercise must look like "4.3", got {exercise!r}')
