"""Known mistakes: small changes of a solution that its tests must notice."""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Mutant:
    """One mistake, as a change of the solution's text.

    id: "ex04_3_m2_cow_forgotten". old: text that occurs once in the master; new: what stands there
    instead. diagnosis: the sentence a learner with this mistake reads. killed_by: the test
    that covers the clause. status: "equivalent" with a note when no test may notice.
    """

    id: str
    exercise: str
    old: str
    new: str
    diagnosis: str
    killed_by: str = ""
    status: Literal["must_die", "equivalent"] = "must_die"
    note: str = ""

    def apply(self, source: str) -> str:
        """The master's text with the mistake. Raises `ValueError` unless `old` occurs once."""
        if source.count(self.old) != 1:
            raise ValueError(f"{self.id}: `old` occurs {source.count(self.old)} times, must be 1")
        return source.replace(self.old, self.new)


def load_survivors(path: Path) -> dict[str, str]:
    """`SURVIVORS` of a file in solutions/mutants: id of an automatic change → why it may live."""
    return dict(runpy.run_path(str(path)).get("SURVIVORS", {})) if path.is_file() else {}


def load_mutants(path: Path) -> list[Mutant]:
    """`MUTANTS` of a file in solutions/mutants; none when there is no file."""
    return list(runpy.run_path(str(path))["MUTANTS"]) if path.is_file() else []
