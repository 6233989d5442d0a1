"""The grader's own exam: does it give the solution all points, and mistakes fewer?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from minifer.course.book.builder import Book
from minifer.course.book.exercises import stub_of
from minifer.course.grading.automatic import Change, changes, without_author
from minifer.course.grading.client import ForkServer, GraderError, Outcome
from minifer.course.grading.grade import AT_ONCE
from minifer.course.grading.mutants import Mutant, load_mutants, load_survivors
from minifer.course.grading.pick import Exercise
from minifer.course.grading.trivial import ANSWERS, trivial
from minifer.course.grading.worker import Job

LEAST_KILLED = 0.9
_SLOWER = 10  # how much longer than the solution an automatic change may take


@dataclass
class Exam:
    """What an exercise's tests did to each answer; text only, nothing that differs between runs.

    tests: name, points, hidden. trivial: answer → points it got. named: one entry a mutant, with
    the tests that failed. survivors: change → reason, "" for an open one. problems: a sentence
    each, for what must not be.
    """

    exercise: str
    title: str
    tests: list[dict[str, Any]] = field(default_factory=list)
    seeds: int = 0
    trivial: dict[str, float] = field(default_factory=dict)
    named: list[dict[str, Any]] = field(default_factory=list)
    automatic: int = 0
    survivors: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Share of automatic changes that lose points; those with a reason to live left out."""
        counted = self.automatic - sum(1 for reason in self.survivors.values() if reason)
        alive = sum(1 for reason in self.survivors.values() if not reason)
        return 1.0 if counted == 0 else 1 - alive / counted


def examine(
    book: Book,
    exercises: Sequence[Exercise],
    seeds: Sequence[int],
    done: Callable[[Exam], None] = lambda exam: None,
) -> list[Exam]:
    """Grade solution, stub, trivial answers, known mistakes and automatic changes of exercises.

    seeds: for the solution; all else runs with the first. done: told each exam when it is over.
    Raises `GraderError` where there is no solution.
    """
    exams, texts = {}, {}
    for exercise in exercises:
        if exercise.master is None:
            raise GraderError(f"{exercise.id}: no solution of {exercise.tests.name} is there")
        exams[exercise.id] = Exam(exercise.id, exercise.title, seeds=len(seeds))
        texts[exercise.id] = exercise.master.read_text(encoding="utf-8")
    for seed in seeds[1:]:
        with ForkServer(seed) as server:
            for exercise in exercises:
                with _Room(server, book, exercise, seed) as room:
                    _solution(room, texts[exercise.id], exams[exercise.id], seed)
    with ForkServer(seeds[0], many=True) as server:
        for exercise in exercises:
            with _Room(server, book, exercise, seeds[0]) as room:
                _examine(room, texts[exercise.id], exams[exercise.id])
            done(exams[exercise.id])
    return list(exams.values())


def _examine(room: _Room, text: str, exam: Exam) -> None:
    room.cpu_seconds = max(2.0, _SLOWER * _solution(room, text, exam, room.seed))
    if exam.problems:
        return  # nothing is known about mistakes while the solution fails
    text = without_author(text)
    file = room.book.solutions / "mutants" / f"{room.exercise.name}.py"
    _stub(room, text, exam)
    _trivial(room, text, exam)
    _named(room, text, [m for m in load_mutants(file) if m.exercise == exam.exercise], exam)
    _automatic(room, changes(text, exam.exercise), load_survivors(file), exam)


class _Room:
    """A folder of answers and a way to grade them, two at a time."""

    def __init__(self, server: ForkServer, book: Book, exercise: Exercise, seed: int) -> None:
        self.server, self.book, self.exercise, self.seed = server, book, exercise, seed
        self.cpu_seconds = 20.0

    def __enter__(self) -> _Room:
        self._folder = TemporaryDirectory()
        self._pool = ThreadPoolExecutor(AT_ONCE)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._folder.cleanup()

    def grade(self, texts: Sequence[str], *, first: bool = False) -> list[Outcome]:
        """Outcomes in order. first: stop each at the first test that fails."""
        protected = (self.book.solutions, self.exercise.tests.parent)

        def one(item: tuple[int, str]) -> Outcome:
            answer = Path(self._folder.name) / f"answer{item[0]}.py"
            answer.write_text(item[1], encoding="utf-8")
            return self.server.run(
                Job(
                    self.exercise.id, answer, self.exercise.tests, self.seed,
                    seconds=10 * self.cpu_seconds, cpu_seconds=self.cpu_seconds,
                    protected=protected, probe="never", first=first,
                )
            )  # fmt: skip

        return list(self._pool.map(one, enumerate(texts)))


def failing(outcome: Outcome) -> list[str]:
    """Tests that give no points, in order."""
    if outcome.tampered or outcome.ended or outcome.crash:
        passed: set[str] = set()
        if not outcome.tampered:
            passed = {r.name for r in outcome.results if r.name != outcome.running}
    else:
        passed = {r.name for r in outcome.results}
    lost = {r.name for r in outcome.results if r.status != "passed"}
    return [test["name"] for test in outcome.tests if test["name"] not in passed - lost]


def points_of(outcome: Outcome) -> float:
    """Points of an outcome."""
    lost = set(failing(outcome))
    return sum(test["points"] for test in outcome.tests if test["name"] not in lost)


def _solution(room: _Room, text: str, exam: Exam, seed: int) -> float:
    outcome = room.grade([text])[0]
    exam.tests = outcome.tests
    if lost := failing(outcome):
        why = next((r.message for r in outcome.results if r.status != "passed"), outcome.ended)
        exam.problems.append(f"the solution fails {lost[0]} with seed {seed}: {why}")
    return outcome.seconds


def _stub(room: _Room, text: str, exam: Exam) -> None:
    outcome = room.grade([stub_of(text, room.exercise.name)])[0]
    for result in outcome.results:
        if result.status != "not attempted":
            exam.problems.append(f"the stub is {result.status} in {result.name}")
    if len({r.name for r in outcome.results}) < len(outcome.tests):
        exam.problems.append(f"the stub ends its process: {outcome.ended}")


def _trivial(room: _Room, text: str, exam: Exam) -> None:
    answers = [trivial(text, exam.exercise, expression) for expression in ANSWERS.values()]
    for name, outcome in zip(ANSWERS, room.grade(answers), strict=True):
        exam.trivial[name] = points_of(outcome)
        if exam.trivial[name]:
            lost = failing(outcome)
            earned = [test["name"] for test in outcome.tests if test["name"] not in lost]
            exam.problems.append(f"`{name}` earns {exam.trivial[name]:g} in {', '.join(earned)}")


def _named(room: _Room, text: str, mutants: Sequence[Mutant], exam: Exam) -> None:
    try:
        answers = [mutant.apply(text) for mutant in mutants]
    except ValueError as error:
        exam.problems.append(str(error))
        return
    known = {test["name"] for test in exam.tests}
    for mutant, outcome in zip(mutants, room.grade(answers), strict=True):
        lost = failing(outcome)
        exam.named.append(
            {
                "id": mutant.id,
                "diagnosis": mutant.diagnosis,
                "killed_by": mutant.killed_by,
                "status": mutant.status,
                "note": mutant.note,
                "failing": lost,
            }
        )
        if mutant.status == "equivalent":
            if lost:
                exam.problems.append(f"{mutant.id} counts as equivalent, but fails {lost[0]}")
            if not mutant.note:
                exam.problems.append(f"{mutant.id} is equivalent without a note that says why")
        elif mutant.killed_by not in known:
            exam.problems.append(f"{mutant.id}: there is no test {mutant.killed_by!r}")
        elif mutant.killed_by not in lost:
            exam.problems.append(
                f"{mutant.id} passes {mutant.killed_by}, fails {lost or 'nothing'}"
            )


def _automatic(room: _Room, found: Sequence[Change], reasons: dict[str, str], exam: Exam) -> None:
    outcomes = room.grade([change.text for change in found], first=True)
    exam.automatic = len(found)
    for change, outcome in zip(found, outcomes, strict=True):
        failed = any(result.status != "passed" for result in outcome.results)
        if not (failed or outcome.ended or outcome.tampered or outcome.crash):
            exam.survivors[change.id] = reasons.get(change.id, "")
    if exam.rate < LEAST_KILLED:
        exam.problems.append(
            f"{exam.rate:.0%} of the automatic changes lose points, must be {LEAST_KILLED:.0%}"
        )
