"""What a claim is, and what comes out when it is worked out again.

A claim's module holds one `Claim`. Its `reproduce` computes everything afresh, the same for the
same `Settings` (but for what it says it measured), and returns `Findings`: sentences made of the
numbers it found, the numbers as tables and by name, and a figure as data, which `figures` draws.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Cell = str | float | int


@dataclass(frozen=True)
class Source:
    """Where it was said: a paper, a talk or a post."""

    title: str
    url: str


@dataclass(frozen=True)
class Settings:
    """What a user may choose. trace: a file of real requests, for claims that take one.
    processes: how many may work at the same time; the results do not depend on it."""

    seed: int = 0
    trace: Path | None = None
    processes: int = field(default_factory=lambda: os.cpu_count() or 1)

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        if self.processes < 1:
            raise ValueError(f"processes must be at least 1, got {self.processes}")


@dataclass(frozen=True)
class Table:
    """columns: heading → how its cells are formatted (a format spec such as ".2f"; "" for text).
    A cell of text is printed as it is, in any column."""

    title: str
    columns: Mapping[str, str]
    rows: tuple[tuple[Cell, ...], ...]


# -- a figure as data


@dataclass(frozen=True)
class Curve:
    """Points of one line. hollow: those of them, by index, that are drawn empty. points: without
    the line between them."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    hollow: tuple[int, ...] = ()
    points: bool = False

    @classmethod
    def of(cls, label: str, points: Mapping[float, float] | Mapping[int, float]) -> Curve:
        """points: x → y."""
        return cls(label, tuple(map(float, points)), tuple(points.values()))


@dataclass(frozen=True)
class CurvePanel:
    """log: the axes that are logarithmic ("", "x", "y", "xy"). x_marks, y_marks: lines with a
    name at a value. hollow_label: what an empty point means."""

    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    log: str = ""
    x_marks: Mapping[str, float] = field(default_factory=dict)
    y_marks: Mapping[str, float] = field(default_factory=dict)
    hollow_label: str = ""


@dataclass(frozen=True)
class BarPanel:
    """Horizontal bars (with log="x" points). bars: legend → one value a name, from the top down.
    hollow: (legend, name) of bars that are drawn empty, and hollow_label what that means."""

    title: str
    x_label: str
    names: tuple[str, ...]
    bars: Mapping[str, tuple[float, ...]]
    log: str = ""
    x_marks: Mapping[str, float] = field(default_factory=dict)
    hollow: frozenset[tuple[str, str]] = frozenset()
    hollow_label: str = ""


Panel = CurvePanel | BarPanel


# -- the claim and what was found


@dataclass(frozen=True)
class Findings:
    """What came out.

    basis: what the numbers are: arithmetic, a replay, or "simulated, step times of …".
    verdict: the shortest honest answer, for a table. reproduction: what we find, in a sentence or
    two. breaking: the setting that breaks the claim, with what it gives. honest: sentences one
    may say. values: the numbers everything rests on, by name with unit.
    """

    basis: str
    verdict: str
    reproduction: str
    breaking: str
    honest: tuple[str, ...]
    tables: tuple[Table, ...]
    panels: tuple[Panel, ...]
    values: Mapping[str, float]


@dataclass(frozen=True)
class Claim:
    """name: as on the command line. statement: what is said, in a sentence. sources: by whom.
    code: (place, what lives there), for readers. trace: the columns a trace must have that
    `Settings.trace` may name, in words; "" for a claim that takes none."""

    name: str
    statement: str
    sources: tuple[Source, ...]
    reproduce: Callable[[Settings], Findings]
    code: tuple[tuple[str, str], ...] = ()
    trace: str = ""
