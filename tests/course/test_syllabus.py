"""The instructors' tables say what lectures and exercises say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("jupytext")

from minifer.course.book.builder import Book
from minifer.course.book.syllabus import problems, units, write_tables
from minifer.course.grading.pick import exercises_of

ROOT = Path(__file__).parents[2]
LECTURE = "# %% [markdown]\n# # L04 · Sums\n#\n# {}\n\n# %%\n1\n"
MASTER = """\
# %% [markdown]
# ### Exercise 4.1 - Add
#
# 4 points · difficulty 2/5 ●●○○○ · 15 minutes · CPU
#
# ### Exercise 4.2 ★ - Add more
#
# 1 point · optional · difficulty 3/5 ●●●○○ · 5 minutes · CPU
"""
PAGE = """A
<!-- lectures: begin -->
<!-- lectures: end -->
B
<!-- exercises: begin -->
<!-- exercises: end -->
"""


@pytest.fixture
def book(tmp_path: Path) -> Book:
    (tmp_path / "lectures/src").mkdir(parents=True)
    (tmp_path / "solutions").mkdir()
    (tmp_path / "lectures/src/L04_sums.py").write_text(LECTURE.format("Reading: 60 minutes."))
    (tmp_path / "solutions/ex04_sums.py").write_text(MASTER)
    (tmp_path / "lectures/INSTRUCTORS.md").write_text(PAGE)
    return Book(tmp_path)


def test_tables_are_filled_in_and_stay(book: Book) -> None:
    assert list(problems(book)) == ["INSTRUCTORS.md has other points or minutes than the book: "
                                    "minifer book pages"]  # fmt: skip
    text = write_tables(book).read_text()
    assert "| [L04](L04_sums.ipynb) | Sums | 60 | 2 | 4 | 1 | 20 |" in text
    assert "| 4.2 ★ | Add more | 1 | 3/5 | 5 |" in text and text.startswith("A\n<!--")
    assert list(problems(book)) == [] and write_tables(book).read_text() == text


@pytest.mark.parametrize("line", ["60 minutes of reading, 5 of work.", "60 minutes to read."])
def test_minutes_may_be_said_in_several_ways(book: Book, line: str) -> None:
    (book.lectures / "src/L04_sums.py").write_text(LECTURE.format(line))
    assert units(book)[0].minutes == 60


def test_what_is_missing_is_said(book: Book) -> None:
    (book.solutions / "ex04_sums.py").write_text(MASTER.replace("difficulty 3/5", "hard"))
    with pytest.raises(ValueError, match=r"ex04_sums.py: below each of \['4.1', '4.2'\]"):
        units(book)
    (book.lectures / "src/L04_sums.py").write_text(LECTURE.format("Long."))
    with pytest.raises(ValueError, match="minutes of reading"):
        units(book)


def test_headings_promise_the_points_that_tests_give() -> None:
    promised = {task.id: task.points for unit in units(Book(ROOT)) for task in unit.tasks}
    for exercise in exercises_of(Book(ROOT)):
        text = exercise.tests.read_text(encoding="utf-8")
        given = re.findall(rf"@points\(\s*\"{re.escape(exercise.id)}\",\s*([\d.]+)", text)
        assert promised[exercise.id] == sum(map(float, given)), exercise.id
