"""`minifer grade`: points for exercises, and the grader's own exam."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

from minifer.cli.parser import add_command


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "grade",
        run,
        summary="grade the exercises",
        about="Runs the tests of exercises/tests on your files, each exercise in a process of its "
        "own. Exit status 0 when it was graded, whatever the score; 2 when the grader or a test "
        "file does not work. --mutants grades the grader: the solution gets all points, every "
        "known mistake loses some, and cheats gain nothing; exit status 1 when not.",
        examples=[
            ("grade", "all exercises"),
            ("grade 4.3", "one exercise"),
            ("grade 4 --json results.json", "a lecture's, for Gradescope"),
            ("grade 4 --target solutions --seeds 5", "the solutions, with five seeds"),
            ("grade 4 --mutants", "the grader's own exam"),
        ],
        code=[
            ("minifer/course/grading/runner.py", "how an exercise is judged"),
            ("minifer/course/grading/sandbox.py", "what an answer may not do"),
        ],
    )
    parser.add_argument("ids", nargs="*", metavar="ID", help="4.3, or 4 for all of lecture 4")
    parser.add_argument(
        "--target",
        default="exercises",
        metavar="PATH",
        help="exercises, solutions, another folder, or a file (default: exercises)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write Gradescope's results.json")
    parser.add_argument(
        "--hidden",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run the hidden tests too (default: yes); --public is --no-hidden",
    )
    parser.add_argument("--public", dest="hidden", action="store_false", help=argparse.SUPPRESS)
    parser.add_argument(
        "--seed", type=int, default=None, metavar="N", help="of the random inputs (default: fresh)"
    )
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="grade with N seeds; all must pass"
    )
    parser.add_argument(
        "--mutants", action="store_true", help="grade the grader; writes its matrix"
    )


def run(arguments: argparse.Namespace) -> int:
    from minifer.course.book.builder import find_book
    from minifer.course.grading.client import GraderError

    if arguments.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {arguments.seeds}")
    book = find_book()
    try:
        return _mutants(book, arguments) if arguments.mutants else _grade(book, arguments)
    except GraderError as error:
        print(f"minifer: the grader does not work: {error}", file=sys.stderr)
        return 2


def _grade(book: Any, arguments: argparse.Namespace) -> int:
    import json
    import time

    from minifer.course.grading.grade import grade
    from minifer.course.grading.report import gradescope, table

    target = Path(arguments.target)
    if not target.exists() and not target.is_absolute():
        target = book.root / target
    seed = random.SystemRandom().getrandbits(32) if arguments.seed is None else arguments.seed
    seeds = range(seed, seed + arguments.seeds)
    begin = time.monotonic()
    grades = grade(book, arguments.ids, target.resolve(), seeds, hidden=arguments.hidden)
    print(table(grades.results))
    print(f"seed {seed}" + (f" to {seeds[-1]}" if len(seeds) > 1 else ""))
    if arguments.json:
        data = gradescope(grades.results, time.monotonic() - begin, grades.seeds, book.root)
        text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text, encoding="utf-8")
    return 0


def _mutants(book: Any, arguments: argparse.Namespace) -> int:
    import tempfile

    from minifer.course.grading.client import ForkServer
    from minifer.course.grading.mutants import load_mutants
    from minifer.course.grading.pick import exercises_of
    from minifer.course.grading.runner import run_exercise
    from minifer.course.grading.worker import Job

    seed = random.SystemRandom().getrandbits(32) if arguments.seed is None else arguments.seed
    with ForkServer(seed) as server, tempfile.TemporaryDirectory() as folder:
        for exercise in exercises_of(book, arguments.ids):
            mutants = load_mutants(book.solutions / "mutants" / f"{exercise.name}.py")
            for mutant in (m for m in mutants if m.exercise == exercise.id):
                wrong = Path(folder) / "answer.py"
                wrong.write_text(mutant.apply(exercise.master.read_text()))  # type: ignore[union-attr]
                job = Job(exercise.id, wrong, exercise.tests, seed, protected=(book.solutions,))
                result = run_exercise(server, job, exercise.master)
                failed = [t.name for t in result.tests if t.status == "failed"]
                dead = mutant.killed_by in failed if mutant.killed_by else bool(failed)
                verdict = "dead " if dead else mutant.status
                print(f"{verdict}  {mutant.id}  {failed or result.note}")
    return 0
