"""Grade a folder of answers: every exercise, with every seed, two processes at a time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from minifer.course.book.builder import Book
from minifer.course.grading.client import ForkServer, GraderError
from minifer.course.grading.pick import Exercise, choose, exercises_of
from minifer.course.grading.plugin import TestResult
from minifer.course.grading.runner import ExerciseResult, over_seeds, run_exercise
from minifer.course.grading.worker import Job

AT_ONCE = 2


@dataclass(frozen=True)
class Grades:
    """results: one an exercise. seeds: seed → PYTHONHASHSEED of each run. errors: of the grader
    or of test files, a sentence each; their exercises have no result."""

    results: list[ExerciseResult]
    seeds: dict[int, int]
    errors: list[str]


def grade(
    book: Book, ids: Sequence[str], target: Path, seeds: Sequence[int], *, hidden: bool = True
) -> Grades:
    """Grade the exercises asked for; a test counts when it passes with every seed.

    target: a folder of answers, or one file. Raises `ValueError` for bad input.
    """
    exercises = exercises_of(book, ids)
    if target.is_file():
        exercises = [e for e in exercises if len(ids) > 0 or target.name.startswith(e.name)]
    if not exercises:
        raise ValueError(f"there is no exercise for {target}: name its id")
    chosen = [choose(exercise, target) for exercise in exercises]
    runs: list[list[ExerciseResult | None]] = []
    errors: dict[str, str] = {}
    used: dict[int, int] = {}
    for seed in seeds:
        with ForkServer(seed) as server, ThreadPoolExecutor(AT_ONCE) as pool:
            used[seed] = server.hash_seed

            def one(
                index: int, server: ForkServer = server, seed: int = seed
            ) -> ExerciseResult | None:
                exercise, (answer, note) = exercises[index], chosen[index]
                try:
                    return _one(server, book, exercise, answer, note, seed, hidden)
                except GraderError as error:
                    errors[exercise.id] = str(error)
                    return None

            runs.append(list(pool.map(one, range(len(exercises)))))
    graded = [
        over_seeds([result for result in results if result is not None])
        for exercise, results in zip(exercises, zip(*runs, strict=True), strict=True)
        if exercise.id not in errors
    ]
    return Grades(graded, used, list(errors.values()))


def _one(
    server: ForkServer,
    book: Book,
    exercise: Exercise,
    answer: Path | None,
    note: str,
    seed: int,
    hidden: bool,
) -> ExerciseResult:
    protected = (book.solutions, exercise.tests.parent)
    job = Job(
        exercise.id, answer or exercise.tests, exercise.tests, seed, hidden=hidden,
        protected=protected,
    )  # fmt: skip
    if answer is None:  # which tests there are is known without an answer
        outcome = server.run(replace(job, probe="only"))
        tests = tuple(
            TestResult(exercise.id, t["name"], t["points"], t["hidden"], "not attempted", "no file")
            for t in outcome.tests
        )
        result = ExerciseResult(exercise.id, tests, seed, outcome.seconds)
    else:
        result = run_exercise(server, job, exercise.master)
    notes = "; ".join(filter(None, (note, result.note)))
    return replace(
        result, title=exercise.title, optional=exercise.optional, answer=answer, note=notes
    )
