"""Answers without a thought, made from the signatures: none may earn a point."""

from __future__ import annotations

import ast
from typing import Any

from minifer.course.grading.automatic import blocks_of

# name → expression; FIRST stands for the function's first argument
ANSWERS = {
    "return None": "None",
    "return 0": "0",
    "return 1.0": "1.0",
    "return True": "True",
    'return ""': '""',
    "return []": "[]",
    "return {}": "{}",
    "return the first argument": "FIRST",
    "return zeros like it": "_zeros_like(FIRST)",
    "return an object equal to everything": "_Liar()",
    "raise ValueError": "",
}
_HELPERS = """
# %%
import torch as _torch


def _zeros_like(value):
    if isinstance(value, _torch.Tensor):
        return _torch.zeros_like(value)
    if isinstance(value, (list, tuple)):
        return [0] * len(value)
    return type(value)() if isinstance(value, (int, float, str, dict)) else None


class _Liar:
    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    def __hash__(self):
        return 0

    def __bool__(self):
        return True

    def __len__(self):
        return 0

    def __iter__(self):
        return iter(())

    def __getattr__(self, name):
        return self

    def __call__(self, *arguments, **named):
        return self

    def __getitem__(self, key):
        return self
"""


def trivial(text: str, exercise: str, expression: str) -> str:
    """The master with the exercise's solution blocks replaced by one expression.

    "" raises `ValueError` instead.
    """
    lines, tree = text.splitlines(), ast.parse(text)
    for name, begin, end in reversed(blocks_of(text)):
        if name != exercise:
            continue
        indent = len(lines[begin - 1]) - len(lines[begin - 1].lstrip())
        around = _function_around(tree, begin, end)
        if around is not None:
            new = [" " * indent + _answer(around, expression)]
        else:
            new = _emptied(tree, begin, end, expression)
        lines[begin - 1 : end] = new
    return "\n".join(lines) + "\n" + _HELPERS


def _function_around(tree: ast.Module, begin: int, end: int) -> ast.FunctionDef | None:
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.lineno < begin
        and (node.end_lineno or 0) >= end - 1
    ]
    return max(around, key=lambda node: node.lineno, default=None)


def _answer(function: ast.FunctionDef, expression: str) -> str:
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    first = next((name for name in names if name != "self"), "None")
    if not expression:
        return 'raise ValueError("no")'
    return f"return {expression.replace('FIRST', first)}"


def _emptied(tree: ast.Module, begin: int, end: int, expression: str) -> list[str]:
    """A block that holds whole definitions: their bodies become the answer."""
    inside = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and begin < node.lineno and (node.end_lineno or 0) < end
    ]
    depth = min((node.col_offset for node in inside), default=0)
    kept = []
    for node in inside:
        if node.col_offset != depth:
            continue
        for function in ast.walk(node):
            if isinstance(function, ast.FunctionDef):
                body: Any = ast.parse(f"def f():\n    {_answer(function, expression)}").body[0]
                function.body = body.body
        if isinstance(node, ast.Assign) and expression:
            node.value = ast.parse(expression.replace("FIRST", "None"), mode="eval").body
        kept += [" " * depth + line for line in ast.unparse(node).splitlines()]
    return kept or [" " * depth + "pass"]
