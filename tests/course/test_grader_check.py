"""`check("91.1")` on live objects: a line, no exception, nothing printed, time after time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from grader_book import MASTER, TESTS, make_book, solve

from minifer.course import check
from minifer.course.book.exercises import stub_of


def checked(folder: Path, text: str, exercise: str = "91.1", **options: Any) -> str:
    """What `check` says in a file of that folder which has just been run."""
    names: dict[str, Any] = {"__file__": str(folder / "ex91_small.py"), "check": lambda name: None}
    text = text.replace("from minifer.course import check\n", "")
    exec(compile(text, names["__file__"], "exec"), names)
    names["check"] = check
    exec(f"result = check({exercise!r})", names)
    return repr(names["result"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_book(tmp_path) / "exercises"


def test_says_one_of_three_things_and_prints_nothing(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = solve("range(n)", "91.1", "range(n + 1)").replace("print(square(3))", "")
    silent = MASTER.replace("print(square(3))", "")
    before = set(sys.modules), list(sys.path)
    for _ in range(2):
        assert checked(folder, silent) == "✔ 91.1 passed (4 tests)"  # not the hidden one
        assert checked(folder, stub_of(MASTER, "ex91")) == "… 91.1 not attempted"
        assert checked(folder, wrong).splitlines() == [
            "✘ 91.1: test_ex91_1_squares",
            "tried     square(1)",
            "got       2",
            "expected  1",
            "expected 1, got 2",
        ]
    assert checked(folder, silent.replace("total = 0", "total = print('loud') or 0")).startswith(
        "✔"
    )
    assert capfd.readouterr() == ("", "")
    assert list(sys.path) == before[1] and "test_ex91" not in sys.modules


def test_names_a_known_mistake(folder: Path) -> None:
    from minifer.course.grading.mistakes import fingerprint, mistakes_file
    from minifer.course.grading.target import Answer

    probes: dict[str, Any] = {}
    exec(TESTS, probes)
    wrong = Answer()
    exec(solve("range(n)", "91.1", "range(n - 1)").split("# %%\ncheck")[0], wrong.__dict__)
    mine = {name: probes[name] for name in ("probe_small", "probe_below_zero")}
    value = fingerprint(mine, lambda: wrong)
    path = mistakes_file(folder / "tests/test_ex91.py")
    path.parent.mkdir()
    path.write_text(json.dumps({"91.1": [{"id": "m", "diagnosis": "lazy", "fingerprint": value}]}))
    said = checked(folder, solve("range(n)", "91.1", "range(max(0, n - 1))"))
    assert said.splitlines()[-1] == "behaves like: lazy"


@pytest.mark.parametrize(
    ("exercise", "words"),
    [
        ("91.7", "there is no such exercise in test_ex91.py"),
        ("92.1", "there is no test_ex92.py in "),
        ("square", 'an exercise looks like "4.3"'),
    ],
)
def test_an_exercise_that_is_not_there(folder: Path, exercise: str, words: str) -> None:
    assert re.fullmatch(f"✘ {exercise}: {re.escape(words)}.*", checked(folder, MASTER, exercise))


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        (TESTS + "\n)", "SyntaxError"),
        ("import nowhere\n" + TESTS, "nowhere"),
        (TESTS.replace("n * n", "n * m", 1), "NameError: name 'm'"),
    ],
)
def test_a_broken_test_file_raises_nothing(tmp_path: Path, tests: str, words: str) -> None:
    said = checked(make_book(tmp_path, tests=tests) / "exercises", MASTER)
    assert said.startswith("✘ 91.1: test_ex91.py cannot work with this: ") and words in said


@pytest.mark.parametrize("end", ["raise SystemExit", "raise RuntimeError", "missing"])
def test_an_answer_that_ends_raises_nothing(folder: Path, end: str) -> None:
    assert (
        checked(folder, solve("total = 0\n", "91.1", f"{end}\n").split("### BEGIN A")[0])[0] == "✘"
    )


def test_ctrl_c_is_the_readers(folder: Path) -> None:
    text = solve("total = 0\n", "91.1", "raise KeyboardInterrupt\n").split("### BEGIN A")[0]
    with pytest.raises(KeyboardInterrupt):
        checked(folder, text)
    assert checked(folder, MASTER).startswith("✔")


def test_outside_a_clone_it_says_where_exercises_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert checked(tmp_path, MASTER) == (
        "✘ 91.1: the exercises are in a clone of minifer, in its folder exercises/: start there"
    )


@pytest.mark.slow
def test_a_script_run_from_elsewhere(folder: Path, tmp_path: Path) -> None:
    script = folder / "ex91_small.py"
    script.write_text(MASTER.replace('check("91.1")', 'print(check("91.1"))'))
    done = subprocess.run([sys.executable, str(script)], cwd="/", capture_output=True, text=True)
    assert done.stdout.splitlines()[0] == "✔ 91.1 passed (4 tests)" and not done.stderr
