"""`minifer grade`: points for exercises, and the grader's own exam."""

from __future__ import annotations

import argparse
import random
import sys
from importlib.util import find_spec
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
            ("grade 4 --gradescope ex04.zip", "an autograder that Gradescope takes"),
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
    parser.add_argument(
        "--gradescope",
        type=Path,
        metavar="OUT.zip",
        help="write an autograder for Gradescope, and grade nothing",
    )


def run(arguments: argparse.Namespace) -> int:
    from minifer.course.book.builder import find_book
    from minifer.course.grading.client import GraderError

    if arguments.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {arguments.seeds}")
    if find_spec("pytest") is None:
        raise RuntimeError('the grader needs pytest: pip install "minifer[course]"')
    book = find_book()
    if arguments.gradescope:
        return _gradescope(book, arguments)
    try:
        return _mutants(book, arguments) if arguments.mutants else _grade(book, arguments)
    except GraderError as error:
        return _broken([str(error)])


def _gradescope(book: Any, arguments: argparse.Namespace) -> int:
    from minifer.course.grading.autograder import write_autograder

    found = write_autograder(book, arguments.ids, arguments.gradescope)
    size = arguments.gradescope.stat().st_size / 1e6
    print(f"{arguments.gradescope}: {size:.1f} MB, grades {', '.join(found)}")
    return 0


def _broken(errors: list[str]) -> int:
    for error in errors:
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
    if grades.errors:
        return _broken(grades.errors)
    if arguments.json:
        data = gradescope(grades.results, time.monotonic() - begin, grades.seeds, book.root)
        text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text, encoding="utf-8")
    return 0


def _mutants(book: Any, arguments: argparse.Namespace) -> int:
    """The exam; the same seeds each time, so that the page changes only when something changed."""
    from minifer.course.grading import matrix
    from minifer.course.grading.cheat_trial import try_cheats
    from minifer.course.grading.exam import Exam, examine
    from minifer.course.grading.pick import exercises_of

    first = arguments.seed or 0
    seeds = range(first, first + max(arguments.seeds, 5))
    path = book.lectures / "results" / "grader_matrix.json"

    def done(exam: Exam) -> None:
        named = [mutant for mutant in exam.named if mutant["status"] == "must_die"]
        dead = sum(mutant["killed_by"] in mutant["failing"] for mutant in named)
        print(
            f"{'✘' if exam.problems else '✔'}  {exam.exercise:5} named {dead} of {len(named)}, "
            f"automatic {exam.rate:.0%} of {exam.automatic}, trivial {sum(exam.trivial.values()):g}"
        )
        for problem in exam.problems:
            print(f"       {problem}")
        for change, reason in exam.survivors.items():
            print(f"       lives: {change}  ({reason or 'open'})")
        sys.stdout.flush()
        write([exam], [])  # an exam that is stopped keeps what it has found

    def write(exams: list[Exam], cheats: list[dict[str, str]]) -> list[Path]:
        data = matrix.load(path)  # read now: others may have written
        matrix.merge(data, exams, cheats)
        matrix.forget_others(data, [exercise.id for exercise in exercises_of(book)])
        return matrix.write(data, path)

    exams = examine(book, exercises_of(book, arguments.ids), seeds, done)
    cheats = [] if arguments.ids else try_cheats()
    gains = [cheat for cheat in cheats if cheat["gains"] != "0"]
    for cheat in gains:
        print(f"✘  a cheat gains: {cheat['what']}: {cheat['gains']}")
    for written in write([], cheats):
        print(written.relative_to(book.root))
    return 1 if gains or any(exam.problems for exam in exams) else 0
