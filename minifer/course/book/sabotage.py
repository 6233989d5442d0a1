"""Does a lecture notice when the engine is broken? Break it, and see the lecture turn red.

`lectures/sabotages/L04.toml` lists, for one lecture, changes of the engine's source::

    [[sabotage]]
    name = "the slot formula forgets the offset"
    module = "minifer.kv.step_input"
    old = "…"        # text that occurs once in the module
    new = "…"

The change is made in memory, while the notebook's kernel imports the module; no file is touched.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from minifer.course.book.environment import lecture_environment

if TYPE_CHECKING:
    from minifer.course.book.builder import Book

_TIMEOUT = 300  # seconds of a whole lecture
_HEAD = """\
# What each lecture notices

`minifer book sabotage` breaks the engine in one place, in memory, and runs a lecture strictly: the
outputs of its claims are compared. Each must turn red; the last column is the first cell that does.
"""


@dataclass(frozen=True)
class Sabotage:
    """One change of one engine module. lecture: "L04"."""

    lecture: str
    name: str
    module: str
    old: str
    new: str

    def patched(self) -> str:
        """The module's text after the change. Raises `ValueError` unless `old` occurs once."""
        spec = importlib.util.find_spec(self.module)
        if spec is None or spec.origin is None:
            raise ValueError(f"{self.lecture} sabotage {self.name!r}: no module {self.module}")
        text = Path(spec.origin).read_text(encoding="utf-8")
        if text.count(self.old) != 1 or self.old == self.new:
            raise ValueError(
                f"{self.lecture} sabotage {self.name!r}: `old` must occur once in {self.module} "
                f"and differ from `new`, it occurs {text.count(self.old)} times"
            )
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Verdict:
    """red: a cell of the lecture failed. cell: id and first line of the first that did."""

    sabotage: Sabotage
    red: bool
    cell: str


def load_sabotages(book: Book, lecture: str) -> list[Sabotage]:
    """Those of one lecture, in order. Raises `ValueError` for a file with other keys."""
    path = book.lectures / "sabotages" / f"{lecture}.toml"
    if not path.is_file():
        return []
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("sabotage", [])
    wanted = {"name", "module", "old", "new"}
    for entry in entries:
        if entry.keys() != wanted:
            raise ValueError(f"{path.name}: keys must be {sorted(wanted)}, got {sorted(entry)}")
    return [Sabotage(lecture, **entry) for entry in entries]


def try_sabotage(book: Book, sabotage: Sabotage) -> Verdict:
    """Run the lecture strictly on the broken engine, to the first cell that fails.

    Raises `RuntimeError` when it could not be run at all.
    """
    sabotage.patched()
    (notebook,) = book.lectures.glob(f"{sabotage.lecture}*.ipynb")
    startup = f"from minifer.course.book.sabotage import install\ninstall({_arguments(sabotage)})\n"
    with tempfile.TemporaryDirectory() as folder:
        environment = lecture_environment(Path(folder), startup)
        environment["MINIFER_LECTURE_ENVIRONMENT"] = "given"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", str(notebook), "-x", "-q", "--no-header"],
            cwd=book.root, env=environment, capture_output=True, text=True, timeout=_TIMEOUT,
        )  # fmt: skip
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{notebook.name} could not be run:\n{done.stdout[-2000:]}")
    return Verdict(sabotage, done.returncode == 1, _failed_cell(notebook, done.stdout))


def install(module: str, old: str, new: str) -> None:
    """In this process, change a module's source when it is imported. It must not be yet."""
    if module in sys.modules:
        raise RuntimeError(f"{module} is imported already: too late to change it")
    sys.meta_path.insert(0, _Patch(module, old, new))


class _Patch(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, old: str, new: str) -> None:
        self.module, self.old, self.new = module, old, new

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.module:
            return None
        sys.meta_path.remove(self)  # the others find the file
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            return None
        spec.loader = _PatchedLoader(name, spec.origin, self.old, self.new)
        return spec


class _PatchedLoader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, old: str, new: str) -> None:
        super().__init__(name, path)
        self.old, self.new = old, new

    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        text = Path(self.path).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ImportError(f"the text to change occurs {text.count(self.old)} times")
        return compile(text.replace(self.old, self.new), self.path, "exec", dont_inherit=True)


def table(verdicts: Sequence[Verdict]) -> str:
    """The verdicts as a page: lecture, what is broken, which cell notices."""
    rows = [
        _HEAD,
        "| lecture | what is broken | in | the first cell that fails |",
        "|---|---|---|---|",
    ]
    for verdict in verdicts:
        cell = f"`{verdict.cell}`" if verdict.red else "**none: the lecture stays green**"
        sabotage = verdict.sabotage
        rows.append(f"| {sabotage.lecture} | {sabotage.name} | `{sabotage.module}` | {cell} |")
    return "\n".join(rows) + "\n"


def _arguments(sabotage: Sabotage) -> str:
    return f"{sabotage.module!r}, {sabotage.old!r}, {sabotage.new!r}"


def _failed_cell(notebook: Path, report: str) -> str:
    """Id and first line of the cell that nbval names first; it counts code cells from 0."""
    import nbformat

    named = re.search(r"::Cell (\d+)", report)
    if named is None:
        return ""
    code = [c for c in nbformat.read(notebook, as_version=4).cells if c.cell_type == "code"]
    cell = code[int(named[1])]
    return f"{cell.id}: {cell.source.splitlines()[0]}"
