"""A test file may say what it left out on this machine, and where kernels are graded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grader_book import MASTER, TESTS, make_book, run

from minifer.course import check

NOTED = TESTS.replace("import pytest", 'import pytest\n\nNOTE = "half of it was left out"')


def test_the_grader_says_it_beside_the_result(tmp_path: Path) -> None:
    result = run(make_book(tmp_path / "with", tests=NOTED), "91.1")
    assert (result.status, result.note) == ("passed", "half of it was left out")
    assert run(make_book(tmp_path / "without"), "91.1").note == ""


def test_check_says_it_below_its_line(tmp_path: Path) -> None:
    folder = make_book(tmp_path, tests=NOTED) / "exercises"
    text = MASTER.replace("from minifer.course import check\n", "")
    text = text.replace("print(square(3))", "")
    names: dict[str, Any] = {"__file__": str(folder / "ex91_small.py"), "check": lambda name: None}
    exec(compile(text, names["__file__"], "exec"), names)
    names["check"] = check
    exec('said = repr(check("91.1"))', names)
    assert names["said"].splitlines() == ["✔ 91.1 passed (4 tests)", "half of it was left out"]


def test_kernels_are_graded_in_the_interpreter_whatever_the_machine_has(tmp_path: Path) -> None:
    answer = MASTER.replace(
        "total = 0\n", 'import os\n    total = 0\n    print(os.environ["TRITON_INTERPRET"])\n'
    )
    assert run(make_book(tmp_path), "91.1", answer).printed.split()[0] == "1"


def test_what_the_files_own_cells_print_is_no_part_of_a_result(tmp_path: Path) -> None:
    answer = MASTER.replace("total = 0\n", 'print("in a test")\n    total = 1\n')
    answer = answer.replace('check("91.1")', 'print("of a cell")')
    printed = run(make_book(tmp_path), "91.1", answer).printed
    assert set(printed.splitlines()) == {"in a test"}
