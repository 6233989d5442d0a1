"""Points and minutes, read from the sources: the tables of `lectures/INSTRUCTORS.md`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minifer.course.book.builder import Book

PAGE = "INSTRUCTORS.md"
_READING = re.compile(
    r"(?i)reading:? (\d+) minutes|(\d+) minutes of reading|(\d+) minutes to read|(\d+) minutes"
)
_EXERCISE = re.compile(
    r"^# ### Exercise (?P<id>\d+\.\d+)(?P<star> ★)? - (?P<title>.+)\n#\n"
    r"# (?P<points>\d+) points?\b[^\n]*?\bdifficulty (?P<difficulty>\d)/5[^\n]*?"
    r"(?P<minutes>\d+) minutes(?P<rest>[^\n]*)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Task:
    """An exercise as its heading announces it. optional: its points are extra."""

    id: str
    title: str
    points: int
    difficulty: int
    minutes: int
    optional: bool


@dataclass(frozen=True)
class Unit:
    """A lecture and its exercises. name: "L04". minutes: of reading."""

    name: str
    title: str
    notebook: str
    minutes: int
    tasks: tuple[Task, ...]

    @property
    def points(self) -> int:
        return sum(task.points for task in self.tasks if not task.optional)

    @property
    def extra(self) -> int:
        return sum(task.points for task in self.tasks if task.optional)

    @property
    def task_minutes(self) -> int:
        return sum(task.minutes for task in self.tasks)


def units(book: Book) -> list[Unit]:
    """Raises `ValueError` when a lecture or an exercise does not say its minutes."""
    return [_unit(book, source) for source in book.lecture_sources()]


def _unit(book: Book, source: Path) -> Unit:
    first = source.read_text(encoding="utf-8").split("\n# %%")[0]
    title, minutes = re.search(r"(?m)^# # L\d\d · (.+)$", first), _READING.search(first)
    if title is None or minutes is None:
        raise ValueError(f"{source.name}: the first cell must have a title and minutes of reading")
    masters = book.solution_sources(f"ex{source.name[1:3]}")
    tasks = tuple(task for master in masters for task in _tasks(master))
    number = next(filter(None, minutes.groups()))
    return Unit(source.name[:3], title[1], f"{source.stem}.ipynb", int(number), tasks)


def _tasks(master: Path) -> Iterator[Task]:
    text = master.read_text(encoding="utf-8")
    found = list(_EXERCISE.finditer(text))
    headings = re.findall(r"(?m)^# ### Exercise (\d+\.\d+)", text)
    if headings != [task["id"] for task in found]:
        raise ValueError(
            f"{master.name}: below each of {headings} must stand points, difficulty N/5 and minutes"
        )
    for task in found:
        points, difficulty, minutes = map(int, task.group("points", "difficulty", "minutes"))
        optional = "optional" in task[0] or task["star"] is not None
        title = task["title"].strip()
        yield Task(task["id"], title, points, difficulty, minutes, optional=optional)


def problems(book: Book) -> Iterator[str]:
    """What is wrong with the tables, a sentence each; nothing where there is no such page."""
    path = book.lectures / PAGE
    if path.is_file() and path.read_text(encoding="utf-8") != _filled(book, path):
        yield f"{PAGE} has other points or minutes than the book: minifer book pages"


def write_tables(book: Book) -> Path:
    """Fill the tables in. Raises `ValueError` when the page lacks the marks between which."""
    path = book.lectures / PAGE
    path.write_text(_filled(book, path), encoding="utf-8", newline="\n")
    return path


def _filled(book: Book, path: Path) -> str:
    text, found = path.read_text(encoding="utf-8"), units(book)
    for name, table in (("lectures", _lectures(found)), ("exercises", _exercises(found))):
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{path.name} must have {begin.strip()} and {end}, once each")
        head, rest = text.split(begin)
        text = f"{head}{begin}\n" + "\n".join(table) + f"\n\n{end}{rest.split(end)[1]}"
    return text


def _lectures(found: list[Unit]) -> list[str]:
    rows = [
        f"| [{u.name}]({u.notebook}) | {u.title} | {u.minutes} | {len(u.tasks)} | {u.points} | "
        f"{u.extra or ''} | {u.task_minutes} |"
        for u in found
    ]
    reading, working = sum(u.minutes for u in found), sum(u.task_minutes for u in found)
    total = (
        f"| | **all** | **{reading}** ({reading / 60:.0f} h) | "
        f"**{sum(len(u.tasks) for u in found)}** | **{sum(u.points for u in found)}** | "
        f"**{sum(u.extra for u in found)}** | **{working}** ({working / 60:.0f} h) |"
    )
    return [
        "| | lecture | reading, min | exercises | points | ★ | exercises, min |",
        "|---|---|--:|--:|--:|--:|--:|",
        *rows,
        total,
    ]


def _exercises(found: list[Unit]) -> list[str]:
    rows = [
        f"| {task.id}{' ★' if task.optional else ''} | {task.title} | {task.points} | "
        f"{task.difficulty}/5 | {task.minutes} |"
        for unit in found
        for task in unit.tasks
    ]
    return ["| | exercise | points | difficulty | minutes |", "|---|---|--:|---|--:|", *rows]
