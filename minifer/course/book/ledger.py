"""The claim ledger: what the guest lecture says, and which cell of the book answers it.

`lectures/claims.toml` holds 34 rows and 14 corrections. A cell that answers row 12 carries the tag
`row-12`, one that corrects number 3 `correction-3`. `lectures/CLAIMS.md` is made from both.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from minifer.course.book.builder import NBVAL_TAGS, Book

STATUSES = ("reproduced", "modelled", "reported", "corrected")
_COMPUTED = {"reproduced", "modelled"}  # a cell of code must answer


@dataclass(frozen=True)
class Row:
    """A statement. at: where in the talk. laboratory: of `minifer claims`, "" for none.

    lectures: those that owe a cell tagged `row-N`.
    """

    number: int
    says: str
    at: str
    source: str
    status: Sequence[str]
    found: str
    lectures: Sequence[str]
    laboratory: str = ""

    @property
    def tag(self) -> str:
        return f"row-{self.number}"


@dataclass(frozen=True)
class Correction:
    """What was written down wrongly, and what is right. rows: those it belongs to."""

    number: int
    said: str
    right: str
    rows: Sequence[int]
    lectures: Sequence[str]

    @property
    def tag(self) -> str:
        return f"correction-{self.number}"


@dataclass(frozen=True)
class Ledger:
    """parts: heading → its rows, in order."""

    talk: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    corrections: Sequence[Correction] = ()

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self.parts.values() for row in rows]

    @property
    def entries(self) -> dict[str, Row | Correction]:
        """Tag → row or correction."""
        entries: list[Row | Correction] = [*self.rows, *self.corrections]
        return {entry.tag: entry for entry in entries}


@dataclass(frozen=True)
class TaggedCell:
    """notebook: "L07_decode". id: "L07-c011". kind: "markdown", "claim", "measure", "picture"."""

    notebook: str
    id: str
    kind: str
    section: str

    @property
    def lecture(self) -> str:
        return self.notebook[:3]


def load_ledger(book: Book) -> Ledger:
    """From `lectures/claims.toml`; empty where there is none.

    Raises `ValueError` for numbers that do not count up from 1, an unknown key or status.
    """
    path = book.lectures / "claims.toml"
    if not path.is_file():
        return Ledger()
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    try:
        parts = {part["title"]: [Row(**row) for row in part["row"]] for part in data["part"]}
        ledger = Ledger(data["talk"], parts, [Correction(**c) for c in data["correction"]])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path.name}: a key is missing or unknown: {error}") from error
    for entries in (ledger.rows, ledger.corrections):
        numbers = [entry.number for entry in entries]
        if numbers != list(range(1, len(numbers) + 1)):
            raise ValueError(f"{path.name}: numbers must count up from 1, got {numbers}")
    for row in ledger.rows:
        if not row.status or set(row.status) - set(STATUSES):
            raise ValueError(f"{path.name}: status of {row.tag} must be of {STATUSES}")
    for correction in ledger.corrections:
        if not set(correction.rows) <= {row.number for row in ledger.rows}:
            raise ValueError(f"{path.name}: {correction.tag} is of unknown rows {correction.rows}")
    return ledger


def cells_with_tags(book: Book) -> dict[str, list[TaggedCell]]:
    """Tag → the cells of built lectures that carry it, in the order of the book."""
    import nbformat

    found: dict[str, list[TaggedCell]] = {}
    for path in sorted(book.lectures.glob("L*.ipynb")):
        section = ""
        for cell in nbformat.read(path, as_version=4).cells:
            tags = cell.metadata.get("tags", [])
            kind = next((tag for tag in tags if tag in NBVAL_TAGS), "markdown")
            parts = _sections(section, cell.source) if kind == "markdown" else {section: ""}
            where = max(parts, key=lambda heading: len(parts[heading]))
            for tag in filter(is_ledger_tag, tags):
                found.setdefault(tag, []).append(TaggedCell(path.stem, cell.id, kind, where))
            section = [*parts][-1]
    return found


def _sections(before: str, prose: str) -> dict[str, str]:
    """Heading → text below it. A cell of prose may end one section and begin the next."""
    first, *rest = re.split(r"(?m)^##? (.+)$", prose)
    return {before: first.strip(), **dict(zip(rest[::2], rest[1::2], strict=True))}


def is_ledger_tag(tag: str) -> bool:
    return re.fullmatch(r"(?:row|correction)-\d+", tag) is not None


def open_lectures(book: Book, entry: Row | Correction) -> list[str]:
    """Lectures that owe a cell and are not built: the entry is open until they are."""
    return [name for name in entry.lectures if not list(book.lectures.glob(f"{name}_*.ipynb"))]


def missing(book: Book, entry: Row | Correction, cells: Sequence[TaggedCell]) -> list[str]:
    """What an entry lacks, a sentence each. cells: those with its tag."""
    absent = open_lectures(book, entry)
    owing = [name for name in entry.lectures if name not in absent]
    found = [
        f"{entry.tag}: no cell of {name} has this tag"
        for name in owing
        if name not in {cell.lecture for cell in cells}
    ]
    only_text = owing and not absent and all(cell.kind == "markdown" for cell in cells)
    if only_text and isinstance(entry, Row) and _COMPUTED & set(entry.status):
        found.append(f"{entry.tag} is {entry.status[0]}, but no cell of code has this tag")
    return found
