"""`lectures/src/*.py` and `solutions/ex*.py` (py:percent) to notebooks.

| hand-edited | built and committed |
|---|---|
| `lectures/src/L04_paged_kv.py` | `lectures/L04_paged_kv.ipynb`, executed |
| `solutions/ex04_paged_kv.py` | `exercises/ex04_paged_kv.py` and `.ipynb`, `solutions/….ipynb` |

The output is the same for the same source, but for what cells print: cell ids count up, metadata
is fixed, nothing says when or where it was built.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minifer.course.book.environment import lecture_environment
from minifer.course.book.exercises import stub_of

# Every code cell of a lecture is of one kind; nbval is told what that means for its output.
NBVAL_TAGS = {
    "claim": ["nbval-check-output"],  # compared, exactly
    "measure": ["nbval-ignore-output"],  # times and what a model writes: run, not compared
    "picture": [],  # its alt text is compared, its pixels are not
}
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


@dataclass(frozen=True)
class Book:
    """Where the parts of the book lie. root: the repository."""

    root: Path

    @property
    def lectures(self) -> Path:
        return self.root / "lectures"

    @property
    def exercises(self) -> Path:
        return self.root / "exercises"

    @property
    def solutions(self) -> Path:
        return self.root / "solutions"

    def lecture_sources(self, name: str = "") -> list[Path]:
        """Sources of the lectures whose name begins so."""
        return sorted((self.lectures / "src").glob(f"{name}*.py"))

    def solution_sources(self, name: str = "ex") -> list[Path]:
        """Masters of the exercises whose name begins so."""
        return sorted(self.solutions.glob(f"{name}*.py"))


def find_book(start: Path | None = None) -> Book:
    """The repository around a folder (default: the current one), known by `exercises/tests`.

    Raises `ValueError` when there is none.
    """
    start = (start or Path.cwd()).resolve()
    for folder in (start, *start.parents):
        if (folder / "exercises" / "tests").is_dir():
            return Book(folder)
    raise ValueError(f"no exercises/tests in {start} or above it: go to a clone of minifer")


def lecture_notebook(source: Path) -> Any:
    """The notebook of a lecture, not executed. Raises `ValueError` for a cell without a kind."""
    notebook = _read(source.read_text(encoding="utf-8"), source.name[:3])
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        kinds = [tag for tag in tags if tag in NBVAL_TAGS]
        if cell.cell_type == "code" and len(kinds) != 1:
            first = cell.source.splitlines()[0]
            raise ValueError(f"{cell.id} must have one tag of {[*NBVAL_TAGS]}, got {tags}: {first}")
        cell.metadata = _tagged(tags + [extra for kind in kinds for extra in NBVAL_TAGS[kind]])
    return notebook


def build_lecture(source: Path) -> Path:
    """Execute one lecture and write its notebook. Raises when a cell fails or warns."""
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    folder = source.parent.parent
    notebook = lecture_notebook(source)
    with tempfile.TemporaryDirectory() as start:
        client = NotebookClient(
            notebook, km=AsyncKernelManager(kernel_name="python3"), timeout=120,
            record_timing=False, store_widget_state=False, coalesce_streams=True,
            resources={"metadata": {"path": str(folder)}},
        )  # fmt: skip
        client.execute(env=lecture_environment(Path(start)))
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                raise ValueError(f"{cell.id} wrote to stderr: {output['text']}")
    target = folder / f"{source.stem}.ipynb"
    target.write_text(_text(notebook), encoding="utf-8", newline="\n")
    return target


def exercise_files(book: Book, master: Path) -> dict[Path, str]:
    """What one master is built to: the stub (script and notebook) and the solution's notebook."""
    text = master.read_text(encoding="utf-8")
    stub = stub_of(text, master.stem)
    script, prefix = book.exercises / master.name, master.name[:4]
    return {
        script: stub,
        script.with_suffix(".ipynb"): _text(_read(stub, prefix)),
        master.with_suffix(".ipynb"): _text(_read(_without_markers(text), prefix)),
    }


def build_exercise(master: Path) -> list[Path]:
    """Write what `exercise_files` says."""
    files = exercise_files(find_book(master.parent), master)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8", newline="\n")
    return list(files)


def _without_markers(text: str) -> str:
    return re.sub(r"(?m)^\s*### (?:BEGIN|END) (?:SOLUTION|AUTHOR)\s*\n", "", text)


def _read(text: str, prefix: str) -> Any:
    """py:percent to a notebook with ids that count up and nothing of this machine."""
    import jupytext

    notebook = jupytext.reads(text, fmt="py:percent")
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id = f"{prefix}-c{number:03d}"
        cell.metadata = _tagged(cell.metadata.get("tags", []))
    return notebook


def _tagged(tags: list[str]) -> dict[str, Any]:
    return {"tags": tags} if tags else {}


def _text(notebook: Any) -> str:
    import nbformat

    return str(nbformat.writes(notebook, indent=1)) + "\n"
