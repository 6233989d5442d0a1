"""What an answer does on the probes of an exercise, and which known mistake does the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor

from minifer.course.grading.plain import array_as_tensor, fields_of, plain

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
