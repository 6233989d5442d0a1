"""The engine's own text inside a lecture: a function folded, or two functions compared.

What is shown changes with the engine, so both belong into `measure` cells.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
from collections.abc import Callable
from html import escape
from typing import Any

_ADDED, _REMOVED = "#D6E9F6", "#FBE3D3"  # paler than the blue and the orange of the book
_PRE = "margin:0.3em 0;padding:0.5em;background:#FAFAFA;color:#111111;overflow-x:auto"


def show_source(function: Callable[..., Any]) -> None:
    """Display a function or class of minifer, folded: its place, and its text on a click."""
    text = source_of(function, docstring=True)
    html = f"<pre style='{_PRE}'>{escape(text)}</pre>"
    place = place_of(function)
    whose = "The book's own" if place.startswith("minifer.course.") else "The engine's own"
    _display(_folded(f"{whose}: <code>{escape(place)}</code>", html), text)


def show_diff(ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    """Display what differs between our function and the engine's, as a unified diff.

    Docstrings are left out, blank lines too. A line with − is ours alone, one with + the engine's.
    """
    lines = diff_lines(ours, theirs)
    names = f"− {place_of(ours)}", f"+ {place_of(theirs)}"
    head = "<br>".join(f"<code>{escape(name)}</code>" for name in names)
    if not any(line[0] in "+-" for line in lines):
        lines = ["  the same text"]
    body = "\n".join(_coloured(line) for line in lines)
    plain = "\n".join((*names, *lines))
    _display(f"<div>{head}<pre style='{_PRE}'>{body}</pre></div>", plain)


def place_of(function: Callable[..., Any]) -> str:
    """Where a function lives: "minifer.kv.step_input:slots"; the notebook's own say "here"."""
    function = inspect.unwrap(function)
    module = getattr(function, "__module__", None) or "here"
    return f"{'here' if module == '__main__' else module}:{function.__qualname__}"


def source_of(function: Callable[..., Any], *, docstring: bool = False) -> str:
    """The text of a function or class, not indented. docstring: with the one at its top.

    Raises `ValueError` where Python cannot find the text, as for a builtin.
    """
    try:
        text = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    except (OSError, TypeError) as error:
        raise ValueError(f"function must have a source, got {function!r}") from error
    return text.rstrip() if docstring else _without_docstrings(text)


def diff_lines(ours: Callable[..., Any], theirs: Callable[..., Any]) -> list[str]:
    """Lines of a unified diff without its header: "-" ours, "+" theirs, " " both."""
    a, b = (
        [line for line in source_of(function).splitlines() if line.strip()]
        for function in (ours, theirs)
    )
    lines = list(difflib.unified_diff(a, b, n=max(len(a), len(b)), lineterm=""))[3:]
    return lines or [f" {line}" for line in a]  # [3:] is without names and line numbers


def _without_docstrings(text: str) -> str:
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        first = node.body[0]
        if (
            len(node.body) > 1
            and isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            for number in range(first.lineno - 1, first.end_lineno or first.lineno):
                lines[number] = ""
    return "\n".join(line for line in lines if line.strip())


def _coloured(line: str) -> str:
    """One line of a diff; the sign says what the colour says."""
    sign, rest = line[:1], escape(line[1:])
    if sign == "+":
        return f'<span style="background:{_ADDED}">+ {rest}</span>'
    if sign == "-":
        return f'<span style="background:{_REMOVED}">− {rest}</span>'
    return f"  {rest}"


def _folded(summary: str, html: str) -> str:
    return f"<details><summary>{summary}</summary>{html}</details>"


def _display(html: str, plain: str) -> None:
    from IPython.display import display

    display({"text/html": html, "text/plain": plain}, raw=True)
