"""What the grader says of right, wrong, missing and broken answers, and of broken tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from grader_book import MASTER, TESTS, make_book, run, server, solve

from minifer.course.book.exercises import stub_of
from minifer.course.grading.client import ForkServer, GraderError
from minifer.course.grading.runner import over_seeds, run_exercise, wanted
from minifer.course.grading.worker import Job

LOOP = "total += n\n    return total"


@pytest.fixture
def book(tmp_path: Path) -> Path:
    return make_book(tmp_path)


def messages(result: object) -> list[str]:
    return [test.message for test in result.tests]  # type: ignore[attr-defined]


def test_the_solution_gets_all_points_and_the_stub_is_not_attempted(book: Path) -> None:
    result = run(book, "91.1")
    assert (result.status, result.score, result.max_score) == ("passed", 4, 4)
    for exercise in ("91.1", "91.2"):
        result = run(book, exercise, stub_of(MASTER, "ex91"))
        assert (result.status, result.score) == ("not attempted", 0)
        assert set(messages(result)) == {""}


def test_a_wrong_answer_fails_with_its_smallest_case_and_looks_like_a_known_mistake(
    book: Path,
) -> None:
    from minifer.course.grading.mistakes import write_mistakes

    path = write_mistakes(book / "solutions/ex91_small.py", server())
    assert "range" not in path.read_text()  # diagnoses, no code
    # not the mutant's text, only its behaviour
    wrong = solve(LOOP, "91.1", "total += n\n    return total - n if n else 0")
    first, second, hidden = run(book, "91.1", wrong).tests
    assert (first.status, second.status, hidden.status) == ("failed", "passed", "failed")
    assert first.message.splitlines() == [
        "tried     square(1)",
        "got       0",
        "expected  1",
        "expected 1, got 0",
        "behaves like: the sum misses its last term",
    ]
    assert first.case == "1" and "behaves like" not in hidden.message


def test_an_exception_of_the_answer_names_call_and_line(book: Path) -> None:
    wrong = solve(LOOP, "91.1", "total += missing\n    return total")
    first = run(book, "91.1", wrong).tests[0]
    assert first.status == "failed"
    tried, raised, place = first.message.splitlines()
    assert tried == "tried     square(n=1)"
    assert raised == "raised    NameError: name 'missing' is not defined"
    assert place == "in line 14 of ex91_small.py: total += missing"


def test_what_a_test_cannot_work_with_is_the_answers_failure_only_if_the_solution_passes(
    book: Path,
) -> None:
    nothing = solve(LOOP, "91.1", "total += n\n    return None")
    refuses = run(book, "91.1", nothing).tests[1]
    assert refuses.status == "failed" and "the test cannot work with what came" in refuses.message
    with pytest.raises(GraderError, match="the test file itself fails"):
        run(book, "91.1", nothing, clear=False)


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        (TESTS.replace("n * n", "n * m", 1), "NameError: name 'm' is not defined"),
        pytest.param("import nowhere\n" + TESTS, "nowhere", marks=pytest.mark.slow),
        pytest.param(
            TESTS.replace("(target, n)", "(target, n, unknown)"), "unknown", marks=pytest.mark.slow
        ),
        pytest.param(
            TESTS.replace("n * n", "float('nan')", 1), "must not be NaN", marks=pytest.mark.slow
        ),
        (TESTS + "\n)", "SyntaxError"),
    ],
)
def test_an_error_of_the_test_file_is_nobodys_failure(
    tmp_path: Path, tests: str, words: str
) -> None:
    with pytest.raises(GraderError, match=words):
        run(make_book(tmp_path, tests=tests), "91.1", MASTER + "\n# a solution")


def test_a_failed_refusal_shows_what_was_tried(book: Path) -> None:
    result = run(book, "91.1", solve("n < 0", "91.1", "n < -9"))
    assert messages(result) == [
        "",
        "tried     target.square(-2)\nexpected  ValueError\ngot       no error",
        "",
    ]


def test_a_cell_that_breaks_costs_its_exercise_and_no_other(book: Path) -> None:
    broken = solve("def square(n):", "91.1", "def square(n:")
    result = run(book, "91.1", broken)
    assert result.status == "failed" and result.score == 0
    assert "your file does not define square" in messages(result)[0]
    assert "(ex91_small.py, line 8: SyntaxError: " in messages(result)[0]
    assert run(book, "91.2", broken).status == "passed"
    exits = MASTER.replace('check("91.1")', "raise SystemExit")
    assert run(book, "91.2", exits).status == "passed"


def test_half_an_answer_is_failed_and_a_missing_part_names_the_exercise(book: Path) -> None:
    half = solve("self.count = 0", "91.2", "raise NotImplementedError('ex91.2')")
    assert run(book, "91.2", half).status == "not attempted"  # from the constructor
    needs = solve("self.count = 0", "91.2", "raise NotImplementedError('ex91.1')")
    assert messages(run(book, "91.2", needs)) == ["needs 91.1, not attempted"]
    other = solve("self.count = 0", "91.2", "raise NotImplementedError('todo')")
    assert run(book, "91.2", other).status == "failed"


def test_hash_randomisation_is_what_the_report_says(book: Path) -> None:
    prints = solve("total = 0\n", "91.1", "print(hash('x'))\n    total = 1\n")
    printed = run(book, "91.1", prints).printed.split()[0]
    environment = os.environ | {"PYTHONHASHSEED": str(server().hash_seed)}
    told = subprocess.run(
        [sys.executable, "-c", "print(hash('x'))"], env=environment, capture_output=True, text=True
    )
    assert printed == told.stdout.strip()


def test_a_dataclass_a_namedtuple_and_an_allowed_module_work(tmp_path: Path) -> None:
    tests = TESTS.replace("import pytest", 'import pytest\nALLOWED_IMPORTS = ("minifer.config",)')
    imports = (
        "from __future__ import annotations\nfrom collections import namedtuple\n"
        "from dataclasses import dataclass\nfrom minifer.config import EngineConfig\n"
        "@dataclass\nclass Point:\n    x: int\nPair = namedtuple('Pair', 'a b')\n"
        "EngineConfig.__name__\n"
    )
    text = MASTER.replace("from minifer.course import check\n", imports)
    book = make_book(tmp_path, tests=tests)
    uses = text.replace("return total\n", "return Point(Pair(total, 0).a).x\n")
    assert run(book, "91.1", uses).status == "passed"
    refused = text.replace("return total\n", "import minifer.kv.manager\n")
    result = run(book, "91.1", refused)
    assert "an answer may not import minifer.kv.manager" in messages(result)[0]


def test_a_module_can_be_open_to_one_exercise_alone(tmp_path: Path) -> None:
    imports = "from minifer.config import EngineConfig\n    return total\n"
    uses = MASTER.replace("return total\n", imports)
    for exercise, status in (("91.1", "passed"), ("91.2", "failed")):
        opened = f'import pytest\nALLOWED_IMPORTS = {{"{exercise}": ("minifer.config",)}}'
        book = make_book(tmp_path / exercise, tests=TESTS.replace("import pytest", opened))
        assert run(book, "91.1", uses).status == status


def test_a_test_counts_when_it_passes_with_every_seed(book: Path) -> None:
    good = run(book, "91.1")
    bad = run(book, "91.1", solve(LOOP, "91.1", "total += n\n    return total + (n > 50)"))
    both = over_seeds([good, bad])
    assert [test.status for test in both.tests] == ["passed", "passed", "failed"]
    assert both.tests[2].message.endswith("(with seed 1)")


def test_ids() -> None:
    assert wanted("4.3", []) and wanted("4.3", ["4"]) and wanted("4.3", ["5", "4.3"])
    assert wanted("4.3", ["ex04"]) and wanted("4.3", ["L04"]) and wanted("10.1", ["10"])
    assert not wanted("4.3", ["4.1"]) and not wanted("14.3", ["4"]) and not wanted("4.3", ["3"])


@pytest.mark.slow
def test_a_fresh_interpreter_does_the_same_as_a_fork(book: Path) -> None:
    """Where there is no fork, every job starts an interpreter of its own."""
    tests, master = book / "exercises/tests/test_ex91.py", book / "solutions/ex91_small.py"
    with ForkServer(7, fork=False) as fresh:
        result = run_exercise(fresh, Job("91.1", master, tests, 1), None)
        assert (result.status, result.score) == ("passed", 4)
        exits = book / "exercises/ex91_small.py"
        exits.write_text(solve(LOOP, "91.1", "while True:\n            pass"))
        job = Job("91.1", exits, tests, 1, cpu_seconds=1, seconds=10)
        assert run_exercise(fresh, job, None).score == 0
