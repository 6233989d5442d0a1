"""`lectures/src/*.py` and `solutions/ex*.py` (py:percent) to notebooks.

| hand-edited | built and committed |
|---|---|
| `lectures/src/L04_paged_kv.py` | `lectures/L04_paged_kv.ipynb`, executed |
| `solutions/ex04_paged_kv.py` | `exercises/ex04_paged_kv.py` and `.ipynb`, `solutions/….ipynb` |

The output is the same for the same source, but for what cells print: cell ids count up, metadata
is fixed, nothing says when or where it was built.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    notebook = _read(source.read_text(encoding="utf-8"), prefix=source.name[:3])
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
    from nbclient import NotebookClient

    folder = source.parent.parent
    notebook = lecture_notebook(source)
    NotebookClient(
        notebook, kernel_name="python3", resources={"metadata": {"path": str(folder)}},
        record_timing=False, store_widget_state=False, timeout=120, coalesce_streams=True,
    ).execute()  # fmt: skip
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                raise ValueError(f"{cell.id} wrote to stderr: {output['text']}")
    return _write(notebook, folder / f"{source.stem}.ipynb")


def build_exercise(source: Path) -> list[Path]:
    """Write the stub (script and notebook) and the solution's notebook of one master."""
    book = find_book(source.parent)
    text = source.read_text(encoding="utf-8")
    stub = stub_of(text, source.stem)
    script = book.exercises / source.name
    script.write_text(stub, encoding="utf-8", newline="\n")
    name = source.stem.split("_")[0]
    return [
        script,
        _write(_read(stub, prefix=name), script.with_suffix(".ipynb")),
        _write(_read(text, prefix=name), source.with_suffix(".ipynb")),
    ]


def _read(text: str, *, prefix: str) -> Any:
    """py:percent to a notebook with ids that count up and nothing of this machine."""
    import jupytext

    notebook = jupytext.reads(text, fmt="py:percent")
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id = f"{prefix}-c{number:02d}"
        cell.metadata = _tagged(cell.metadata.get("tags", []))
    return notebook


def _tagged(tags: list[str]) -> dict[str, Any]:
    return {"tags": tags} if tags else {}


def _write(notebook: Any, target: Path) -> Path:
    import nbformat

    text = nbformat.writes(notebook, indent=1) + "\n"
    target.write_text(text, encoding="utf-8", newline="\n")
    return target
