"""`check("4.3")` in a notebook: the public tests of an exercise, on what is defined right now."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any


class CheckResult:
    """What came out; its repr is the line a learner reads."""

    def __init__(self, line: str) -> None:
        self.line = line

    def __repr__(self) -> str:
        return self.line


def check(exercise: str) -> CheckResult:
    """Run the public tests of an exercise on the caller's definitions. Never raises."""
    if os.environ.get("MINIFER_GRADING") == "1":
        return CheckResult(f"… {exercise} is being graded")
    try:
        return CheckResult(_check(exercise, sys._getframe(1).f_globals))
    except Exception as error:
        return CheckResult(f"✘ {exercise}: could not be checked: {type(error).__name__}: {error}")


def _check(exercise: str, namespace: dict[str, Any]) -> str:
    import pytest

    from minifer.course.book.builder import find_book
    from minifer.course.grading.plugin import GradingPlugin, TestResult

    number = int(exercise.split(".")[0])
    tests = find_book().exercises / "tests" / f"test_ex{number:02d}.py"
    module = ModuleType("answer")
    module.__dict__.update(namespace)
    results: list[TestResult] = []
    seed = int.from_bytes(os.urandom(4), "big")
    plugin = GradingPlugin(exercise, lambda: module, results.append, seed, hidden=False)
    arguments = [str(tests), "--assert=plain", "-c", os.devnull, "--rootdir", "/", "--noconftest"]
    arguments += ["--capture=no", "-p", "no:terminal"]
    for name in ("cacheprovider", "nbval", "randomly", "xdist"):
        arguments += ["-p", f"no:{name}"]
    pytest.main(arguments, plugins=[plugin])
    failed = [result for result in results if result.status == "failed"]
    if not results:
        return f"✘ {exercise}: there is no such exercise in {tests.name}"
    if failed:
        return f"✘ {exercise}: {failed[0].name}\n{failed[0].message}"
    if any(result.status == "not attempted" for result in results):
        return f"… {exercise} not attempted"
    return f"✔ {exercise} passed ({len(results)} tests)"
