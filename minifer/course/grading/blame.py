"""Whose error is it: the answer's, or the test's? And the words a learner reads."""

from __future__ import annotations

import ast
import linecache
import os
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Literal

import pytest

from minifer.course.grading.plain import short
from minifer.course.grading.sandbox import BlockedError
from minifer.course.grading.target import STUB, MissingNameError
from minifer.course.grading.trust import Trust

Status = Literal["passed", "failed", "not attempted", "error"]
# Where an AssertionError may come from to be a verdict about the answer.
_VERDICTS = ("minifer/course/grading/compare.py", "torch/testing/", "numpy/testing/")


class EndedError(Exception):
    """An answer raised what would have ended the whole run; says its name."""


def judge(error: BaseException, trust: Trust, exercise: str) -> tuple[Status, str]:
    """What an exception in a test means, and the message.

    "failed": the innermost frame that belongs to the answer or to the test is the answer's, or the
    test said so by an assertion. "error": the test file itself went wrong.
    """
    if isinstance(error, NotImplementedError) and (stub := STUB.fullmatch(str(error))):
        needed = stub[1]
        return "not attempted", "" if needed == exercise else f"needs {needed}, not attempted"
    if isinstance(error, MissingNameError):
        return "failed", str(error)
    trace = list(_walk(error.__traceback__))
    whose, frame, line = _innermost(trace, trust)
    if isinstance(error, BlockedError) and not _denies_a_test(trace, trust):
        return "failed", str(error)
    if whose == "answer":
        return "failed", _raised(error, trace, trust)
    text = str(error)
    if isinstance(error, pytest.fail.Exception):
        return "failed", _not_raised(text, frame, line)
    if isinstance(error, AssertionError) and _is_verdict(trace, trust):
        return "failed", text or _statement(frame, line)
    place = _place(frame, line) if frame is not None else "outside the test"
    return "error", f"{type(error).__name__}: {text}\n{place}"


def _walk(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _innermost(
    trace: list[tuple[FrameType, int]], trust: Trust
) -> tuple[str, FrameType | None, int]:
    for frame, line in reversed(trace):
        if not trust.frame(frame):
            return "answer", frame, line
        if trust.is_test(frame.f_code.co_filename):
            return "test", frame, line
    return "nobody", None, 0


def _denies_a_test(trace: list[tuple[FrameType, int]], trust: Trust) -> bool:
    return all(trust.frame(frame) for frame, _ in trace)


def _is_verdict(trace: list[tuple[FrameType, int]], trust: Trust) -> bool:
    name = trace[-1][0].f_code.co_filename.replace(os.sep, "/") if trace else ""
    return trust.is_test(name) or any(place in name for place in _VERDICTS)


def _raised(error: BaseException, trace: list[tuple[FrameType, int]], trust: Trust) -> str:
    """tried: the call with its arguments; then what was raised, and where."""
    mine = [(frame, line) for frame, line in trace if not trust.frame(frame)]
    code, values = mine[0][0].f_code, mine[0][0].f_locals
    names = list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    given = ", ".join(f"{n}={short(values[n], 120)}" for n in names if n in values)
    said = f"{type(error).__name__}: {short_text(str(error))}".rstrip(": ")
    if isinstance(error, EndedError):
        said = str(error)
    return f"tried     {code.co_name}({given})\nraised    {said}\n{_place(*mine[-1])}"


def _not_raised(text: str, frame: FrameType | None, line: int) -> str:
    """`pytest.raises` without the exception; the statement inside it says what was tried."""
    if frame is None or not text.startswith("DID NOT RAISE"):
        return text
    wanted = text.removeprefix("DID NOT RAISE").strip().split("'")
    name = wanted[1] if len(wanted) > 1 else wanted[0]
    inside = _statement(frame, line)
    return f"tried     {inside}\nexpected  {name}\ngot       no error"


def _statement(frame: FrameType | None, line: int) -> str:
    """Source of the smallest statement at a line; of a `with`, what stands in it."""
    if frame is None:
        return ""
    name = frame.f_code.co_filename
    try:
        tree = ast.parse("".join(linecache.getlines(name)))
    except SyntaxError:
        return linecache.getline(name, line).strip()
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    if not found:
        return linecache.getline(name, line).strip()
    smallest = max(found, key=lambda node: (node.lineno, -(node.end_lineno or 0)))
    shown = smallest.body if isinstance(smallest, ast.With) else [smallest]
    return short_text("; ".join(ast.unparse(node) for node in shown), 300)


def _place(frame: FrameType, line: int) -> str:
    name = frame.f_code.co_filename
    text = linecache.getline(name, line).strip()
    cell = Path(name).parent.name.startswith("ipykernel_")  # its file has a number for a name
    place = "the cell" if cell else Path(name).name
    return f"in line {line} of {place}" + (f": {text}" if text else "")


def short_text(text: str, longest: int = 600) -> str:
    return text if len(text) <= longest else text[:longest] + " …"
