"""Comparisons whose failure a learner can act on: what was tried, what came, what was expected."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from minifer.course.grading.plain import array_as_tensor, fields_of, name_of, plain, short


def compare(got: Any, expected: Any, tried: str, *, atol: float = 0.0, rtol: float = 0.0) -> None:
    """Raise `AssertionError` unless `got` equals `expected`, in type, shape and value.

    tried: the call, as the learner would write it: "slot_mapping(table=[3, 1], start=5, end=9)".
    atol, rtol: for floats and tensors of floats; the default is exact. A tensor must be finite
    where the expected one is. Of floats the width is free, of ints it is not: int32 is not int64.
    Lists and tuples are the same kind of thing; bools and ints, numbers and tensors are not.
    Dataclasses are compared by their fields, sets and dicts whatever their order. Subclasses are
    read as what they hold, whatever they say of themselves.

    An expected NaN is an error of the test: `ValueError`.
    """
    problem = _Comparison(atol, rtol).difference(got, expected)
    if problem:
        raise AssertionError(
            f"tried     {tried}\ngot       {short(got)}\nexpected  {short(expected)}\n{problem}"
        )


@contextmanager
def unchanged(tried: str, **inputs: Any) -> Iterator[None]:
    """Raise `AssertionError` when the block changes one of the named inputs.

    Bit for bit: a NaN that stays a NaN is unchanged. Objects are compared by their attributes.
    """
    before = {name: deepcopy(value) for name, value in inputs.items()}
    yield
    for name, value in inputs.items():
        if problem := _Comparison(identical=True).difference(value, before[name]):
            raise AssertionError(
                f"tried     {tried}\ninput {name} must not be changed: {problem}\n"
                f"was       {short(before[name])}\nis now    {short(value)}"
            )


@dataclass(frozen=True)
class _Comparison:
    """identical: NaN equals NaN, dtypes count, and other objects are looked into."""

    atol: float = 0.0
    rtol: float = 0.0
    identical: bool = False

    def difference(self, got: Any, expected: Any, seen: frozenset[int] = frozenset()) -> str:
        """What differs, in words; "" for nothing. seen: objects being looked into, by id."""
        as_array, expected_array = array_as_tensor(got), array_as_tensor(expected)
        if expected_array is not None:
            if as_array is None:
                return f"expected a numpy array, got {name_of(got)}"
            return self._tensors(as_array, expected_array)
        value, expected = plain(got), plain(expected)
        kind = type(expected)
        if kind is Tensor:
            if type(value) is not Tensor:
                return f"expected a tensor, got {name_of(got)}"
            return self._tensors(value, expected)
        if kind in (list, tuple):
            return self._sequences(got, value, expected, seen)
        if kind is dict:
            return self._dicts(got, value, expected, seen)
        if kind is set:
            return self._sets(got, value, expected)
        if kind is float:
            return self._floats(got, value, expected)
        if kind in (str, bytes):
            return _texts(got, value, expected)
        if kind in (bool, int, complex) or expected is None:
            if type(value) is not kind:
                return f"expected {name_of(expected)}, got {name_of(got)}{_remedy(got)}"
            return "" if value == expected else f"expected {expected!r}, got {value!r}"
        return self._objects(got, expected, seen)

    def _sequences(self, got: Any, value: Any, expected: Any, seen: frozenset[int]) -> str:
        if type(value) not in (list, tuple):
            return f"expected a {type(expected).__name__}, got {name_of(got)}"
        for index, (a, b) in enumerate(zip(value, expected, strict=False)):
            if problem := self.difference(a, b, seen):
                return _at(index, problem)
        if len(value) != len(expected):
            items = "item" if len(expected) == 1 else "items"
            return f"expected {len(expected)} {items}, got {len(value)}"
        return ""

    def _dicts(self, got: Any, value: Any, expected: Any, seen: frozenset[int]) -> str:
        if type(value) is not dict:
            return f"expected a dict, got {name_of(got)}"
        mine = {_key(key): key for key in value}
        wanted = {_key(key): key for key in expected}
        for key, name in wanted.items():
            if key not in mine:
                return f"the key {short(name)} is missing"
        for key, name in mine.items():
            if key not in wanted:
                return f"there should be no key {short(name)}"
        for key, name in wanted.items():
            if problem := self.difference(value[mine[key]], expected[name], seen):
                return f"key {short(name)}: {problem}"
        return ""

    def _sets(self, got: Any, value: Any, expected: Any) -> str:
        if type(value) is not set:
            return f"expected a set, got {name_of(got)}"
        mine = {_key(item): item for item in value}
        wanted = {_key(item): item for item in expected}
        if missing := [item for key, item in wanted.items() if key not in mine]:
            return f"{short(min(missing, key=repr))} is missing from the set"
        if extra := [item for key, item in mine.items() if key not in wanted]:
            return f"{short(min(extra, key=repr))} should not be in the set"
        return ""

    def _floats(self, got: Any, value: Any, expected: float) -> str:
        if self.identical and expected != expected:
            return "" if type(value) is float and value != value else f"was nan, is {value!r}"
        if expected != expected:
            raise ValueError("the expected value of a test must not be NaN")
        if type(value) not in (int, float):
            return f"expected a float, got {name_of(got)}{_remedy(got)}"
        if value == expected or abs(value - expected) <= self.atol + self.rtol * abs(expected):
            return ""
        return f"expected {expected!r}, got {value!r}"

    def _tensors(self, got: Tensor, expected: Tensor) -> str:
        if got.shape != expected.shape:
            return f"expected shape {list(expected.shape)}, got {list(got.shape)}"
        both_float = got.is_floating_point() and expected.is_floating_point()
        if got.dtype != expected.dtype and (self.identical or not both_float):
            return f"expected {expected.dtype}, got {got.dtype}"
        if got.is_meta or got.layout != expected.layout:
            return (
                f"expected numbers in a {expected.layout} tensor, got {got.layout} on {got.device}"
            )
        got, expected = got.cpu(), expected.cpu()
        if not both_float:
            return _first_wrong(got != expected, got, expected, exact=True)
        a, b = got.double(), expected.double()
        same = a == b
        if self.identical:
            same |= a.isnan() & b.isnan()
        elif b.isnan().any():
            raise ValueError("the expected tensor of a test must not hold NaN")
        else:
            wild = ~a.isfinite() & b.isfinite()
            if wild.any():
                first = [int(i) for i in wild.nonzero()[0]]
                value = a[wild][0].item()
                return f"{int(wild.sum())} of {a.numel()} numbers are {value}, the first at {first}"
            same |= (a - b).abs() <= self.atol + self.rtol * b.abs()
        return _first_wrong(~same, got, expected, exact=self.identical)

    def _objects(self, got: Any, expected: Any, seen: frozenset[int]) -> str:
        """Dataclasses by their fields; others by `==` of the expected one, of equal types only."""
        if got is expected or id(expected) in seen:
            return ""
        wanted, mine = fields_of(expected), fields_of(got)
        if wanted is not None:
            if mine is None or mine.keys() != wanted.keys():
                return f"expected {name_of(expected)}, got {name_of(got)}"
        elif type(got) is not type(expected):
            return f"expected {name_of(expected)}, got {name_of(got)}"
        elif self.identical and type(expected).__eq__ is object.__eq__:
            wanted, mine = getattr(expected, "__dict__", {}), getattr(got, "__dict__", {})
            if mine.keys() != wanted.keys():
                return "its attributes are others"
        else:
            return "" if expected == got else f"expected {short(expected)}, got {short(got)}"
        for name, value in wanted.items():
            assert mine is not None
            if problem := self.difference(mine[name], value, seen | {id(expected)}):
                return f"{name}: {problem}"
        return ""


def _at(index: int, problem: str) -> str:
    """Where in a sequence: "item 1: …", and of sequences in sequences "item [1][0]: …"."""
    inner = re.match(r"item (?:(\d+)|((?:\[\d+\])+)): ", problem)
    if inner is None:
        return f"item {index}: {problem}"
    place = inner[2] or f"[{inner[1]}]"
    return f"item [{index}]{place}: {problem[inner.end() :]}"


def _first_wrong(wrong: Tensor, got: Tensor, expected: Tensor, *, exact: bool) -> str:
    """How many numbers differ, which is the first, and how large the largest difference is."""
    if not wrong.any():
        return ""
    at = wrong.nonzero()[0]
    first = tuple(int(i) for i in at)
    text = (
        f"{int(wrong.sum())} of {wrong.numel()} numbers differ, the first at {list(first)}: "
        f"got {got[first].item()!r} instead of {expected[first].item()!r}"
    )
    if exact or not expected.is_floating_point():
        return text
    distance = (got.double() - expected.double())[wrong].abs()
    return f"{text}; the largest difference is {distance.max().item():.3g}"


def _texts(got: Any, value: Any, expected: Any) -> str:
    if type(value) is not type(expected):
        return f"expected {name_of(expected)}, got {name_of(got)}"
    if value == expected:
        return ""
    if len(expected) < 40 and len(value) < 40:
        return f"expected {expected!r}, got {value!r}"
    pairs = zip(value, expected, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(value), len(expected)))
    near = slice(max(0, at - 10), at + 20)
    return f"they differ from position {at} on: expected …{expected[near]!r}, got …{value[near]!r}"


def _key(key: Any) -> tuple[type, Any]:
    """A key that tells True from 1, and 1 from 1.0, as values are told apart."""
    key = plain(key)
    return type(key), tuple(_key(item) for item in key) if type(key) is tuple else key


def _remedy(got: Any) -> str:
    if type(got) is Tensor and got.numel() == 1:
        return " (use .item())"
    if isinstance(got, np.generic):
        return f" (use {'float' if isinstance(got, np.floating) else 'int'}(…))"
    return ""
