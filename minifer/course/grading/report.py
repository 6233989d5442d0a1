"""What came out, for people and for Gradescope."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from minifer.course.grading.runner import ExerciseResult

_MARKS = {"passed": "✔", "failed": "✘", "not attempted": "…"}
_VERSIONS = ("minifer", "torch", "numpy", "pytest")


def table(results: Sequence[ExerciseResult]) -> str:
    """Aligned lines: points, seconds and one reason an exercise; the messages follow."""
    width = max([len("exercise"), *(len(_name(result)) for result in results)])
    lines = [f"   {'exercise':{width}}  {'points':>8}  {'time':>6}"]
    for result in results:
        points = f"{result.score:g}/{result.max_score:g}"
        sign = "+" if result.optional else ""
        lines.append(
            f"{_MARKS[result.status]}  {_name(result):{width}}  {sign + points:>8}  "
            f"{result.seconds:>4.1f} s  {_reason(result)}".rstrip()
        )
    counted = [result for result in results if not result.optional]
    extra = [result for result in results if result.optional]
    score, most = sum(r.score for r in counted), sum(r.max_score for r in counted)
    lines.append(f"   {'total':{width}}  {f'{score:g}/{most:g}':>8}")
    if extra:
        points = f"+{sum(r.score for r in extra):g}/{sum(r.max_score for r in extra):g}"
        lines.append(f"   {'★ optional':{width}}  {points:>8}")
    messages = "\n".join(filter(None, map(_messages, results)))
    return "\n".join(lines) + (f"\n\n{messages}" if messages else "")


def _name(result: ExerciseResult) -> str:
    return f"{result.exercise}{' ★' if result.optional else ''} {result.title}".rstrip()


def _reason(result: ExerciseResult) -> str:
    """Why there are not all points, in one line."""
    if result.status == "not attempted":
        return "not attempted"
    first = next((test for test in result.tests if test.status != "passed"), None)
    if first is None:
        return ""
    lines = [line for line in first.message.splitlines() if line]
    last = lines[-1] if lines else first.status
    return last if len(last) <= 70 else last[:69] + "…"


def _messages(result: ExerciseResult) -> str:
    lines = []
    if result.answer and result.note:
        lines.append(f"{result.exercise}: {result.note}")
    for test in result.tests:
        if test.status == "passed" or result.status == "not attempted":
            continue
        case = f", case {test.case}" if test.case else ""
        lines.append(f"{_MARKS[test.status]} {test.name}{case} ({test.points:g} points)")
        lines += [f"    {line}" for line in (test.message or test.status).splitlines()]
    if result.printed and result.status == "failed":
        shown = result.printed.rstrip()[:1000]
        lines.append("    what it printed:")
        lines += [f"    | {line}" for line in shown.splitlines()[:20]]
    return "\n".join([*lines, ""]) if lines else ""


def gradescope(
    results: Sequence[ExerciseResult], seconds: float, seeds: Mapping[int, int], root: Path
) -> dict[str, Any]:
    """`results.json` as Gradescope reads it; the most one can get is the sum of `max_score`.

    seeds: seed → PYTHONHASHSEED of every run. An exercise marked ★ has a `max_score` of 0: what it
    earns is extra. Hidden tests are shown to students after the due date.
    """
    tests = [_entry(result, test) for result in results for test in result.tests]
    return {
        "score": sum(entry["score"] for entry in tests),
        "execution_time": round(seconds, 2),
        "output": "\n".join(f"{r.exercise}: {r.note}" for r in results if r.note),
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": tests,
        "leaderboard": [],
        "extra_data": {
            "not_attempted": [r.exercise for r in results if r.status == "not attempted"],
            "optional": [r.exercise for r in results if r.optional],
            "seed": next(iter(seeds), None),
            "runs": [{"seed": seed, "PYTHONHASHSEED": value} for seed, value in seeds.items()],
            "versions": {"python": platform.python_version(), **_versions()},
            "git": _commit(root),
        },
    }


def _entry(result: ExerciseResult, test: Any) -> dict[str, Any]:
    tags = [result.exercise, *(["optional"] if result.optional else [])]
    if test.status == "not attempted":
        tags.append("not attempted")
    output = test.message or ("not attempted" if test.status == "not attempted" else "")
    return {
        "name": f"{_name(result)}: {_words(test.name)}",
        "number": result.exercise,
        "score": test.points if test.status == "passed" else 0,
        "max_score": 0 if result.optional else test.points,
        "status": "passed" if test.status == "passed" else "failed",
        "output": output,
        "visibility": "after_due_date" if test.hidden else "visible",
        "tags": tags,
    }


def _words(name: str) -> str:
    """test_ex04_1_a_table_too_short → a table too short"""
    parts = name.removeprefix("test_").split("_")
    if parts[0].startswith("ex") and parts[1:2] and parts[1].isdigit():
        parts = parts[2:]
    return " ".join(parts)


def _versions() -> dict[str, str]:
    return {name: version(name) for name in _VERSIONS}


def _commit(root: Path) -> str:
    """The commit of the clone; "" where there is none."""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
