"""`minifer grade`: the table, Gradescope's file, which file counts, and exit statuses."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "course"))
from grader_book import MASTER, TESTS, make_book, server, solve

from minifer.cli import main
from minifer.course.book.builder import find_book
from minifer.course.grading import grade as grading
from minifer.course.grading.pick import choose, exercises_of
from minifer.course.grading.target import cells_of

Capture = pytest.CaptureFixture[str]


class Shared:
    """The tests' own fork server in the place of a new one."""

    def __init__(self, seed: int) -> None:
        self.hash_seed = seed + 1

    def __enter__(self) -> Any:
        shared = server()
        return type("Server", (), {"run": staticmethod(shared.run), "hash_seed": self.hash_seed})()

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(make_book(tmp_path))
    monkeypatch.setattr(grading, "ForkServer", Shared)
    return tmp_path


def test_prints_a_table_and_writes_gradescopes_file(book: Path, capsys: Capture) -> None:
    wrong = solve("n < 0", "91.1", "n < -9")
    (book / "exercises/ex91_small.py").write_text(wrong)
    assert main(["grade", "--seed", "3", "--json", "out/results.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["exercise", "points", "time"]
    assert lines[1].split()[:4] == ["✘", "91.1", "Square", "3/4"] and lines[1].endswith("no error")
    assert lines[2].split()[:5] == ["✔", "91.2", "★", "Count", "+3/3"]
    assert lines[3].split() == ["total", "3/4"] and lines[4].split()[-1] == "+3/3"
    assert "✘ test_ex91_1_refuses_what_is_below_zero (1 points)" in lines
    assert lines[-1] == "seed 3"

    data = json.loads((book / "out/results.json").read_text())
    assert list(data) == [
        "score", "execution_time", "output", "visibility", "stdout_visibility", "tests",
        "leaderboard", "extra_data",
    ]  # fmt: skip
    assert data["score"] == 6 and sum(test["max_score"] for test in data["tests"]) == 4
    refuses, large, counts = data["tests"][1:]
    assert refuses == {
        "name": "91.1 Square: refuses what is below zero",
        "number": "91.1",
        "score": 0,
        "max_score": 1,
        "status": "failed",
        "output": "tried     target.square(-2)\nexpected  ValueError\ngot       no error",
        "visibility": "visible",
        "tags": ["91.1"],
    }
    assert large["visibility"] == "after_due_date" and large["score"] == 1
    assert (counts["score"], counts["max_score"], counts["tags"]) == (3, 0, ["91.2", "optional"])
    extra = data["extra_data"]
    assert extra["seed"] == 3 and extra["runs"] == [{"seed": 3, "PYTHONHASHSEED": 4}]
    assert extra["not_attempted"] == [] and set(extra["versions"]) >= {"minifer", "torch"}


def test_exercises_by_default_and_never_the_solutions(book: Path, capsys: Capture) -> None:
    assert main(["grade", "91.1", "--json", "r.json"]) == 0
    data = json.loads((book / "r.json").read_text())
    assert data["score"] == 0 and data["extra_data"]["not_attempted"] == ["91.1"]
    assert data["tests"][0]["tags"] == ["91.1", "not attempted"]
    assert main(["grade", "91.1", "--target", "solutions", "--seeds", "2", "--public"]) == 0
    out = capsys.readouterr().out
    assert "3/3" in out and "seed " in out and " to " in out


def test_a_broken_test_file_is_exit_status_2_and_leaves_the_others_graded(
    book: Path, capsys: Capture
) -> None:
    (book / "exercises/tests/test_ex92.py").write_text(TESTS.replace("91.", "92.") + "\n)")
    (book / "solutions/ex92_broken.py").write_text(MASTER)
    assert main(["grade", "--target", "solutions", "--json", "r.json"]) == 2
    captured = capsys.readouterr()
    assert "91.1 Square" in captured.out and "SyntaxError" in captured.err
    assert not (book / "r.json").exists()


def test_a_folder_without_the_file_is_not_attempted(book: Path, capsys: Capture) -> None:
    (book / "empty").mkdir()
    assert main(["grade", "91.1", "--target", "empty"]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("not attempted")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["93.1"], "ID must be an exercise"),
        (["--target", "nowhere"], "--target must be a folder or a file"),
        (["--seeds", "0"], "--seeds must be at least 1"),
    ],
)
def test_bad_usage(book: Path, capsys: Capture, arguments: list[str], words: str) -> None:
    assert main(["grade", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_script_or_notebook_whichever_was_worked_on(book: Path) -> None:
    first, second = exercises_of(find_book(book))
    script, notebook = (book / f"exercises/ex91_small{suffix}" for suffix in (".py", ".ipynb"))
    folder = book / "exercises"
    assert choose(first, folder) == (script, "")

    stub = '# YOUR CODE HERE\n    raise NotImplementedError("ex91.1")'
    cells = []
    for cell in cells_of(script):
        heading, code = (
            f"### Exercise {cell.exercise} - X",
            cell.source.replace(stub, "return n * n"),
        )
        cells.append({"cell_type": "markdown", "source": [heading, "\n"]})
        cells.append({"cell_type": "code", "source": code.splitlines(keepends=True)})
    notebook.write_text(json.dumps({"cells": cells, "nbformat": 4}))
    assert choose(first, folder) == (notebook, "")  # 91.1 in the notebook, 91.2 in neither
    assert choose(second, folder) == (script, "")

    same = script.read_text().replace(stub, "return n * n  # the same but for a remark")
    script.write_text(same)
    assert choose(first, folder) == (script, "")
    script.write_text(same.replace("n * n", "n ** 2"))
    os.utime(script, (1, 1))
    chosen, note = choose(first, folder)
    assert chosen == notebook and "differ here: the newer one, ex91_small.ipynb" in note
    os.utime(script)
    assert choose(first, folder)[0] == script
    notebook.write_text("{")
    chosen, note = choose(first, folder)
    assert chosen == script and "must be a notebook" in note


@pytest.mark.slow
def test_the_exam_writes_its_page_and_fails_when_a_mistake_gets_through(
    book: Path, capsys: Capture
) -> None:
    assert main(["grade", "91.1", "--mutants"]) == 0
    out = capsys.readouterr().out
    assert "named 2 of 2" in out and "lectures/results/grader_matrix.md" in out
    page = (book / "lectures/results/grader_matrix.md").read_text()
    assert "the sum misses its last term" in page
    mutants = (book / "solutions/mutants/ex91.py").read_text()
    (book / "solutions/mutants/ex91.py").write_text(mutants.replace("n < -9", "n < -1"))
    assert main(["grade", "91.1", "--mutants"]) == 1
    assert "passes test_ex91_1_refuses_what_is_below_zero" in capsys.readouterr().out


def test_without_pytest_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("minifer.cli.grade.find_spec", lambda name: None)
    assert main(["grade", "4.1"]) != 0
    error = capsys.readouterr().err
    assert 'the grader needs pytest: pip install "minifer[course]"' in error
