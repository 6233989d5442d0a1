"""Grade an exercise: run it in a process, judge what came, add up the points."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minifer.course.grading.client import ForkServer, GraderError, Outcome
from minifer.course.grading.mistakes import resembles
from minifer.course.grading.plugin import TestResult
from minifer.course.grading.worker import Job

_ID = re.compile(r'@points\(\s*"(\d+\.\d+)"')


@dataclass(frozen=True)
class ExerciseResult:
    """All tests of an exercise, one entry a test function.

    title: its heading. optional: marked ★, its points are extra. answer: the file graded. note:
    what the reader should know besides.
    """

    exercise: str
    tests: tuple[TestResult, ...]
    seed: int
    seconds: float
    title: str = ""
    optional: bool = False
    answer: Path | None = None
    note: str = ""
    printed: str = ""

    @property
    def score(self) -> float:
        return sum(test.points for test in self.tests if test.status == "passed")

    @property
    def max_score(self) -> float:
        return sum(test.points for test in self.tests)

    @property
    def status(self) -> str:
        """ "passed", "failed" or "not attempted": not attempted is what only raises its stub."""
        statuses = {test.status for test in self.tests}
        if statuses == {"passed"}:
            return "passed"
        return "not attempted" if statuses == {"not attempted"} else "failed"


def run_exercise(server: ForkServer, job: Job, master: Path | None = None) -> ExerciseResult:
    """Run one job and judge it.

    master: the solution. When a test ends with an error of its own, the solution is run on the
    same seed: if it passes, what the answer returned was not usable, and the answer has failed.
    Raises `GraderError` when the solution does not pass either, or there is none.
    """
    outcome = server.run(job)
    if outcome.crash and not outcome.tampered:
        if not _works(server, job, master):
            raise GraderError(f"{job.exercise}: {outcome.crash}")
        outcome.tampered = f"the answer broke the grader: {outcome.crash}"
    errors = [result for result in outcome.results if result.status == "error"]
    if errors:
        cleared = _clear(server, job, master, errors)
        outcome.results = [cleared.get(id(result), result) for result in outcome.results]
    if not outcome.tests and not outcome.ended and not outcome.tampered:
        raise GraderError(f"{job.exercise}: {job.tests.name} has no test of this exercise")
    tests = _tests(job, outcome)
    if outcome.fingerprint and (alike := resembles(job.tests, job.exercise, outcome.fingerprint)):
        tests = _add_to_first_failure(tests, alike)
    note = f"refused: {outcome.blocked[0]}" if outcome.blocked else outcome.said
    return ExerciseResult(
        job.exercise, tuple(tests), job.seed, outcome.seconds, answer=job.answer, note=note,
        printed=outcome.printed,
    )  # fmt: skip


def _works(server: ForkServer, job: Job, master: Path | None) -> bool:
    """Whether the tests run on the solution."""
    if master is None or master.resolve() == job.answer.resolve():
        return False
    truth = server.run(replace(job, answer=master, probe="never"))
    return not (truth.crash or truth.ended or truth.tampered)


def _clear(
    server: ForkServer, job: Job, master: Path | None, errors: list[TestResult]
) -> dict[int, TestResult]:
    """Errors of test files that are the answer's doing, as failures."""
    first = errors[0]
    where = f"{job.tests.name}, {first.name}: {first.message}"
    if master is None or master.resolve() == job.answer.resolve():
        raise GraderError(f"{job.exercise}: the test file itself fails\n{where}")
    truth = server.run(replace(job, answer=master, probe="never"))
    fine = {result.name for result in truth.results} - {
        result.name for result in truth.results if result.status != "passed"
    }
    if truth.ended or truth.tampered or any(error.name not in fine for error in errors):
        raise GraderError(f"{job.exercise}: the test file fails on the solution too\n{where}")
    text = "the test cannot work with what came back\n"
    return {id(e): replace(e, status="failed", message=text + e.message) for e in errors}


def _tests(job: Job, outcome: Outcome) -> list[TestResult]:
    """One result a test function: the first case that did not pass speaks for all."""
    functions: dict[str, TestResult] = {}
    for case in outcome.results:
        if case.name not in functions or functions[case.name].status == "passed":
            functions[case.name] = case
    told = []
    for test in outcome.tests:
        name, points, hidden = test["name"], test["points"], test["hidden"]
        result = functions.get(name)
        if outcome.tampered:
            message, result = f"no points: {outcome.tampered}", None
        elif outcome.running == name:
            message, result = outcome.ended, None
        else:
            message = f"not run: {outcome.ended}" if outcome.ended else "not run"
        told.append(
            result or TestResult(job.exercise, name, points, hidden, "failed", message or "failed")
        )
    if not told:
        raise GraderError(f"{job.exercise}: {outcome.ended or outcome.tampered}")
    return told


def _add_to_first_failure(tests: list[TestResult], line: str) -> list[TestResult]:
    for index, test in enumerate(tests):
        if test.status == "failed":
            told = replace(test, message=f"{test.message}\n{line}")
            return [*tests[:index], told, *tests[index + 1 :]]
    return tests


def over_seeds(results: Sequence[ExerciseResult]) -> ExerciseResult:
    """One result of several seeds: a test passes when it passed with every seed."""
    worst = list(results[0].tests)
    for result in results[1:]:
        for index, test in enumerate(result.tests):
            if worst[index].status == "passed" and test.status != "passed":
                said = f"{test.message}\n(with seed {result.seed})"
                worst[index] = replace(test, message=said)
    seconds = sum(result.seconds for result in results)
    return replace(results[0], tests=tuple(worst), seconds=seconds)


def exercises_in(tests: Path) -> Sequence[str]:
    """Ids of the exercises that a test file marks, in order."""
    found = _ID.findall(tests.read_text(encoding="utf-8"))
    return list(dict.fromkeys(found))


def wanted(exercise: str, ids: Sequence[Any]) -> bool:
    """Whether "4.3" is asked for by ["4.3"], ["4"], ["04"], ["ex04"], ["ex4.3"] or []."""
    if not ids:
        return True
    names = [re.sub(r"^(ex|L)?0*(?=\d)", "", str(name)) for name in ids]
    return exercise in names or exercise.split(".")[0] in names
