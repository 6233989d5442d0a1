"""Build the lectures: `lectures/src/*.py` (py:percent) to executed notebooks beside this file.

    python lectures/build.py            # all of them
    python lectures/build.py L00        # those whose name begins so

Only the sources are edited by hand. The output is the same for the same source, but for what cells
print: cell ids count up, metadata is fixed, nothing says when or where it was built.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
# Every code cell is of one kind; nbval is told what that means for its output.
NBVAL_TAGS = {
    "claim": ["nbval-check-output"],  # compared, exactly
    "measure": ["nbval-ignore-output"],  # times and what a model writes: run, not compared
    "picture": [],  # its alt text is compared, its pixels are not
}


def notebook_of(source: Path) -> nbformat.NotebookNode:
    """The notebook of one source, not executed. Raises `ValueError` for a cell without a kind."""
    notebook = jupytext.reads(source.read_text(encoding="utf-8"), fmt="py:percent")
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id = f"{source.name[:3]}-c{number:02d}"
        tags = cell.metadata.get("tags", [])
        kinds = [tag for tag in tags if tag in NBVAL_TAGS]
        if cell.cell_type == "code" and len(kinds) != 1:
            first = cell.source.splitlines()[0]
            raise ValueError(f"{cell.id} must have one tag of {[*NBVAL_TAGS]}, got {tags}: {first}")
        tags = tags + [extra for kind in kinds for extra in NBVAL_TAGS[kind]]
        cell.metadata = {"tags": tags} if tags else {}
    return notebook


def build(source: Path) -> Path:
    """Execute one source and write its notebook. Raises when a cell fails or warns."""
    notebook = notebook_of(source)
    resources = {"metadata": {"path": str(HERE)}}
    NotebookClient(
        notebook, kernel_name="python3", resources=resources, record_timing=False,
        store_widget_state=False, timeout=120, coalesce_streams=True,
    ).execute()  # fmt: skip
    notebook.metadata["language_info"] = {"name": "python"}  # without the version that ran
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                raise ValueError(f"{cell.id} wrote to stderr: {output['text']}")
    target = HERE / f"{source.stem}.ipynb"
    target.write_text(nbformat.writes(notebook, indent=1) + "\n", encoding="utf-8", newline="\n")
    return target


if __name__ == "__main__":
    for path in sorted((HERE / "src").glob(f"{''.join(sys.argv[1:])}*.py")):
        print(build(path))
