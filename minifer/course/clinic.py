"""The ward of exercises 09: engines of which one part may be broken, seen through a window.

Who has which fault is the order of digests, so that reading this file is no diagnosis; the
engines, the faults and the model are the real ones.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType

import torch

from minifer.course import example
from minifer.course.clinic_window import Reply, Window, window
from minifer.faults import registry
from minifer.faults.matrix import demonstrate
from minifer.weights.resolve import LoadedModel

__all__ = ["MENU", "Reply", "Window", "healthy", "patient", "report", "variant", "window"]

# The menu: fault of `minifer.faults` → the part of the engine that has it.
MENU: Mapping[str, str] = MappingProxyType(
    {
        "hash-without-parent": "key",
        "held-bytes-dropped": "characters",
        "lost-boundary-slot": "slots",
        "off-by-one-length": "length",
        "resumed-with-prompt-only": "resume",
        "salt-ignored": "key",
        "stop-string-leaks": "release",
        "wrong-position-after-preemption": "positions",
    }
)
NUM_PATIENTS = 4
_WARD = "ward 174"
# Inside the grader an answer meets no patient but those it is handed.
_IN_GRADER = os.environ.get("MINIFER_GRADING") == "1"


def healthy() -> Window:
    """An engine without a fault, to compare with."""
    return window(name="a healthy engine")


def patient(number: int) -> Window:
    """The patient of exercise 9.`number`, 1 to 4; inside the grader a healthy engine.

    A test does not call it: it takes the engine it is given. Raises `ValueError` otherwise.
    """
    name = fault_of(number)
    if _closed:
        raise ValueError("a test looks at the engine that it is given, and calls no patient")
    return window(None if _IN_GRADER else name, name=f"patient {number}")


def report(number: int) -> str:
    """What the patient says where a healthy engine says something else: the complaint's scene."""
    name = fault_of(number)
    if _IN_GRADER:
        return ""
    well, ill = demonstrate(example.tiny(), registry.get(name))
    return f"a healthy engine\n{well}\n\npatient {number}\n{ill}"


def fault_of(number: int) -> str:
    """The fault of the patient. For the grader."""
    if number not in range(1, NUM_PATIENTS + 1):
        raise ValueError(f"number must be in 1 to {NUM_PATIENTS}, got {number!r}")
    digests = {name: hashlib.sha256(f"{_WARD} {name}".encode()).digest() for name in MENU}
    return sorted(MENU, key=digests.__getitem__)[number - 1]


def variant(generator: torch.Generator, amount: float = 0.1) -> LoadedModel:
    """minifer-tiny with each weight off by about `amount` of itself: other words, same engine."""
    loaded = example.tiny()
    model = copy.deepcopy(loaded.model)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.mul_(1 + amount * noise)
    return replace(loaded, model=model)


_closed: list[bool] = []


@contextmanager
def closed_ward() -> Iterator[None]:
    """While a learner's test runs, `patient` refuses."""
    _closed.append(True)
    try:
        yield
    finally:
        _closed.pop()
