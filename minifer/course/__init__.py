"""What the book is made with: notebooks, pictures, exercises and their grader.

Nothing in the engine imports from here. A notebook needs five names: `begin` in its set-up cell,
`show` for a figure, `explore` for a widget with its static twin, `check` for an exercise, and
`example`, the three requests of the whole book.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "begin": "minifer.course.notebook",
    "check": "minifer.course.grading.check",
    "explore": "minifer.course.widgets",
    "show": "minifer.course.figures",
}

__all__ = ["begin", "check", "explore", "show"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
