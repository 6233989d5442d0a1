"""A Sphinx extension: formulas as MathML, plain docstrings, and types that find their page.

Browsers draw MathML themselves: no MathJax, no network.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from typing import Any

from docutils.nodes import SkipNode
from latex2mathml.converter import convert
from sphinx.addnodes import pending_xref
from sphinx.transforms.post_transforms import SphinxPostTransform

from minifer.course.site.reference import to_rst


def setup(app: Any) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.connect("autodoc-process-docstring", _plain)
    app.add_post_transform(FullNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _inline(writer: Any, node: Any) -> None:
    writer.body.append(convert(node.astext().strip(), display="inline"))
    raise SkipNode


def _block(writer: Any, node: Any) -> None:
    formula = convert(node.astext().strip(), display="block")
    writer.body.append(f'<div class="formula">{formula}</div>\n')
    raise SkipNode


def _plain(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    lines[:] = to_rst(lines)


class FullNames(SphinxPostTransform):
    """A type in a signature is written by its short name; several modules may have one such."""

    default_priority = 5  # before names are looked up

    def run(self, **kwargs: Any) -> None:
        for node in self.document.findall(pending_xref):
            if node.get("refdomain") == "py" and node.get("py:module"):
                names = _imported(node["py:module"])
                node["reftarget"] = names.get(node["reftarget"], node["reftarget"])


@cache
def _imported(module: str) -> dict[str, str]:
    """Short name → full name, of what a module imports, under TYPE_CHECKING too."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return {}
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
