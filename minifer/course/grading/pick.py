"""Which exercises there are, and which file of a learner holds the answer to each."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from minifer.course.book.builder import Book
from minifer.course.grading.runner import exercises_in, wanted
from minifer.course.grading.target import STUB, Cell, cells_of, headings_of


@dataclass(frozen=True)
class Exercise:
    """id: "4.3". name: "ex04", of its files. title: "Fork and copy-on-write".

    optional: its heading has a ★, its points are extra. master: the solution's file, None where
    solutions are not there.
    """

    id: str
    name: str
    tests: Path
    title: str
    optional: bool
    master: Path | None


def exercises_of(book: Book, ids: Sequence[str] = ()) -> list[Exercise]:
    """The exercises asked for ("4.3", "4", "ex04"), of all test files, in order.

    Raises `ValueError` for an id that there is not.
    """
    found = []
    for tests in sorted((book.exercises / "tests").glob("test_ex*.py")):
        name = tests.stem.removeprefix("test_")
        master = next(iter(book.solution_sources(name)), None)
        script = master or next(iter(sorted(book.exercises.glob(f"{name}_*.py"))), None)
        titles = headings_of(script) if script else {}
        for exercise in exercises_in(tests):
            heading = titles.get(exercise, "")
            title = heading.partition(" - ")[2].replace("★", "").strip()
            found.append(Exercise(exercise, name, tests, title, "★" in heading, master))
    for asked in ids:
        if not any(wanted(exercise.id, [asked]) for exercise in found):
            raise ValueError(f"ID must be an exercise (4.3) or a lecture's number, got {asked!r}")
    return [exercise for exercise in found if wanted(exercise.id, ids)]


def choose(exercise: Exercise, target: Path) -> tuple[Path | None, str]:
    """The learner's file for an exercise, and what to say of the choice.

    target: a folder with `ex04_*.py` or `.ipynb`, or a file. Of a script and a notebook the one
    that was worked on is taken; if both were and they differ, the newer one. None: there is none.
    """
    if target.is_file():
        return target, ""
    if not target.is_dir():
        raise ValueError(f"--target must be a folder or a file, got {target}")
    files = [
        path
        for suffix in (".py", ".ipynb")
        for path in sorted(target.glob(f"{exercise.name}_*{suffix}"))
    ]
    if len(files) <= 1:
        return (files[0] if files else None), ""
    script, notebook = files[0], files[-1]
    try:
        mine = [_part(cells_of(file), exercise.id) for file in (script, notebook)]
    except ValueError as error:  # a notebook that cannot be read
        return script, str(error)
    stubs = [_stubs(cells, exercise.id) for cells in mine]
    if _same(*mine):
        return script, ""
    if stubs[0] != stubs[1]:
        return (script if stubs[0] < stubs[1] else notebook), ""
    newer, older = sorted((script, notebook), key=lambda p: p.stat().st_mtime, reverse=True)
    return newer, f"{newer.name} and {older.name} differ here: the newer one, {newer.name}, counts"


def _part(cells: Iterable[Cell], exercise: str) -> list[Cell]:
    return [cell for cell in cells if cell.exercise == exercise]


def _stubs(cells: list[Cell], exercise: str) -> int:
    """How many places still say that they are not attempted."""
    count = 0
    for cell in cells:
        for part in cell.source.split("NotImplementedError(")[1:]:
            found = STUB.search(part.split(")")[0])
            count += found is not None and found[1] == exercise
    return count


def _same(first: list[Cell], second: list[Cell]) -> bool:
    """Whether both say the same to Python, whatever the layout and the comments."""
    try:
        dumps = [
            [ast.dump(cell.compiled(ast.PyCF_ONLY_AST)) for cell in cells]
            for cells in (first, second)
        ]
    except SyntaxError:
        return [cell.source for cell in first] == [cell.source for cell in second]
    return dumps[0] == dumps[1]
