"""Grade exercises: find the tests, run each exercise in a process, add up the points."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minifer.course.grading.plugin import TestResult
from minifer.course.grading.worker import Job, work

_PRELOAD = ["torch", "pytest", "minifer.course.grading.worker", "minifer.course.grading.compare"]


@dataclass(frozen=True)
class ExerciseResult:
    """All tests of an exercise. note: what ended it early, "" for nothing."""

    exercise: str
    tests: tuple[TestResult, ...]
    seed: int
    seconds: float
    note: str = ""

    @property
    def score(self) -> float:
        return sum(test.points for test in self.tests if test.status == "passed")


def run_exercise(job: Job) -> ExerciseResult:
    """Run one job in a fresh process and collect what it reports until its time is up."""
    method = "spawn" if sys.platform == "win32" else "forkserver"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(_PRELOAD)
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(job, send), daemon=True)
    begin = time.monotonic()
    process.start()
    send.close()
    tests: list[TestResult] = []
    note = ""
    while True:
        left = begin + job.seconds - time.monotonic()
        if not receive.poll(max(0.0, left)):
            note = f"stopped after {job.seconds:g} s"
            break
        try:
            result = receive.recv()
        except EOFError:
            note = "the answer ended the process"
            break
        if result is None:
            break
        tests.append(result)
    process.kill()
    process.join()
    return ExerciseResult(
        job.exercise, tuple(_functions(tests)), job.seed, time.monotonic() - begin, note
    )


def _functions(cases: Sequence[TestResult]) -> list[TestResult]:
    """One result a test function: the first case that did not pass speaks for all."""
    functions: dict[str, TestResult] = {}
    for case in cases:
        if case.name not in functions or functions[case.name].status == "passed":
            functions[case.name] = case
    return list(functions.values())


def exercises_in(tests: Path) -> Sequence[str]:
    """Ids of the exercises that a test file marks, in order."""
    import re

    found = re.findall(r'@points\(\s*"(\d+\.\d+)"', tests.read_text(encoding="utf-8"))
    return list(dict.fromkeys(found))
