"""`lectures/CLAIMS.md`: the ledger as a page, each entry linked to its cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from minifer.course.book.builder import Book
from minifer.course.book.ledger import (
    STATUSES,
    Correction,
    Ledger,
    Row,
    TaggedCell,
    cells_with_tags,
    load_ledger,
    missing,
    open_lectures,
)

PAGE = "CLAIMS.md"
_HEAD = """\
# The claim ledger

<!-- Made by `minifer book pages` from claims.toml and the lectures: do not edit. -->

This book grew from one lecture: {speaker}, [“{title}”]({url}), {place}, {date}. Here is every
statement of it that the book took up, with its primary source and what became of it. No slides
are published, and parts of them were drawn by a model; times are those of the recording, as notes
of listeners give them.

| status | rows | it means |
|---|--:|---|
| reproduced | {reproduced} | a cell computes it: from the engine, from data, or by arithmetic |
| modelled | {modelled} | a cell computes it from a cost model or simulator; nothing was measured |
| reported | {reported} | somebody else's number or word, with source and date |
| corrected | {corrected} | it does not stand as it was said, or as it was written down |

{rows} rows, {corrections} corrections; a row can have several statuses{open}. The cells are tagged
in the notebooks, and `minifer book check` finds an entry whose cell is gone. Where a command
stands, the claims laboratory repeats the row at length.

"""


def problems(book: Book) -> Iterator[str]:
    """What is wrong with the ledger, a sentence each: cells, tags, the page."""
    ledger, cells = load_ledger(book), cells_with_tags(book)
    for tag in sorted(cells.keys() - ledger.entries.keys()):
        yield f"{cells[tag][0].id} has the tag {tag}, which is not in claims.toml"
    for tag, entry in ledger.entries.items():
        yield from missing(book, entry, cells.get(tag, []))
    path = book.lectures / PAGE
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if ledger.entries and text != page(book):
        yield f"{PAGE} is not what claims.toml and the lectures say: minifer book pages"


def write_page(book: Book) -> Path:
    """Write `lectures/CLAIMS.md`."""
    path = book.lectures / PAGE
    path.write_text(page(book), encoding="utf-8", newline="\n")
    return path


def page(book: Book) -> str:
    """The text of `lectures/CLAIMS.md`."""
    ledger, cells = load_ledger(book), cells_with_tags(book)
    lines = [_head(book, ledger)]
    for title, rows in ledger.parts.items():
        lines += [f"## {title}", ""]
        for row in rows:
            corrections = [c.number for c in ledger.corrections if row.number in c.rows]
            lines += _row(row, corrections, _cells(book, row, cells.get(row.tag, []), "; "))
    lines += ["## Corrections", "", "What write-ups of the lecture, or its slides, got wrong.", ""]
    lines += ["| | it says | it is | rows | cells |", "|--:|---|---|---|---|"]
    for correction in ledger.corrections:
        where = _cells(book, correction, cells.get(correction.tag, []), "<br>")
        rows_of = ", ".join(f"[{number}](#row-{number})" for number in correction.rows)
        anchor = f'<a id="{correction.tag}"></a>{correction.number}'
        lines.append(f"| {anchor} | {correction.said} | {correction.right} | {rows_of} | {where} |")
    return "\n".join(lines) + "\n"


def _head(book: Book, ledger: Ledger) -> str:
    unwritten = [tag for tag, entry in ledger.entries.items() if open_lectures(book, entry)]
    return (
        _HEAD.format(
            **ledger.talk,
            **{s: sum(s in row.status for row in ledger.rows) for s in STATUSES},
            rows=len(ledger.rows),
            corrections=len(ledger.corrections),
            open=f"; **open: {', '.join(unwritten)}**" if unwritten else "",
        ).rstrip("\n")
        + "\n"
    )


def _row(row: Row, corrections: Sequence[int], cells: str) -> list[str]:
    status = ", ".join(f"**{name}**" for name in row.status)
    links = ", ".join(f"[{number}](#correction-{number})" for number in corrections)
    found = f"{row.found} (`minifer claims {row.laboratory}`)" if row.laboratory else row.found
    return [
        f'<a id="{row.tag}"></a>**{row.number}.** {row.says} ({row.at})',
        "",
        f"- *Source.* {row.source}",
        f"- *Here.* {status}{f' (correction {links})' if links else ''}. {found}",
        f"- *Cells.* {cells}",
        "",
    ]


def _cells(book: Book, entry: Row | Correction, cells: Sequence[TaggedCell], between: str) -> str:
    links = []
    for cell in cells:
        kind = "text" if cell.kind == "markdown" else cell.kind
        section = cell.section.replace("|", "\\|")
        links.append(f"[{cell.id}]({cell.notebook}.ipynb#{cell.id}) “{section}” ({kind})")
    links += [f"**open**: {name} is not written yet" for name in open_lectures(book, entry)]
    return between.join(links) or "**none**"
