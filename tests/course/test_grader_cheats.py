"""Every cheat gains nothing, and costs no other exercise a point."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from grader_book import server

import minifer
from minifer.course.grading.cheat_trial import make_book, try_cheat
from minifer.course.grading.cheats import CHEATS, Cheat

ROOT = str(Path(minifer.__file__).resolve().parents[1])

# One of each kind in every run of the tests; the others are slow.
ALWAYS = ["solution", "modules", "stack", "lying-list", "os-exit", "results"]
KINDS = [
    pytest.param(cheat, id=cheat.name, marks=[] if cheat.name in ALWAYS else [pytest.mark.slow])
    for cheat in CHEATS
]


@pytest.fixture(scope="module")
def exercises(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_book(tmp_path_factory.mktemp("book"))


@pytest.mark.parametrize("cheat", KINDS)
def test_gains_nothing(exercises: Path, cheat: Cheat) -> None:
    row = try_cheat(server(), exercises, cheat)
    assert row["gains"] == "0"
    assert not re.search(rf"{re.escape(ROOT)}|/proc/\d|cpython-", row["says"])


def test_an_honest_answer_gets_its_points(exercises: Path) -> None:
    honest = Cheat("honest", "nothing", "return False", answer="return RIGHT(values)")
    assert try_cheat(server(), exercises, honest)["gains"] == "3"


def test_an_attack_that_gets_through_would_be_seen(exercises: Path) -> None:
    through = Cheat("through", "nothing that is refused", "return True")
    assert try_cheat(server(), exercises, through)["gains"] == "3"


def test_names_are_unique() -> None:
    assert len({cheat.name for cheat in CHEATS}) == len(CHEATS)
    assert set(ALWAYS) <= {cheat.name for cheat in CHEATS}
