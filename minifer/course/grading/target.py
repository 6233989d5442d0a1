"""The learner's file as a namespace: cell by cell, without a way to the answers."""

from __future__ import annotations

import ast
import builtins
import json
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from minifer.course.grading.sandbox import BLOCKED, BlockedError, may_import

# Of minifer an answer may use the notebook's names and the book's example; never the engine.
_NAMES = """
    begin check explore show
    example.TRIO example.run example.tiny example.BLOCK_SIZE example.NUM_BLOCKS example.BUDGET
"""
OPEN = tuple(f"minifer.course.{name}" for name in _NAMES.split())
# Names that lead from any object to the grader's memory. No exercise needs one.
_LEADING = """
    __builtins__ __globals__ __closure__ __subclasses__ __loader__ __import__ __getattribute__
    _getframe _current_frames f_back f_locals f_globals f_builtins tb_frame gi_frame cr_frame
    ag_frame settrace setprofile addaudithook
"""
_FORBIDDEN = frozenset(_LEADING.split())
_CELL = re.compile(r"^# %%(?P<rest>.*)$")
_HEADING = re.compile(r"^(?:# )?### (?:★ )?Exercise (?P<id>\d+\.\d+)\b(?P<title>.*)$")
STUB = re.compile(r"ex0*(\d+\.\d+)")


class BlockedImportError(BlockedError):
    """An answer imported what it should have written."""


class MissingNameError(AttributeError):
    """A test asks for a name that the learner's file does not define."""


@dataclass(frozen=True)
class Cell:
    """A code cell. name: what a traceback calls it. line: before its first one, in that file.

    exercise: id of the last heading `### Exercise 4.3` before it, "" for none.
    """

    source: str
    name: str
    line: int
    exercise: str

    def compiled(self, flags: int = 0) -> Any:
        """Its code, or its tree with `ast.PyCF_ONLY_AST`. Raises `SyntaxError`."""
        text = "\n" * self.line + self.source
        try:
            return compile(text, self.name, "exec", flags, dont_inherit=True)
        except SyntaxError:
            if not re.search(r"^\s*[%!]", self.source, re.MULTILINE):
                raise
            text = re.sub(r"^(\s*)[%!].*$", r"\1pass", text, flags=re.MULTILINE)  # magics
            return compile(text, self.name, "exec", flags, dont_inherit=True)


class Answer(ModuleType):
    """What a learner's file defines. problems: (exercise, what a cell ended with)."""

    def __init__(self, name: str = "answer") -> None:
        super().__init__(name)
        self.__dict__["grading_problems"] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        told = "".join(f"\n{problem}" for problem in self.__dict__["grading_problems"])
        raise MissingNameError(f"your file does not define {name}{told}")


def load_answer(
    path: Path, allowed: Collection[str] = (), cells: Sequence[Cell] | None = None
) -> Answer:
    """Run a learner's .py or .ipynb, cell by cell, in a module of its own.

    allowed: modules of minifer that this exercise may import. cells: of the file, when they were
    read before. A cell that fails does not stop the
    others, so a mistake in one exercise costs that exercise alone; what it ended with is said when
    a test misses a name.
    """
    module = Answer()
    module.__file__ = str(path)
    open_to = (*OPEN, *allowed)
    real = builtins.__import__

    def guarded(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] in BLOCKED and not may_import(name, open_to):
            raise BlockedImportError(f"an answer may not import {name}: write it yourself")
        return real(name, *args, **kwargs)

    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": guarded}
    sys.modules[module.__name__] = module  # dataclasses and pickle look there
    for cell in cells_of(path) if cells is None else cells:
        try:
            _refuse_forbidden(cell.compiled(ast.PyCF_ONLY_AST))
            exec(cell.compiled(), module.__dict__)
        except NotImplementedError as error:
            if not STUB.fullmatch(str(error)):
                module.grading_problems.append(_problem(cell, error))
        except BaseException as error:
            module.grading_problems.append(_problem(cell, error))
    return module


def cells_of(path: Path) -> list[Cell]:
    """The code cells of a .py (py:percent) or .ipynb file, in order.

    Raises `ValueError` for a notebook that is none.
    """
    return list(_notebook_cells(path) if path.suffix == ".ipynb" else _script_cells(path))


def headings_of(path: Path) -> dict[str, str]:
    """Exercise id → title of every heading `### Exercise 4.3 - Title` in a .py file."""
    found = map(_HEADING.match, path.read_text(encoding="utf-8").splitlines())
    return {m["id"]: m.string.strip("# ") for m in found if m}


def _script_cells(path: Path) -> Iterator[Cell]:
    lines: list[str] = []
    start, exercise, code = 0, "", True
    text = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate([*text, "# %%"]):
        if marker := _CELL.match(line):
            if code and any(line.strip() for line in lines):
                yield Cell("\n".join(lines) + "\n", str(path), start, exercise)
            lines, start, code = [], number + 1, not marker["rest"].strip().startswith("[")
            continue
        lines.append(line)
        if heading := _HEADING.match(line):
            exercise = heading["id"]


def _notebook_cells(path: Path) -> Iterator[Cell]:
    """Read as JSON: nbformat takes longer to import than an exercise to run."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} must be a notebook: {type(error).__name__}: {error}") from error
    exercise = ""
    for number, (kind, source) in enumerate(texts, start=1):
        if kind == "code" and source.strip():
            yield Cell(source + "\n", f"{path} cell {number}", 0, exercise)
        elif kind == "markdown":
            for line in source.splitlines():
                if heading := _HEADING.match(line):
                    exercise = heading["id"]


def _problem(cell: Cell, error: BaseException) -> str:
    line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else None
    where = error.__traceback__
    while where is not None:
        if where.tb_frame.f_code.co_filename == cell.name:
            line = where.tb_lineno
        where = where.tb_next
    place = f"{Path(cell.name).name}, line {line or cell.line + 1}"
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"({place}: {type(error).__name__}: {text})"


def _refuse_forbidden(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.Attribute):
            name = node.attr
            if name == "modules" and isinstance(node.value, ast.Name) and node.value.id == "sys":
                raise BlockedError(f"an answer may not use sys.modules (line {node.lineno})")
        elif isinstance(node, ast.Name):
            name = node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
        elif isinstance(node, ast.alias):
            name = "sys.modules" if node.name == "modules" else node.name
        if name in _FORBIDDEN or name == "sys.modules":
            raise BlockedError(f"an answer may not use {name} (line {getattr(node, 'lineno', 0)})")
