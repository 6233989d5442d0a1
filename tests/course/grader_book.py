"""A small book for tests of the grader, and one fork server for all of them."""

from __future__ import annotations

import atexit
from functools import cache
from pathlib import Path
from typing import Any

from minifer.course.grading.client import ForkServer
from minifer.course.grading.runner import ExerciseResult, run_exercise
from minifer.course.grading.worker import Job

MASTER = """\
# %% [markdown]
# ### Exercise 91.1 - Square
# %%
from minifer.course import check


# %% tags=["exercise"]
def square(n):
    ### BEGIN SOLUTION
    if n < 0:
        raise ValueError(f"n must not be below 0, got {n}")
    total = 0
    for _ in range(n):
        total += n
    return total
    ### END SOLUTION


# %%
check("91.1")
# %% [markdown]
# ### Exercise 91.2 ★ - Count
# %% tags=["exercise"]
class Counter:
    def __init__(self):
        ### BEGIN SOLUTION
        self.count = 0
        ### END SOLUTION

    def up(self):
        ### BEGIN SOLUTION
        self.count += 1
        return self.count
        ### END SOLUTION


### BEGIN AUTHOR
print(square(3))
### END AUTHOR
"""
TESTS = """\
import pytest

from minifer.course.grading import compare, points, probe


@points("91.1", 2)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_ex91_1_squares(target, n):
    compare(target.square(n), n * n, f"square({n})")


@points("91.1", 1)
def test_ex91_1_refuses_what_is_below_zero(target):
    assert target.square(0) + 0 == 0
    with pytest.raises(ValueError):
        target.square(-2)


@points("91.1", 1, hidden=True)
def test_ex91_1_large(target, rng):
    n = rng.randrange(50, 60)
    compare(target.square(n), n * n, f"square({n})")


@points("91.2", 3)
def test_ex91_2_counts(target):
    counter = target.Counter()
    compare([counter.up(), counter.up()], [1, 2], "up() twice")


@probe("91.1")
def probe_small(target):
    return [target.square(n) for n in range(5)]


@probe("91.1")
def probe_below_zero(target):
    return target.square(-1)
"""
MUTANTS = """\
from minifer.course.grading.mutants import Mutant

MUTANTS = [
    Mutant(
        "ex91_1_m1_one_too_few", "91.1", old="range(n)", new="range(n - 1)",
        diagnosis="the sum misses its last term", killed_by="test_ex91_1_squares",
    ),
    Mutant(
        "ex91_1_m2_sign_not_checked", "91.1", old="n < 0", new="n < -9",
        diagnosis="numbers below zero are not refused",
        killed_by="test_ex91_1_refuses_what_is_below_zero",
    ),
]
"""


def make_book(root: Path, *, tests: str = TESTS, master: str = MASTER) -> Path:
    """Masters, tests and mutants of exercises 91; the stub in exercises/. Returns the root."""
    from minifer.course.book.exercises import stub_of

    for name in ("exercises/tests", "solutions/mutants", "lectures/results"):
        (root / name).mkdir(parents=True)
    (root / "exercises/tests/test_ex91.py").write_text(tests)
    (root / "solutions/ex91_small.py").write_text(master)
    (root / "solutions/mutants/ex91.py").write_text(MUTANTS)
    (root / "exercises/ex91_small.py").write_text(stub_of(master, "ex91"))
    return root


def solve(text: str, exercise: str, code: str, *, master: str = MASTER) -> str:
    """The master with one piece of text replaced."""
    assert master.count(text) == 1, exercise
    return master.replace(text, code)


@cache
def server() -> ForkServer:
    """One for the whole test session."""
    started = ForkServer(7)
    atexit.register(started.__exit__)
    return started


def run(
    book: Path, exercise: str, answer: str | None = None, *, clear: bool = True, **options: Any
) -> ExerciseResult:
    """Grade an answer's text (None: the solution). clear: errors of a test are held against the
    solution."""
    path = book / "solutions/ex91_small.py"
    if answer is not None:
        path = book / "exercises/ex91_small.py"
        path.write_text(answer)
    protected = (book / "solutions",)
    tests = book / "exercises/tests/test_ex91.py"
    settings = {"seconds": 30.0, "cpu_seconds": 10.0, **options}
    job = Job(exercise, path, tests, 1, protected=protected, **settings)
    return run_exercise(server(), job, book / "solutions/ex91_small.py" if clear else None)
