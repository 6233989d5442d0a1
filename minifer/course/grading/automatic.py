"""Mistakes nobody named: small changes of a solution's syntax tree, one at a time.

A change is known by what it replaces, "slots: `a < b` → `a <= b`", not by a line, so that a reason
given for a survivor stays with it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_MARKER = re.compile(r"^\s*### (?P<edge>BEGIN|END) (?P<kind>\w+)\s*$")
_HEADING = re.compile(r"^# ### Exercise (?P<id>\d+\.\d+)\b")
_COMPARE: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.FloorDiv: ast.Div,
    ast.Div: ast.FloorDiv,
    ast.Mod: ast.FloorDiv,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
}
_COPIES = {"clone", "copy", "deepcopy", "detach"}
_IDENTITY = {"sorted", "reversed", "set", "abs", "list", "tuple", "dict", "min", "max"}
# Their arguments may be swapped without a difference.
_SYMMETRIC = {"min", "max", "maximum", "minimum", "transpose", "swapaxes", "add", "mul", "equal"}
# Of one inside another, the inner one needs parentheses when its operator changes.
_TREES = (ast.BinOp, ast.BoolOp, ast.Compare, ast.UnaryOp)
_MOST = 80  # changes of one exercise; of more, every n-th is taken


@dataclass(frozen=True)
class Change:
    """id: what is replaced by what, and where. text: the master with it."""

    id: str
    text: str


def blocks_of(text: str, kind: str = "SOLUTION") -> list[tuple[str, int, int]]:
    """(exercise, line of BEGIN, line of END) of every block, lines counted from 1."""
    found, exercise, begin = [], "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        if heading := _HEADING.match(line):
            exercise = heading["id"]
        marker = _MARKER.match(line)
        if marker and marker["kind"] == kind:
            if marker["edge"] == "BEGIN":
                begin = number
            else:
                found.append((exercise, begin, number))
    return found


def without_author(text: str) -> str:
    """The master without its AUTHOR blocks, which show things; lines keep their numbers."""
    lines = text.splitlines()
    for _, begin, end in blocks_of(text, "AUTHOR"):
        lines[begin - 1 : end] = [""] * (end - begin + 1)
    return "\n".join(lines) + "\n"


def changes(text: str, exercise: str) -> list[Change]:
    """Every change of the exercise's solution blocks, in the order of the text."""
    spans = [(begin, end) for name, begin, end in blocks_of(text) if name == exercise]
    tree = ast.parse(text)
    original, lines = ast.dump(tree), text.encode().splitlines(keepends=True)
    seen: set[str] = {original}
    counted: dict[str, int] = {}
    found: list[Change] = []
    for function, node, replacement in _candidates(tree, spans):
        changed = _replaced(lines, node, replacement)
        old, new = _shown(text, changed, node, replacement)
        try:
            dump = ast.dump(ast.parse(changed))
        except SyntaxError:
            continue
        if dump in seen:
            continue
        seen.add(dump)
        name = f"{function}: `{old}` → `{new}`"
        counted[name] = counted.get(name, 0) + 1
        if counted[name] > 1:
            name += f" ({counted[name]})"
        found.append(Change(name, changed))
    step = -(-len(found) // _MOST) if found else 1
    return found[::step]


def _shown(text: str, changed: str, node: ast.AST, replacement: str) -> tuple[str, str]:
    """The line before and after; of a change that spans lines, what is replaced and by what."""
    first, last = node.lineno - 1, node.end_lineno - 1  # type: ignore[attr-defined]
    if first == last and "\n" not in replacement:
        return text.splitlines()[first].strip(), changed.splitlines()[first].strip()
    return _line(ast.unparse(node)), _line(replacement)


def _line(text: str, longest: int = 70) -> str:
    text = " ".join(text.split())
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _replaced(lines: list[bytes], node: ast.AST, replacement: str) -> str:
    first, last = node.lineno - 1, node.end_lineno - 1  # type: ignore[attr-defined]
    before, after = node.col_offset, node.end_col_offset  # type: ignore[attr-defined]
    middle = lines[first][:before] + replacement.encode() + lines[last][after:]
    return b"".join([*lines[:first], middle, *lines[last + 1 :]]).decode()


def _candidates(
    tree: ast.Module, spans: list[tuple[int, int]]
) -> Iterator[tuple[str, ast.AST, str]]:
    """(function, node, its new source) in the order of the text."""

    def visit(
        node: ast.AST, function: str, parent: ast.AST | None
    ) -> Iterator[tuple[str, ast.AST, str]]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            function = f"{function}.{node.name}" if function else node.name
        line = getattr(node, "lineno", None)
        if line is not None and any(begin < line < end for begin, end in spans):
            for replacement in _replacements(node):
                wrap = isinstance(node, _TREES) and isinstance(parent, _TREES)
                yield function, node, f"({replacement})" if wrap else replacement
        if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom)):
            return
        if isinstance(node, ast.keyword) and node.arg == "strict":
            return  # of zip: an assertion, no part of the answer
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child, function, node)

    yield from visit(tree, "", None)


def _replacements(node: ast.AST) -> Iterator[str]:
    for kind, replace in _OPERATORS:
        if isinstance(node, kind):
            yield from replace(node)


def _compare(node: ast.Compare) -> Iterator[str]:
    for index, operator in enumerate(node.ops):
        for other in _COMPARE.get(type(operator), ()):
            ops = [*node.ops[:index], other(), *node.ops[index + 1 :]]
            yield ast.unparse(ast.Compare(node.left, ops, node.comparators))


def _constant(node: ast.Constant) -> Iterator[str]:
    if type(node.value) is int:
        yield str(node.value + 1)
        yield str(node.value - 1) if node.value > 0 else "(-1)"
    elif type(node.value) is bool:
        yield str(not node.value)
    elif type(node.value) is float:
        yield repr(node.value + 1)


def _arithmetic(node: ast.BinOp) -> Iterator[str]:
    if other := _ARITHMETIC.get(type(node.op)):
        yield ast.unparse(ast.BinOp(node.left, other(), node.right))


def _in_place(node: ast.AugAssign) -> Iterator[str]:
    yield "pass"
    if other := _ARITHMETIC.get(type(node.op)):
        yield ast.unparse(ast.AugAssign(node.target, other(), node.value))


def _logic(node: ast.BoolOp) -> Iterator[str]:
    other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    yield ast.unparse(ast.BoolOp(other, node.values))


def _negation(node: ast.UnaryOp) -> Iterator[str]:
    if isinstance(node.op, (ast.Not, ast.USub)):
        yield ast.unparse(node.operand)


def _call(node: ast.Call) -> Iterator[str]:
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    arguments = [a for a in node.args if not isinstance(a, ast.Starred)]
    if isinstance(called, ast.Attribute) and name in _COPIES and not node.args:
        yield ast.unparse(called.value)
    if len(arguments) == 1 == len(node.args) and (name in _IDENTITY or name in _COPIES):
        yield ast.unparse(arguments[0])
    if name == "range" and len(arguments) == len(node.args):
        for index, argument in enumerate(arguments[:2]):
            for sign in ("+", "-"):
                given = [ast.unparse(a) for a in arguments]
                given[index] = f"{ast.unparse(argument)} {sign} 1"
                yield f"range({', '.join(given)})"
    elif len(arguments) == len(node.args) >= 2 and name not in _SYMMETRIC:
        swapped = [node.args[1], node.args[0], *node.args[2:]]
        yield ast.unparse(ast.Call(called, swapped, node.keywords))


def _slice(node: ast.Slice) -> Iterator[str]:
    for bound in ("lower", "upper"):
        value = getattr(node, bound)
        if value is None or isinstance(value, ast.Constant):
            continue
        for sign in (ast.Add(), ast.Sub()):
            moved = ast.BinOp(value, sign, ast.Constant(1))
            parts: dict[str, Any] = {
                "lower": node.lower,
                "upper": node.upper,
                "step": node.step,
                bound: moved,
            }
            yield ast.unparse(ast.Slice(**parts))


def _statement(node: ast.stmt) -> Iterator[str]:
    called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if called or isinstance(node, (ast.Raise, ast.Break, ast.Continue)):
        yield "pass"
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "return None"
    elif isinstance(node, ast.If) and not node.orelse and len(node.body) > 0:
        test = ast.unparse(node.test)
        if not any(isinstance(part, ast.Raise) for part in node.body):
            rest = ast.If(ast.Constant(False), node.body, [])
            if test != "False":
                indent = " " * node.col_offset
                yield ast.unparse(rest).replace("\n", f"\n{indent}")


_OPERATORS: list[tuple[type[ast.AST], Callable[..., Iterator[str]]]] = [
    (ast.Compare, _compare),
    (ast.Constant, _constant),
    (ast.BinOp, _arithmetic),
    (ast.AugAssign, _in_place),
    (ast.BoolOp, _logic),
    (ast.UnaryOp, _negation),
    (ast.Call, _call),
    (ast.Slice, _slice),
    (ast.stmt, _statement),
]
