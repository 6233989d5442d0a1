"""The learner's file as a namespace: loaded fresh, without a way to the answers."""

from __future__ import annotations

import builtins
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any

# What an answer may not import: the engine (it holds the answers) and ways around that.
_BLOCKED = ("minifer", "solutions", "importlib", "ctypes", "gc", "inspect", "subprocess", "socket")
_ALLOWED = ("minifer.course",)  # for `check` and the running example


class BlockedImportError(ImportError):
    """An answer imported what it should have written."""


def load_answer(path: Path, allowed: Collection[str] = ()) -> ModuleType:
    """Run a learner's .py or .ipynb in a module of its own.

    allowed: modules of minifer that this exercise may import. Raises whatever the file raises, and
    `BlockedImportError` for an import of the engine or of the solutions.
    """
    code = _source(path)
    module = ModuleType("answer")
    module.__file__ = str(path)
    open_to = (*_ALLOWED, *allowed)

    def guarded(name: str, *args: Any, **kwargs: Any) -> Any:
        inside = any(name == good or name.startswith(good + ".") for good in open_to)
        if name.split(".")[0] in _BLOCKED and not inside:
            raise BlockedImportError(f"an answer may not import {name}: write it yourself")
        return builtins.__import__(name, *args, **kwargs)

    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": guarded}
    exec(compile(code, str(path), "exec"), module.__dict__)
    return module


def _source(path: Path) -> str:
    if path.suffix != ".ipynb":
        return path.read_text(encoding="utf-8")
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
