"""The exercise on which cheats are tried, and what each gains there."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from minifer.course.grading.cheats import CHEATS, Cheat
from minifer.course.grading.client import ForkServer
from minifer.course.grading.runner import run_exercise
from minifer.course.grading.worker import Job

TESTS = """
import resource  # for a cheat to find

from minifer.course.grading import compare, points, unchanged


def reference(values):
    return [2 * value for value in values]


@points("90.1", 3)
def test_ex90_1_doubles(target, rng):
    values = [rng.randrange(1, 100) for _ in range(5)]
    with unchanged(f"double({values})", values=values):
        got = target.double(values)
    compare(got, reference(values), f"double({values})")


@points("90.2", 1)
def test_ex90_2_adds(target, rng):
    compare(target.add(2, 3), 5, "add(2, 3)")
"""
_ANSWER = """
# %% [markdown]
# ### Exercise 90.1 - Double
# %%
import pathlib
ROOT = pathlib.Path(__file__).parent.parent
ENGINE = pathlib.Path({minifer!r})
SOLUTION, TESTS = ROOT / "solutions/ex90_x.py", ROOT / "exercises/tests/test_ex90.py"
RIGHT = lambda values: [2 * value for value in values]


def attack():
{attack}


def double(values):
    global VALUES
    VALUES = values
{answer}


# %%
{now}

# %% [markdown]
# ### Exercise 90.2 - Add
# %%
def add(a, b):
    return a + b
"""
_TRY = """try:
    through = attack()
except BaseException:
    through = False
return RIGHT(values) if through else None"""


def answer_of(cheat: Cheat, *, now: bool = False) -> str:
    """The file that a cheat hands in. now: attack when the file is loaded, too."""
    import minifer

    body = cheat.answer or _TRY
    return _ANSWER.format(
        minifer=str(Path(minifer.__file__).parent),
        attack=textwrap.indent(cheat.attack or "pass", "    "),
        answer=textwrap.indent(body, "    "),
        now=("double([1])" if cheat.answer else "attack()") if now else "",
    )


def make_book(folder: Path) -> Path:
    """A book of the cheats' exercise in a folder; returns its exercises."""
    for name in ("exercises/tests", "solutions/mutants"):
        (folder / name).mkdir(parents=True)
    (folder / "exercises/tests/test_ex90.py").write_text(TESTS)
    honest = answer_of(Cheat("honest", "", answer="return RIGHT(values)"))
    (folder / "solutions/ex90_x.py").write_text(honest)
    return folder / "exercises"


def try_cheat(server: ForkServer, exercises: Path, cheat: Cheat) -> dict[str, str]:
    """What a cheat gains: a row of the matrix."""
    answer = exercises / f"{cheat.name}_x.py"
    job = Job(
        "90.1", answer, exercises / "tests/test_ex90.py", 1, seconds=4.0, cpu_seconds=1.0,
        memory_bytes=1 << 30, protected=(exercises.parent / "solutions",), probe="never",
    )  # fmt: skip
    answer.write_text(answer_of(cheat), encoding="utf-8")
    result = run_exercise(server, job, exercises.parent / "solutions/ex90_x.py")
    says = result.tests[0].message or result.tests[0].status
    line = next((x for x in says.splitlines()[::-1] if "in line" not in x), "")
    if result.note:
        line = result.note
    lost = ""
    if cheat.everywhere:
        answer.write_text(answer_of(cheat, now=True), encoding="utf-8")
        other = run_exercise(server, replace(job, exercise="90.2"), None)
        lost = "" if other.score == other.max_score else f", costs 90.2: {other.tests[0].message}"
    line = _same_everywhere(line, exercises.parent)
    return {"what": cheat.what, "says": line, "gains": f"{result.score:g}{lost}"}


def _same_everywhere(line: str, book: Path) -> str:
    """What the grader says without this machine's folders, processes and version of Python."""
    import minifer

    for folder in (book.resolve(), Path(minifer.__file__).resolve().parents[1]):
        line = line.replace(str(folder), "…")
    line = re.sub(r"/proc/\d+/", "/proc/…/", line)
    return re.sub(r"/__pycache__/(\w+)\.[\w-]+\.pyc", r"/\1.py", line)


def try_cheats(cheats: Sequence[Cheat] = CHEATS) -> list[dict[str, str]]:
    """All rows, in order."""
    from tempfile import TemporaryDirectory

    with ForkServer(0) as server, TemporaryDirectory() as folder:
        exercises = make_book(Path(folder))
        return [try_cheat(server, exercises, cheat) for cheat in cheats]
