"""A committed notebook, made ready for a page: alt texts, links, anchors, no live widgets."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from minifer.course.book.ledger import is_ledger_tag
from minifer.course.site.places import Places, cell_anchor

_WIDGET = "application/vnd.jupyter.widget-view+json"


def page_of(path: Path, places: Places) -> Any:
    """The notebook of a page. An exercise's headings move up, so that none is left out."""
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    folder = path.parent.relative_to(places.root)
    cells = []
    for cell in notebook.cells:
        if any(map(is_ledger_tag, cell.metadata.get("tags", []))):
            anchor = nbformat.v4.new_markdown_cell(f"({cell_anchor(cell.id)})=")
            anchor.id = f"{cell.id}-anchor"
            cells.append(anchor)
        if cell.cell_type == "markdown":
            cell.source = places.rewrite(cell.source, folder)
            if path.stem.startswith("ex"):
                cell.source = re.sub(r"(?m)^### ", "## ", cell.source)
        else:
            cell.outputs = [_still(output) for output in cell.outputs]
            _describe(cell)
        cells.append(cell)
    notebook.cells = cells
    notebook.metadata["language_info"] = {"name": "python", "pygments_lexer": "python"}
    return notebook


def _still(output: Any) -> Any:
    """An output without what needs a kernel: of a widget the words remain."""
    data = output.get("data", {})
    if _WIDGET in data:
        words = html.escape(str(data.get("text/plain", "")))
        output.data = {"text/html": f'<p class="still">{words}</p>'}
    elif "image/png" in data:  # its alt text is shown where the picture is not
        output.data = {"image/png": data["image/png"]}
    return output


def _describe(cell: Any) -> None:
    """The alt text of a cell's pictures, where myst-nb looks for it."""
    texts = [
        output.metadata.get("image/png", {}).get("alt", "")
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    if texts:
        cell.metadata["mystnb"] = {"image": {"alt": " ".join(filter(None, texts))}}
