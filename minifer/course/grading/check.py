"""`check("4.3")` in a notebook: the public tests of an exercise, on what is defined right now."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

_CLONE = "the exercises are in a clone of minifer, in its folder exercises/: start there"


class CheckResult:
    """What came out; its repr is the line a learner reads."""

    def __init__(self, line: str) -> None:
        self.line = line

    def __repr__(self) -> str:
        return self.line


def check(exercise: str) -> CheckResult:
    """Run the public tests of an exercise on the caller's definitions.

    The repr of what is returned is one of `✔ 4.3 passed (6 tests)`, `✘ 4.3: …` and
    `… 4.3 not attempted`. Prints nothing and raises nothing but a reader's `KeyboardInterrupt`.
    """
    if os.environ.get("MINIFER_GRADING") == "1":  # the grader runs the file: it has its own tests
        return CheckResult(f"… {exercise} not attempted")
    try:
        with contextlib.redirect_stdout(_Nowhere()), contextlib.redirect_stderr(_Nowhere()):
            return CheckResult(_check(str(exercise), sys._getframe(1)))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return CheckResult(f"✘ {exercise}: could not be checked: {type(error).__name__}: {error}")


def _check(exercise: str, caller: FrameType) -> str:
    from minifer.course.grading.mistakes import fingerprint, resembles
    from minifer.course.grading.plugin import GradingPlugin, TestResult, probes_in, run_pytest
    from minifer.course.grading.target import Answer
    from minifer.course.grading.trust import Trust

    tests = _tests(exercise, caller)
    if isinstance(tests, str):
        return f"✘ {exercise}: {tests}"
    module = Answer()
    module.__dict__.update(caller.f_globals)
    results: list[TestResult] = []
    plugin = GradingPlugin(
        exercise,
        lambda: module,
        results.append,
        int.from_bytes(os.urandom(4), "big"),
        Trust(tests),
        hidden=False,
        interactive=True,
    )
    try:
        with warnings.catch_warnings():
            status = run_pytest(tests, plugin)
        if status == 2 and not any(result.status == "error" for result in results):
            raise KeyboardInterrupt
        line = _line(exercise, results, tests)
        loaded = sys.modules.get(tests.stem)
        said = getattr(loaded, "NOTE", "")  # what was left out here, and why
        if line.startswith("✘") and loaded and (probes := probes_in(loaded, exercise)):
            alike = resembles(tests, exercise, fingerprint(probes, lambda: module))
            line += f"\n{alike}" if alike else ""
        return f"{line}\n{said}" if said else line
    finally:
        sys.modules.pop(tests.stem, None)


def _line(exercise: str, results: list[Any], tests: Path) -> str:
    if not results:
        return f"✘ {exercise}: there is no such exercise in {tests.name}"
    for result in results:
        if result.status == "error":
            return f"✘ {exercise}: {tests.name} cannot work with this: {result.message}"
    passed = [result for result in results if result.status == "passed"]
    if len(passed) == len(results):
        return f"✔ {exercise} passed ({len(results)} tests)"
    failed = [result for result in results if result.status == "failed"]
    if failed:
        return f"✘ {exercise}: {failed[0].name}\n{failed[0].message}"
    open_ = next(result for result in results if result.status == "not attempted")
    if passed:
        return f"✘ {exercise}: {len(passed)} tests passed; {open_.name} is not attempted"
    return f"… {exercise} not attempted"


def _tests(exercise: str, caller: FrameType) -> Path | str:
    """The test file, or why there is none: looked for around the caller's file, then from here."""
    from minifer.course.book.builder import find_book

    number, _, part = exercise.partition(".")
    if not (number.isdigit() and part.isdigit()):
        return 'an exercise looks like "4.3"'
    file = caller.f_globals.get("__file__")
    for start in (Path(file).parent if file else Path.cwd(), Path.cwd()):
        try:
            book = find_book(start)
        except ValueError:
            continue
        tests = book.exercises / "tests" / f"test_ex{int(number):02d}.py"
        if tests.is_file():
            return tests
        return f"there is no {tests.name} in {tests.parent}"
    return _CLONE


class _Nowhere:
    """A stream that swallows all."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False
