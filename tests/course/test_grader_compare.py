"""`compare` and `unchanged`: what is equal, what is not, and the words for it."""

from __future__ import annotations

from collections import Counter, OrderedDict, namedtuple
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch

from minifer.course.grading import compare, unchanged

Pair = namedtuple("Pair", "a b")


@dataclass
class Point:
    x: int
    y: list[float]


@dataclass
class SamePoint:
    x: int
    y: list[float]


class Colour(Enum):
    RED = 1


class Liar:
    """Equal to everything, and whatever one asks of it."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return self

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return 2


class LyingInt(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


class LyingStr(str):
    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


class LyingList(list):  # type: ignore[type-arg]
    def __eq__(self, other: object) -> bool:
        return True

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Any:
        return iter([1, 2])


class LyingTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        return torch.zeros(())


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (3, 3),
        (3, 3.0),
        (np.float64(0.5), 0.5),
        (None, None),
        (True, True),
        ("ä", "ä"),
        (b"x", b"x"),
        ([1, (2, 3)], (1, [2, 3])),
        (Pair(1, 2), (1, 2)),
        (range(3), [0, 1, 2]),
        (OrderedDict(b=1, a=2), {"a": 2, "b": 1}),
        (Counter("aab"), {"a": 2, "b": 1}),
        (frozenset({1, 2}), {2, 1}),
        ({1: "a", (1, True): "b"}, {(1, True): "b", 1: "a"}),
        (float("inf"), float("inf")),
        (torch.tensor([1, 2]), torch.tensor([1, 2])),
        (torch.tensor([1.0], dtype=torch.float64), torch.tensor([1.0])),
        (torch.nn.Parameter(torch.ones(2)), torch.ones(2)),
        (torch.tensor([-torch.inf, 1]), torch.tensor([-torch.inf, 1])),
        (torch.empty(0, 3), torch.empty(0, 3)),
        (np.arange(3), np.arange(3)),
        (Point(1, [0.5]), Point(1, [0.5])),
        (SamePoint(1, [0.5]), Point(1, [0.5])),
        (Colour.RED, Colour.RED),
        (torch.int64, torch.int64),
        (torch.Size([1, 2]), [1, 2]),
    ],
)
def test_equal(got: Any, expected: Any) -> None:
    compare(got, expected, "f()")


@pytest.mark.parametrize(
    ("got", "expected", "words"),
    [
        (True, 1, "expected an int, got a bool"),
        (1, True, "expected a bool, got an int"),
        (1.0, 1, "expected an int, got a float"),
        (np.int64(1), 1, "expected an int, got a numpy.int64 (use int(…))"),
        (torch.tensor(1), 1, "expected an int, got a tensor (use .item())"),
        (torch.tensor([1.0, 2]), [1.0, 2], "expected a list, got a tensor"),
        ([1, 2], torch.tensor([1, 2]), "expected a tensor, got a list"),
        (None, 0, "expected an int, got None"),
        (0, None, "expected None, got an int"),
        (float("nan"), 1.0, "expected 1.0, got nan"),
        ([1, 2], [1, 3], "item 1: expected 3, got 2"),
        ([1, 2], [1, 2, 3], "expected 3 items, got 2"),
        ([[[0], [1]]], [[[0], [2]]], "item [0][1][0]: expected 2, got 1"),
        ([1, [2, True]], [1, [2, 1]], "item [1][1]: expected an int, got a bool"),
        ({"a": 1}, {"a": 1, "b": 2}, "the key 'b' is missing"),
        ({"a": 1, "b": 2}, {"a": 1}, "there should be no key 'b'"),
        ({1: 0}, {True: 0}, "the key True is missing"),
        ({"a": [1]}, {"a": [2]}, "key 'a': item 0: expected 2, got 1"),
        ({1, 2}, {1, 3}, "3 is missing from the set"),
        ({1, 2}, {1}, "2 should not be in the set"),
        ({True}, {1}, "1 is missing from the set"),
        ([1], {1}, "expected a set, got a list"),
        ("a" * 50 + "b", "a" * 51, "they differ from position 50 on"),
        (Point(1, [0.5]), Point(1, [0.25]), "y: item 0: expected 0.25, got 0.5"),
        ((1, [0.5]), Point(1, [0.5]), "expected a Point, got a tuple"),
        (1, Colour.RED, "expected a Colour, got an int"),
        (torch.ones(2, 3), torch.ones(3, 2), "expected shape [3, 2], got [2, 3]"),
        (
            torch.ones(2, dtype=torch.int32),
            torch.ones(2, dtype=torch.int64),
            "expected torch.int64",
        ),
        (
            torch.ones(2),
            torch.ones(2, dtype=torch.int64),
            "expected torch.int64, got torch.float32",
        ),
        (torch.tensor([0, 1]), torch.tensor([False, True]), "expected torch.bool, got torch.int64"),
        (
            torch.tensor([[1.0, 2], [3, 5]]),
            torch.tensor([[1.0, 2], [3, 4]]),
            "1 of 4 numbers differ, the first at [1, 1]: got 5.0 instead of 4.0; "
            "the largest difference is 1",
        ),
        (torch.tensor([1, 7]), torch.tensor([1, 2]), "the first at [1]: got 7 instead of 2"),
        (torch.tensor([1.0, torch.nan]), torch.ones(2), "1 of 2 numbers are nan, the first at [1]"),
        (torch.tensor([torch.inf, 1]), torch.ones(2), "1 of 2 numbers are inf, the first at [0]"),
        (torch.tensor([0.0]), torch.tensor([-torch.inf]), "got 0.0 instead of -inf"),
        (np.arange(3), np.arange(4), "expected shape [4], got [3]"),
        ([0, 1, 2], np.arange(3), "expected a numpy array, got a list"),
        (torch.ones(2, device="meta"), torch.ones(2), "got torch.strided on meta"),
        (Liar(), 5, "expected an int, got a Liar"),
        (Liar(), [1, 2], "expected a list, got a Liar"),
        (Liar(), {"a": 1}, "expected a dict, got a Liar"),
        (Liar(), torch.ones(2), "expected a tensor, got a Liar"),
        (Liar(), None, "expected None, got a Liar"),
        (Liar(), Point(1, []), "expected a Point, got a Liar"),
        (LyingInt(4), 5, "expected 5, got 4"),
        (LyingStr("no"), "yes", "expected 'yes', got 'no'"),
        (LyingList(), [1, 2], "expected 2 items, got 0"),
        ({LyingStr("b"): 1}, {"a": 1}, "the key 'a' is missing"),
        ({LyingStr("b")}, {"a"}, "'a' is missing from the set"),
        (LyingTensor(2), torch.zeros(2), "got a subclass of Tensor (LyingTensor)"),
    ],
)
def test_different(got: Any, expected: Any, words: str) -> None:
    with pytest.raises(AssertionError) as failure:
        compare(got, expected, "f(x=1)")
    first, *_, last = str(failure.value).splitlines()
    assert first == "tried     f(x=1)"
    assert words in last


def test_an_attribute_set_on_a_tensor_is_not_asked() -> None:
    got = torch.zeros(2)
    got.detach = got.double = lambda *_: torch.ones(2)  # type: ignore[method-assign,assignment]
    with pytest.raises(AssertionError, match="2 of 2 numbers differ"):
        compare(got, torch.ones(2), "f()")


def test_tolerance_is_for_floats_alone() -> None:
    compare(1.001, 1.0, "f()", atol=0.01)
    compare(torch.tensor([100.5]), torch.tensor([100.0]), "f()", rtol=0.01)
    compare([0.5, {"a": 1.001}], [0.5, {"a": 1.0}], "f()", rtol=0.01)
    for got, expected in [(1, 2), (torch.tensor([1]), torch.tensor([2])), ([1], [2])]:
        with pytest.raises(AssertionError):
            compare(got, expected, "f()", atol=10, rtol=10)
    with pytest.raises(AssertionError):  # an infinity is never near
        compare(torch.tensor([torch.inf]), torch.ones(1), "f()", rtol=torch.inf, atol=torch.inf)


@pytest.mark.parametrize("expected", [float("nan"), torch.tensor([torch.nan])])
def test_an_expected_nan_is_the_tests_error(expected: Any) -> None:
    with pytest.raises(ValueError, match="must not"):
        compare(expected, expected, "f()")


def test_the_message_names_call_value_and_problem_and_stays_short() -> None:
    with pytest.raises(AssertionError) as failure:
        compare(list(range(1000)), [0], "f(n=1000)")
    tried, got, expected, problem = str(failure.value).splitlines()
    assert tried == "tried     f(n=1000)" and expected == "expected  [0]"
    assert got.startswith("got       [0, 1, 2") and got.endswith("… (4890 characters)")
    assert problem == "expected 1 item, got 1000"


def test_a_repr_that_fails_fails_nothing() -> None:
    class Mute:
        def __repr__(self) -> str:
            raise RuntimeError

    with pytest.raises(AssertionError, match="<Mute whose repr raises RuntimeError>"):
        compare(Mute(), 1, "f()")


class Pool:
    def __init__(self) -> None:
        self.free = [1, 2]
        self.kv = torch.full((2,), torch.nan)
        self.me = self


def test_unchanged_looks_into_objects_and_takes_nan_for_nan() -> None:
    pool, table, points = Pool(), {"a": torch.tensor([1.0, torch.nan])}, [Point(1, [0.5])]
    with unchanged("f()", pool=pool, table=table, points=points, nothing=None, nan=float("nan")):
        pass


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda pool: pool.free.pop(), "free: expected 2 items, got 1"),
        (lambda pool: pool.kv.fill_(0), r"kv: 2 of 2 numbers differ, the first at \[0\]"),
        (lambda pool: setattr(pool, "kv", pool.kv.double()), "kv: expected torch.float32"),
        (lambda pool: setattr(pool, "new", 1), "its attributes are others"),
    ],
)
def test_unchanged_names_what_changed(change: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s)input pool must not be changed: {words}"):
        pool = Pool()
        with unchanged("f()", pool=pool):
            change(pool)


def test_unchanged_lets_an_error_through() -> None:
    items = [1]
    with pytest.raises(KeyError), unchanged("f()", items=items):
        items.append(2)
        raise KeyError
