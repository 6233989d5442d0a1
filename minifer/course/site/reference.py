"""The reference: a page a package, made by autodoc, with the lectures that use each module.

Docstrings in this project are plain text with `code` in backticks. autodoc wants
reStructuredText, in which a lone star or an indented line is an error: `to_rst` translates.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

_CODE_LINK = re.compile(r"(?m)\]\(\.\./([^)\s#]+)|^\[[^\]]+\]: \.\./(\S+)$")
_ITEM = re.compile(r"(?:[-*]|\d+\.) ")


def pages(modules: Mapping[Path, str], uses: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Page → text, in reStructuredText. uses: module → pages of lectures that use it."""
    names = sorted(modules.values())
    packages = {modules[file] for file in modules if file.name == "__init__.py"}
    found = {}
    for package in sorted(packages):
        own = [n for n in names if n.rpartition(".")[0] == package and n not in packages]
        sections = [_heading(package, "="), *_module(package, uses)]
        for name in own:
            sections += [_heading(name, "-"), *_module(name, uses)]
        found[package] = "\n".join(sections)
    toc = ["", ".. toctree::", "   :maxdepth: 1", "", *(f"   {name}" for name in found), ""]
    about = (
        "Every module of the three packages, from their docstrings. A module that a lecture "
        "uses or points to says so; ``[source]`` shows its text."
    )
    found["index"] = "\n".join([_heading("Reference", "="), about, *toc])
    return found


def _heading(text: str, line: str) -> str:
    return f"{text}\n{line * len(text)}\n"


def _module(name: str, uses: Mapping[str, Iterable[str]]) -> list[str]:
    lectures = ", ".join(f":doc:`{_short(page)} </{page}>`" for page in sorted(uses.get(name, ())))
    links = [f"*Lectures:* {lectures}", ""] if lectures else []
    return [*links, f".. automodule:: {name}", "   :members:", ""]


def _short(page: str) -> str:
    return Path(page).name[:3]


def uses_of(
    pages_of: Mapping[str, Any], modules: Mapping[Path, str], root: Path
) -> dict[str, set[str]]:
    """Module → pages of the lectures that import from it or link to it.

    pages_of: page → its notebook, as it lies in the repository.
    """
    known = set(modules.values())
    found: defaultdict[str, set[str]] = defaultdict(set)
    for page, notebook in pages_of.items():
        for cell in notebook.cells:
            if cell.cell_type == "code":
                names = imported(cell.source)
            else:
                links = re.findall(
                    r"\]\(\.\./([^)\s#]+)|^\[[^\]]+\]: \.\./(\S+)$", cell.source, re.M
                )
                names = [modules.get(root / "".join(link), "") for link in links]
            for name in names:
                if name in known:
                    found[name].add(page)
    return dict(found)


def imported(source: str) -> list[str]:
    """Modules whose names a cell imports; a name passed on by a package counts for its own."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minifer"):
            for alias in node.names:
                found.append(_home(str(node.module), alias.name))
    return found


def _home(module: str, name: str) -> str:
    """Where a name that a module offers is written."""
    try:
        value = getattr(importlib.import_module(module), name, None)
        if value is None:
            return importlib.import_module(f"{module}.{name}").__name__
    except ImportError:
        return module
    home = getattr(value, "__module__", None) or getattr(value, "__name__", None)
    return home if isinstance(home, str) and home.startswith("minifer") else module


def to_rst(docstring: Iterable[str]) -> list[str]:
    """A plain docstring as reStructuredText: paragraphs, lists, and the rest word for word."""
    lines: list[str] = []
    for blank, group in groupby(docstring, key=lambda line: not line.strip()):
        if not blank:
            lines += [*_block(list(group)), ""]
    return lines


def _block(block: list[str]) -> list[str]:
    cut = next((i for i, line in enumerate(block) if line.startswith((" ", "|", "\t"))), None)
    if _ITEM.match(block[0]):
        return _items(block)
    if cut is None:
        return [_escaped(" ".join(block).removesuffix("::") + _colon(block))]
    text = [_escaped(" ".join(block[:cut])), ""] if cut else []
    return [*text, "::", "", *(f"   {line}" for line in block[cut:])]


def _colon(block: list[str]) -> str:
    return ":" if block[-1].endswith("::") else ""


def _items(block: list[str]) -> list[str]:
    found: list[str] = []
    for line in block:
        if mark := _ITEM.match(line):
            found.append(f"- {line[mark.end() :]}")
        else:
            found[-1] += f" {line.strip()}"
    return [f"- {_escaped(item[2:])}" for item in found]


def _escaped(text: str) -> str:
    """Nothing but code in backticks means anything."""
    parts = re.split(r"(`+[^`]+`+)", text)
    # An escaped space joins: it shows nothing, and lets code stand beside a letter.
    return r"\ " + "".join(
        rf"\ ``{part.strip('` ')}``\ " if index % 2 else re.sub(r"([\\*_|`:<>\[\]])", r"\\\1", part)
        for index, part in enumerate(parts)
    )
