"""The bug clinic: faults of production engines, each a switch on the real engine.

A fault is data: what happens, what a user sees, who reported it, which detector is expected to
notice, and `inject`, a context manager that breaks a running `Engine` in the way a real one was
broken. It patches methods and functions and puts them back; no copy of the engine has the bug.

::

    fault = get("eos-ignored")
    with fault.inject(engine):
        ...  # serve
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minifer.engine import Engine

Inject = Callable[["Engine"], AbstractContextManager[None]]

# The files that hold faults, in the order of the book.
_CHAPTERS = ("numerics", "memory", "reuse", "lifecycle", "text", "tools", "tiers")


@dataclass(frozen=True)
class Source:
    """A public report of such a fault."""

    title: str
    url: str


def github(repository: str, number: int, title: str) -> Source:
    """An issue or pull request; GitHub redirects from one to the other."""
    url = f"https://github.com/{repository}/issues/{number}"
    return Source(f"{repository}#{number}: {title}", url)


@dataclass(frozen=True)
class Fault:
    """One fault.

    name: a slug. mechanism: what goes wrong in the engine. symptom: what a user sees.
    detectors: names of `detectors.py` that are expected to notice, in debug mode too.
    inject: `with fault.inject(engine):` breaks it; also functions of modules may be patched, so
        other engines of the process are broken as well until the block ends.
    scene: serves something on an engine and tells what came out; the same scene on a healthy and
        on a broken engine shows the symptom. options: the `EngineConfig` fields it needs.
    """

    name: str
    title: str
    mechanism: str
    symptom: str
    sources: tuple[Source, ...]
    detectors: tuple[str, ...]
    inject: Inject
    scene: Callable[[Engine], str]
    options: Mapping[str, Any] = field(default_factory=dict)


@functools.cache
def _faults() -> Mapping[str, Fault]:
    chapters = (import_module(f"minifer.faults.{chapter}").FAULTS for chapter in _CHAPTERS)
    return {fault.name: fault for chapter in chapters for fault in chapter}


def names() -> list[str]:
    """The names of all faults, in the order of the book."""
    return list(_faults())


def get(name: str) -> Fault:
    """A fault by its name. Raises `ValueError` for a name that is not one of `names()`."""
    if name not in _faults():
        raise ValueError(f"fault must be one of {', '.join(names())}, got {name!r}")
    return _faults()[name]


@contextmanager
def patched(target: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of an object, class or module, and put them back whatever happens."""
    own = vars(target)
    before = {name: own[name] for name in attributes if name in own}
    for name in attributes:
        getattr(target, name)  # a patch that hits nothing is a bug of its own
    try:
        for name, value in attributes.items():
            setattr(target, name, value)
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(target, name, before[name])
            else:
                delattr(target, name)
