"""The zip for Gradescope: unpacked where Gradescope would, it grades a submission."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from grader_book import make_book, solve

from minifer.cli import main
from minifer.course.book.builder import Book
from minifer.course.grading.autograder import write_autograder

ROOT = Path(__file__).parents[2]


def test_an_unpacked_zip_grades_a_submission(tmp_path: Path) -> None:
    """Gradescope's folders, with the environment of this test in the place of `setup.sh`."""
    book, place = make_book(tmp_path / "book"), tmp_path / "autograder"
    assert write_autograder(Book(book), ["91.1"], tmp_path / "out/ex91.zip") == ["91.1"]
    (place / "submission").mkdir(parents=True)
    wrong = solve("n < 0", "91.1", "n < -9")
    (place / "submission/ex91_small.py").write_text(wrong)
    shutil.unpack_archive(tmp_path / "out/ex91.zip", place / "source")
    run = place / "source/run_autograder"
    command = f'#!/bin/sh\nexec "{sys.executable}" -m minifer "$@"\n'
    (tmp_path / "minifer").write_text(command)
    (tmp_path / "minifer").chmod(0o755)
    done = subprocess.run(
        ["bash", str(run)], capture_output=True, text=True, timeout=120,
        env=os.environ | {"AUTOGRADER": str(place), "MINIFER": str(tmp_path / "minifer")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((place / "results/results.json").read_text())
    assert (results["score"], sum(t["max_score"] for t in results["tests"])) == (3, 4)
    assert {test["number"] for test in results["tests"]} == {"91.1"}


def test_the_books_zip_holds_what_one_lecture_needs_and_no_more(tmp_path: Path) -> None:
    write_autograder(Book(ROOT), ["4"], tmp_path / "ex04.zip")
    with zipfile.ZipFile(tmp_path / "ex04.zip") as archive:
        names = archive.namelist()
        modes = {n: archive.getinfo(n).external_attr >> 16 & 0o777 for n in names[:2]}
    assert modes == {"setup.sh": 0o755, "run_autograder": 0o755}
    needed = {"pyproject.toml", "constraints.txt", "minifer/engine.py", "kernels/registry.py",
              "exercises/tests/test_ex04.py", "exercises/tests/mistakes/ex04.json",
              "exercises/ex04_paged_kv.py", "solutions/ex04_paged_kv.py"}  # fmt: skip
    assert needed <= {name.removeprefix("minifer/") for name in names}
    assert not [n for n in names if "ex05" in n or "solutions/mutants" in n or "__pycache__" in n]
    assert len(names) == len(set(names))


def test_the_same_book_makes_the_same_zip(tmp_path: Path) -> None:
    book = Book(make_book(tmp_path / "book"))
    for name in ("a", "b"):
        write_autograder(book, [], tmp_path / f"{name}.zip")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_without_solutions_there_is_no_autograder(tmp_path: Path) -> None:
    book = make_book(tmp_path / "book")
    for path in (book / "solutions").glob("ex91*"):
        path.unlink()
    with pytest.raises(ValueError, match="solutions of ex91 must be in"):
        write_autograder(Book(book), [], tmp_path / "x.zip")


def test_the_command_writes_it_and_says_what_it_grades(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(make_book(tmp_path / "book"))
    assert main(["grade", "91", "--gradescope", str(tmp_path / "ex91.zip")]) == 0
    assert capsys.readouterr().out.rstrip().endswith(" MB, grades 91.1, 91.2")
