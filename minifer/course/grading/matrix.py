"""The page "how this can go wrong": every exercise, its mistakes, and the test that finds each.

`lectures/results/grader_matrix.json` holds what the exams found, exercise by exercise; the page is
made from it, so an exam of one lecture leaves the rest of the page as it is.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minifer.course.grading.exam import Exam
from minifer.course.grading.runner import wanted

_INTRO = """\
# How the exercises can go wrong

A test is worth what it finds. So each exercise of this book is taken by answers that are wrong in
a known way, and its tests must find them: `minifer grade --mutants` runs them all and writes this
page.

| answer | must get |
|---|---|
| the solution, with five seeds | all points |
| the stub | none, and be called "not attempted" |
| trivial answers (`return None`, zeros like the first argument, …) | none |
| **named mistakes**: those that people make | fewer, in the test that covers what is wrong |
| **automatic changes** of one operator, constant, call or line of the solution | fewer, 9 of 10 |
| **cheats** | none |

A sentence in the column *what it does* is what `minifer grade` and `check()` say when your answer
behaves like that mistake on all probes. Reading a table is a way to learn: cover the right columns
and say which inputs tell the mistake from the solution. *Loses* counts points.

An automatic change that no test can find, because it changes nothing that the text asks for, has a
line that says so, folded below its exercise, and is not counted.
"""


def load(path: Path) -> dict[str, Any]:
    """What earlier exams found; empty without a file."""
    if not path.is_file():
        return {"exercises": {}, "cheats": []}
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def merge(data: dict[str, Any], exams: Iterable[Exam], cheats: list[dict[str, str]]) -> None:
    """Put new findings in the place of old ones. An empty list of cheats leaves those alone."""
    for exam in exams:
        data["exercises"][exam.exercise] = asdict(exam) | {"rate": round(exam.rate, 3)}
    order = sorted(data["exercises"], key=lambda name: tuple(map(int, name.split("."))))
    data["exercises"] = {name: data["exercises"][name] for name in order}
    if cheats:
        data["cheats"] = cheats


def forget_others(data: dict[str, Any], exercises: Iterable[str]) -> None:
    """Leave out exercises that are no longer there."""
    there = list(exercises)
    data["exercises"] = {k: v for k, v in data["exercises"].items() if wanted(k, there)}


def write(data: dict[str, Any], path: Path) -> list[Path]:
    """Write the .json at `path` and the page beside it; each appears as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    page = path.with_suffix(".md")
    text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    for target, content in ((path, text), (page, render(data))):
        new = target.with_name(f".{target.name}.{os.getpid()}")
        new.write_text(content, encoding="utf-8", newline="\n")
        os.replace(new, target)
    return [path, page]


def render(data: dict[str, Any]) -> str:
    """The page as markdown."""
    exercises = data["exercises"].values()
    parts = [_INTRO, _summary(exercises), *(_exercise(exam) for exam in exercises)]
    parts.append(_cheats(data["cheats"]))
    return "\n".join(part for part in parts if part)


def _summary(exercises: Iterable[dict[str, Any]]) -> str:
    lines = [
        "## All exercises",
        "",
        "| exercise | points | tests | named mistakes found | automatic changes found | open |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    sums = [0.0] * 7
    for exam in exercises:
        points = sum(test["points"] for test in exam["tests"])
        must = [mutant for mutant in exam["named"] if mutant["status"] == "must_die"]
        dead = sum(mutant["killed_by"] in mutant["failing"] for mutant in must)
        alive = list(exam["survivors"].values())
        excused = sum(1 for reason in alive if reason)
        counted = exam["automatic"] - excused
        open_ = len(exam["problems"]) + sum(1 for reason in alive if not reason)
        found = counted - len(alive) + excused
        row = (points, len(exam["tests"]), dead, len(must), found, counted, open_)
        sums = [total + value for total, value in zip(sums, row, strict=True)]
        name = f"{exam['exercise']} {exam['title']}"
        lines.append(_row(f"[{name}](#{_anchor(name)})", row))
    lines.append(_row("**all**", sums))
    return "\n".join([*lines, ""])


def _row(name: str, numbers: Sequence[float]) -> str:
    points, tests, dead, named, found, counted, open_ = (f"{number:g}" for number in numbers)
    return (
        f"| {name} | {points} | {tests} | {dead} of {named} | {found} of {counted} | "
        f"{'' if open_ == '0' else open_} |"
    )


def _anchor(heading: str) -> str:
    """Where a heading of markdown is linked to."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _exercise(exam: dict[str, Any]) -> str:
    points = {test["name"]: test["points"] for test in exam["tests"]}
    lines = [f"## {exam['exercise']} {exam['title']}", ""]
    if exam["named"]:
        lines += [
            "| mistake | what it does | found by | loses |",
            "|---|---|---|---|",
        ]
        for mutant in exam["named"]:
            found = mutant["killed_by"] if mutant["killed_by"] in mutant["failing"] else "—"
            others = len([name for name in mutant["failing"] if name != found])
            more = f" and {others} more" if others else ""
            lost = sum(points[name] for name in mutant["failing"])
            what, by = mutant["diagnosis"], f"`{_test(found)}`{more}"
            if mutant["status"] == "equivalent":
                what, by = f"{what} *Equivalent: {mutant['note']}*", "nothing, rightly"
            lines.append(f"| {_name(mutant['id'])} | {_cell(what)} | {by} | {lost:g} |")
        lines.append("")
    alive = exam["survivors"]
    lost = exam["automatic"] - len(alive)
    lines += [f"Automatic changes: {lost} of {exam['automatic']} lose points.", ""]
    if alive:
        told = "The one that lives" if len(alive) == 1 else f"The {len(alive)} that live"
        lines += [f"<details><summary>{told}, and why</summary>", ""]
        lines += ["| change | why it may live |", "|---|---|"]
        lines += [f"| {_cell(key)} | {_cell(why) or '**open**'} |" for key, why in alive.items()]
        lines += ["", "</details>", ""]
    earning = {name: got for name, got in exam["trivial"].items() if got}
    if earning:
        told = ", ".join(f"`{name}` {got:g}" for name, got in earning.items())
        lines += [f"Trivial answers that earn points: {told}.", ""]
    if exam["problems"]:
        lines += ["Open:", "", *(f"- {_cell(problem)}" for problem in exam["problems"]), ""]
    return "\n".join(lines)


def _cheats(cheats: list[dict[str, str]]) -> str:
    if not cheats:
        return ""
    lines = [
        "## Cheats",
        "",
        "Each is a file handed in for an exercise of its own, beside an honest answer to a second "
        "one, which must keep its points. *Expected a list, got None* stands where the attack came "
        "to nothing and the file had no other answer.",
        "",
        "| what it does | what the grader says | gains |",
        "|---|---|---|",
    ]
    for cheat in cheats:
        lines.append(f"| {_cell(cheat['what'])} | {_cell(cheat['says'])} | {cheat['gains']} |")
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _test(name: str) -> str:
    return name if name == "—" else name.removeprefix("test_")


def _name(mutant: str) -> str:
    """ex04_3_m2_cow_forgotten → cow forgotten"""
    parts = mutant.split("_")
    return " ".join(parts[3:] if len(parts) > 3 else parts)
