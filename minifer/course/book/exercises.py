"""From a solution to its stub.

Markers, each alone on its line at the indentation of the code around it (the words are nbgrader's):

    ### BEGIN SOLUTION … ### END SOLUTION    becomes `# YOUR CODE HERE` and a NotImplementedError
    ### BEGIN AUTHOR … ### END AUTHOR        is dropped

The exercise a block belongs to is that of the last heading `### Exercise 4.3 - …`.
"""

from __future__ import annotations

import re

_MARKER = re.compile(r"^(?P<indent>\s*)### (?P<edge>BEGIN|END) (?P<kind>\w+)\s*$")
_HEADING = re.compile(r"^# ### Exercise (?P<id>\d+\.\d+)\b")
_KINDS = {"SOLUTION", "AUTHOR"}


def stub_of(text: str, name: str) -> str:
    """The exercise file of a master's text. name: for errors, "ex04_paged_kv".

    Raises `ValueError` for a marker that is unknown, unbalanced or nested, and for a solution
    before the first exercise heading.
    """
    return _split(text, name)[0]


def solution_blocks(text: str, name: str) -> list[tuple[str, str]]:
    """(exercise, code) of every solution block, in order. Raises as `stub_of`."""
    return _split(text, name)[1]


def _split(text: str, name: str) -> tuple[str, list[tuple[str, str]]]:
    kept: list[str] = []
    blocks: list[tuple[str, list[str]]] = []
    inside: str | None = None
    exercise: str | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if heading := _HEADING.match(line):
            exercise = heading["id"]
        marker = _MARKER.match(line)
        if marker is None:
            if inside is None:
                kept.append(line)
            elif inside == "SOLUTION":
                blocks[-1][1].append(line)
            continue
        where = f"{name}.py line {number}: {line.strip()}"
        if marker["kind"] not in _KINDS:
            raise ValueError(f"{where}: kind must be one of {sorted(_KINDS)}")
        if marker["edge"] == "BEGIN":
            if inside is not None:
                raise ValueError(f"{where}: a block of kind {inside} is open")
            inside = marker["kind"]
            if inside == "SOLUTION":
                if exercise is None:
                    raise ValueError(f"{where}: no `### Exercise N.M` heading before it")
                blocks.append((exercise, []))
                kept.append(f"{marker['indent']}# YOUR CODE HERE")
                kept.append(f'{marker["indent"]}raise NotImplementedError("ex{exercise}")')
        elif inside != marker["kind"]:
            raise ValueError(f"{where}: the open block is {inside}")
        else:
            inside = None
    if inside is not None:
        raise ValueError(f"{name}.py: a block of kind {inside} is never closed")
    found = [(exercise, "\n".join(lines) + "\n") for exercise, lines in blocks]
    return "\n".join(kept) + "\n", found
