"""`minifer grade`: points for exercises."""

from __future__ import annotations

import argparse
import random
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
        "own. --mutants grades the grader: every known mistake must lose points.",
        examples=[
            ("grade", "all exercises"),
            ("grade 4.3", "one exercise"),
            ("grade 4 --target solutions", "the solutions of one lecture"),
            ("grade 4 --mutants", "the grader's own exam"),
        ],
        code=[("minifer/course/grading/runner.py", "how an exercise is run")],
    )
    parser.add_argument("ids", nargs="*", metavar="ID", help="4.3, or 4 for all of lecture 4")
    parser.add_argument("--target", default="exercises", metavar="PATH", help="folder or file")
    parser.add_argument("--seed", type=int, default=None, metavar="N", help="(default: fresh)")
    parser.add_argument("--mutants", action="store_true", help="grade the known mistakes")


def run(arguments: argparse.Namespace) -> int:
    import tempfile

    from minifer.course.book.builder import find_book
    from minifer.course.grading.client import ForkServer
    from minifer.course.grading.mutants import load_mutants
    from minifer.course.grading.runner import exercises_in, run_exercise, wanted
    from minifer.course.grading.worker import Job

    book = find_book()
    seed = random.SystemRandom().getrandbits(32) if arguments.seed is None else arguments.seed
    with ForkServer(seed) as server:
        for tests in sorted((book.exercises / "tests").glob("test_ex*.py")):
            number = int(tests.stem[-2:])
            for exercise in exercises_in(tests):
                if not wanted(exercise, arguments.ids):
                    continue
                target = Path(arguments.target)
                target = target if target.is_file() else book.root / target
                (answer,) = target.glob(f"ex{number:02d}_*.py") if target.is_dir() else [target]
                (master,) = book.solution_sources(f"ex{number:02d}")
                closed = (book.solutions,)
                if not arguments.mutants:
                    job = Job(exercise, answer.resolve(), tests, seed, protected=closed)
                    _print(run_exercise(server, job, master))
                    continue
                for mutant in load_mutants(book.solutions / "mutants" / f"ex{number:02d}.py"):
                    if mutant.exercise == exercise:
                        with tempfile.TemporaryDirectory() as folder:
                            wrong = Path(folder) / "answer.py"
                            wrong.write_text(mutant.apply(master.read_text()))
                            job = Job(exercise, wrong, tests, seed, protected=closed)
                            result = run_exercise(server, job, master)
                        failed = [t.name for t in result.tests if t.status == "failed"]
                        dead = mutant.killed_by in failed if mutant.killed_by else bool(failed)
                        verdict = "dead " if dead else mutant.status
                        print(f"{verdict}  {mutant.id}  {failed or result.note}")
    return 0


def _print(result: Any) -> None:
    total = sum(test.points for test in result.tests)
    print(f"{result.exercise}  {result.score:g}/{total:g}  {result.seconds:.1f} s {result.note}")
    for test in result.tests:
        print(f"    {test.status:13} {test.name} ({test.points:g})")
        if test.message:
            print("        " + test.message.replace("\n", "\n        "))
