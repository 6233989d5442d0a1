"""What an answer does on the probes of an exercise, and which known mistake does the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from minifer.course.grading.plain import array_as_tensor, fields_of, plain

if TYPE_CHECKING:
    from minifer.course.grading.client import ForkServer

_DIGITS = 4  # significant ones: the last bits of a sum depend on the machine
_TINY = 1e-6  # is zero
_DEEPEST = 20


def fingerprint(probes: Mapping[str, Callable[[Any], Any]], load: Callable[[], ModuleType]) -> str:
    """A digest of what the probes return, each on a freshly loaded answer.

    Floats are rounded, exceptions count by their type. Equal fingerprints: the answers cannot be
    told apart by these probes.
    """
    seen = []
    for name, probe in sorted(probes.items()):
        try:
            value = canonical(probe(load()))
        except Exception as error:
            value = f"raises {type(error).__name__}"
        seen.append(f"{name}: {value}")
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()[:16]


def canonical(value: Any, depth: int = 0) -> str:
    """A value as text that is the same on every machine and in every process."""
    if depth > _DEEPEST:
        return "deep"
    array = array_as_tensor(value)
    value = plain(value if array is None else array)
    kind = type(value)
    if kind is Tensor:
        numbers = value.tolist() if not value.is_meta else []
        name = "float" if value.is_floating_point() else str(value.dtype)
        return f"tensor {list(value.shape)} {name} {canonical(numbers, depth + 1)}"
    if kind is float:
        return "0f" if abs(value) < _TINY else f"{value:.{_DIGITS}g}f"
    if kind in (list, tuple):
        return f"[{', '.join(canonical(item, depth + 1) for item in value)}]"
    if kind is set:
        return "{" + ", ".join(sorted(canonical(item, depth + 1) for item in value)) + "}"
    if kind is dict:
        pairs = [f"{canonical(k, depth + 1)}: {canonical(v, depth + 1)}" for k, v in value.items()]
        return "{" + ", ".join(sorted(pairs)) + "}"
    if kind in (int, bool, str, bytes, complex) or value is None:
        return repr(value)
    if isinstance(value, np.generic):
        return canonical(value.item(), depth + 1)
    fields = fields_of(value)
    if fields is not None:
        return f"{kind.__name__} {canonical(fields, depth + 1)}"
    return f"a {kind.__name__}"


def known_mistakes(tests: Path, exercise: str) -> dict[str, str]:
    """Fingerprint → diagnosis, from `exercises/tests/mistakes/ex04.json`; empty without it."""
    path = mistakes_file(tests)
    if not path.is_file():
        return {}
    entries = json.loads(path.read_text(encoding="utf-8")).get(exercise, [])
    return {entry["fingerprint"]: entry["diagnosis"] for entry in entries}


def mistakes_file(tests: Path) -> Path:
    """Where the fingerprints of a test file's exercises lie."""
    return tests.parent / "mistakes" / f"{tests.stem.removeprefix('test_')}.json"


def resembles(tests: Path, exercise: str, value: str) -> str:
    """The last line of a message when the fingerprint is that of a known mistake, else ""."""
    diagnosis = known_mistakes(tests, exercise).get(value) if value else None
    return f"behaves like: {diagnosis}" if diagnosis else ""


def write_mistakes(master: Path, server: ForkServer | None = None) -> Path:
    """Run the probes on a solution and on its mutants; write `exercises/tests/mistakes/ex04.json`.

    server: to run on; one is started without. What is written holds no code: exercise → id,
    diagnosis and fingerprint of each known mistake. Raises `ValueError` that names the mutants
    whose fingerprint is the solution's or another's: a probe must tell them apart.
    """
    from tempfile import TemporaryDirectory

    from minifer.course.book.builder import find_book
    from minifer.course.grading.automatic import without_author
    from minifer.course.grading.client import ForkServer
    from minifer.course.grading.mutants import load_mutants
    from minifer.course.grading.runner import exercises_in
    from minifer.course.grading.worker import Job

    book, name = find_book(master.parent), master.stem.split("_")[0]
    tests = book.exercises / "tests" / f"test_{name}.py"
    text = master.read_text(encoding="utf-8")
    mutants = [
        mutant
        for mutant in load_mutants(book.solutions / "mutants" / f"{name}.py")
        if mutant.status == "must_die"
    ]
    entries: dict[str, list[dict[str, str]]] = {}
    problems: list[str] = []
    with (
        nullcontext(server) if server else ForkServer(0) as running,
        TemporaryDirectory() as folder,
    ):

        def ask(exercise: str, answer: str) -> str:
            path = Path(folder) / "answer.py"
            path.write_text(answer, encoding="utf-8")
            protected = (book.solutions, tests.parent)
            job = Job(exercise, path, tests, 0, cpu_seconds=10, protected=protected, probe="only")
            return running.run(job).fingerprint

        for exercise in exercises_in(tests) if tests.is_file() else ():
            seen = {ask(exercise, without_author(text)): "the solution"}
            if "" in seen:
                continue  # no probe, or one that does not end
            for mutant in (m for m in mutants if m.exercise == exercise):
                value = ask(exercise, without_author(mutant.apply(text)))
                if value in seen:
                    problems.append(f"{mutant.id} does what {seen[value]} does")
                elif value:
                    seen[value] = mutant.id
                    entries.setdefault(exercise, []).append(
                        {"id": mutant.id, "diagnosis": mutant.diagnosis, "fingerprint": value}
                    )
    if problems:
        raise ValueError(f"the probes of {tests.name} must tell apart: {'; '.join(problems)}")
    path = mistakes_file(tests)
    path.parent.mkdir(exist_ok=True)
    content = json.dumps(entries, indent=1, ensure_ascii=False) + "\n"
    path.write_text(content, encoding="utf-8", newline="\n")
    return path
