"""A learner installs `minifer[course]`, and no more: lectures and grader need nothing else."""

from __future__ import annotations

import ast
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
EXTRA = {"extra": "course"}


def imported(path: Path) -> set[str]:
    """Names of the packages that a file imports when it is imported itself."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names - {"__future__", "minifer"}


def installed_with_course() -> set[str]:
    """Distributions that `pip install minifer[course]` brings along, and what these need."""
    todo, found = ["minifer"], set()
    while todo:
        name = todo.pop()
        extra = EXTRA if name == "minifer" else {"extra": ""}
        try:
            needs = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:
            continue
        for need in needs:
            short = canonicalize_name(need.name)
            if short not in found and (need.marker is None or need.marker.evaluate(extra)):
                found.add(short)
                todo.append(short)
    return found


def test_the_course_extra_is_enough() -> None:
    files = [
        *(ROOT / "minifer" / "course").rglob("*.py"),
        *(ROOT / "lectures" / "src").glob("L*.py"),
        *(ROOT / "exercises").glob("ex*.py"),
        *(ROOT / "exercises" / "tests").glob("test_*.py"),
    ]
    site = ROOT / "minifer" / "course" / "site"  # needs the extra `docs`, and says so
    wanted: dict[str, str] = {}
    for path in files:
        if site not in path.parents:
            wanted |= dict.fromkeys(imported(path) - sys.stdlib_module_names, path.name)
    assert {"torch", "pytest"} <= set(wanted)
    brought = installed_with_course()
    owners = packages_distributions()
    missing = {
        name: file
        for name, file in wanted.items()
        if not brought & {canonicalize_name(owner) for owner in owners.get(name, [name])}
    }
    assert missing == {}
