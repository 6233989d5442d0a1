"""Comparisons whose failure a learner can act on: what was tried, what came, what was expected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import Tensor

_LONGEST = 600  # characters of a value in a message


def compare(got: Any, expected: Any, tried: str, *, atol: float = 0.0, rtol: float = 0.0) -> None:
    """Raise `AssertionError` unless `got` equals `expected`, in type, shape and value.

    tried: the call, as the learner would write it: "slot_mapping(table=[3, 1], start=5, end=9)".
    atol, rtol: for floats and float tensors; the default is exact. A tensor must be finite where
    the expected one is; an expected NaN is an error of the test. Lists and tuples are the same
    kind of thing, bools and ints are not.
    """
    problem = _difference(got, expected, atol, rtol)
    if problem:
        raise AssertionError(
            f"tried     {tried}\ngot       {_short(got)}\nexpected  {_short(expected)}\n{problem}"
        )


@contextmanager
def unchanged(tried: str, **inputs: Any) -> Iterator[None]:
    """Raise `AssertionError` when the block changes one of the named inputs."""
    before = deepcopy(inputs)
    yield
    for name, value in inputs.items():
        if _difference(value, before[name], 0.0, 0.0):
            raise AssertionError(
                f"tried     {tried}\ninput {name} must not be changed\n"
                f"was       {_short(before[name])}\nis now    {_short(value)}"
            )


def _difference(got: Any, expected: Any, atol: float, rtol: float) -> str:
    """What differs, "" for nothing."""
    if isinstance(expected, Tensor):
        return _tensor_difference(got, expected, atol, rtol)
    if isinstance(expected, (list, tuple)):
        if not isinstance(got, (list, tuple)):
            return f"expected a list or tuple, got {type(got).__name__}"
        if len(got) != len(expected):
            return f"expected {len(expected)} items, got {len(got)}"
        for index, (a, b) in enumerate(zip(got, expected, strict=True)):
            if problem := _difference(a, b, atol, rtol):
                return f"item {index}: {problem}"
        return ""
    if isinstance(expected, dict):
        if not isinstance(got, dict) or got.keys() != expected.keys():
            return "the keys differ"
        for key, value in expected.items():
            if problem := _difference(got[key], value, atol, rtol):
                return f"key {key!r}: {problem}"
        return ""
    if isinstance(expected, float) and isinstance(got, (int, float)) and not isinstance(got, bool):
        if expected != expected:
            raise ValueError("the expected value of a test must not be NaN")
        within = abs(got - expected) <= atol + rtol * abs(expected)
        return "" if got == expected or within else f"expected {expected!r}, got {got!r}"
    if isinstance(expected, (bool, int)) and type(got) is not type(expected):
        return f"expected {type(expected).__name__}, got {type(got).__name__}"
    return "" if got == expected else f"expected {_short(expected)}, got {_short(got)}"


def _tensor_difference(got: Any, expected: Tensor, atol: float, rtol: float) -> str:
    if not isinstance(got, Tensor):
        return f"expected a tensor, got {type(got).__name__}"
    if got.shape != expected.shape:
        return f"expected shape {list(expected.shape)}, got {list(got.shape)}"
    if not expected.is_floating_point():
        if got.dtype != expected.dtype:
            return f"expected {expected.dtype}, got {got.dtype}"
        wrong = got != expected
    else:
        if expected.isnan().any():
            raise ValueError("the expected tensor of a test must not hold NaN")
        if not got.is_floating_point():
            return f"expected floating-point numbers, got {got.dtype}"
        a, b = got.detach().double(), expected.double()
        if (a.isnan()).any():
            return f"{int(a.isnan().sum())} of {a.numel()} numbers are NaN"
        wrong = ~((a == b) | ((a - b).abs() <= atol + rtol * b.abs()))
    if not wrong.any():
        return ""
    first = [int(i) for i in wrong.nonzero()[0]]
    return f"{int(wrong.sum())} of {wrong.numel()} numbers differ, the first at {first}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} … ({len(text)} characters)"
