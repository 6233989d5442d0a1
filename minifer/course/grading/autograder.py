"""A zip for Gradescope: `setup.sh` builds the image once, `run_autograder` grades one submission.

The zip holds what `minifer grade` needs and nothing of this machine: the packages, the tests and
solutions of the exercises that are wanted, and the results that tests read. Solutions are in it,
because an exception is blamed on a test only if the solution passes; submissions cannot read them.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from minifer.course.book.builder import Book
from minifer.course.grading.pick import exercises_of

_PACKAGES = ("minifer", "kernels", "parcae")
_PROJECT = ("pyproject.toml", "constraints.txt", "README.md", "LICENSE")
_LEFT_OUT = {"__pycache__", ".ipynb_checkpoints"}
_DATE = (1980, 1, 1, 0, 0, 0)  # the same files make the same zip
SETUP = """\
#!/usr/bin/env bash
# Gradescope runs this once, while it builds the image: an environment with minifer and pytest.
set -euo pipefail
source=/autograder/source/minifer
apt-get update
apt-get install -y python3 python3-venv
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "choose an image with Python 3.11")'
python3 -m venv /autograder/venv
/autograder/venv/bin/pip install "$source" pytest -c "$source/constraints.txt"
"""
RUN = """\
#!/usr/bin/env bash
# Gradescope runs this for each submission. AUTOGRADER and MINIFER are for a trial elsewhere.
set -euo pipefail
autograder=${{AUTOGRADER:-/autograder}}
cd "$autograder/source/minifer" # where exercises/tests and solutions lie
mkdir -p "$autograder/results"
"${{MINIFER:-/autograder/venv/bin/minifer}}" grade {ids} \\
    --target "$autograder/submission" --json "$autograder/results/results.json"
"""


def write_autograder(book: Book, ids: Sequence[str], out: Path) -> list[str]:
    """Write the zip; returns the ids of its exercises. ids: "4.3", "4"; none for all.

    Raises `ValueError` for an id that there is not, and where solutions are missing.
    """
    exercises = exercises_of(book, ids)
    if missing := sorted({e.name for e in exercises if e.master is None}):
        raise ValueError(f"solutions of {', '.join(missing)} must be in {book.solutions}")
    found = [exercise.id for exercise in exercises]
    out.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        _add(archive, "setup.sh", SETUP.encode(), 0o755)
        _add(archive, "run_autograder", RUN.format(ids=" ".join(found)).encode(), 0o755)
        for path in sorted(set(_files(book, {exercise.name for exercise in exercises}))):
            name = f"minifer/{path.relative_to(book.root).as_posix()}"
            _add(archive, name, path.read_bytes(), 0o644)
    return found


def _files(book: Book, names: set[str]) -> Iterator[Path]:
    """names: "ex04"."""
    yield from (path for name in _PROJECT if (path := book.root / name).is_file())
    for package in _PACKAGES:
        for path in (book.root / package).rglob("*"):
            if path.is_file() and not _LEFT_OUT & set(path.parts) and path.suffix != ".so":
                yield path
    tests = book.exercises / "tests"
    yield from (path for path in tests.glob("*.py") if not path.name.startswith("test_ex"))
    yield from (book.lectures / "results").glob("*.json")
    for name in names:
        yield tests / f"test_{name}.py"
        yield from (tests / "mistakes").glob(f"{name}.json")
        yield from book.exercises.glob(f"{name}_*.py")
        yield from book.solutions.glob(f"{name}_*.py")


def _add(archive: zipfile.ZipFile, name: str, data: bytes, mode: int) -> None:
    entry = zipfile.ZipInfo(name, _DATE)
    entry.external_attr = (0o100000 | mode) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, data)
