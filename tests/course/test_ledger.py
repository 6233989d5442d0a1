"""The claim ledger: every row has its cells, and a cell that goes is missed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jupytext")
import nbformat

from minifer.course.book.builder import Book
from minifer.course.book.ledger import cells_with_tags, load_ledger, missing, open_lectures
from minifer.course.book.ledger_page import page, problems, write_page

ROOT = Path(__file__).parents[2]
BOOK = Book(ROOT)
LEDGER = load_ledger(BOOK)
CELLS = cells_with_tags(BOOK)

TOML = """\
talk = {speaker = "S", title = "T", place = "P", date = "D", url = "https://example.org"}
[[part]]
title = "First"
[[part.row]]
number = 1
says = "One and one is two."
at = "0:01"
source = "Arithmetic."
status = ["reproduced"]
found = "It is."
lectures = ["L04"]
[[correction]]
number = 1
said = "three"
right = "two"
rows = [1]
lectures = ["L04", "L05"]
"""


@pytest.mark.parametrize("tag", LEDGER.entries)
def test_an_entry_has_its_cells(tag: str) -> None:
    """Tag the cell that answers it, `minifer book build LNN`, `minifer book pages`."""
    assert missing(BOOK, LEDGER.entries[tag], CELLS.get(tag, [])) == []
    assert open_lectures(BOOK, LEDGER.entries[tag]) == []


def test_the_ledger_is_complete_and_every_tag_is_in_it() -> None:
    assert (len(LEDGER.rows), len(LEDGER.corrections)) == (34, 14)
    assert set(CELLS) == set(LEDGER.entries)
    assert all(row.source and row.found and row.at for row in LEDGER.rows)


def notebook(*cells: tuple[str, str, list[str]]) -> Any:
    """(text, "markdown" or a kind, further tags)."""
    made = nbformat.v4.new_notebook()
    for number, (text, kind, tags) in enumerate(cells, start=1):
        new = nbformat.v4.new_markdown_cell if kind == "markdown" else nbformat.v4.new_code_cell
        cell = new(text, metadata={"tags": tags if kind == "markdown" else [kind, *tags]})
        cell.id = f"L04-c{number:03d}"
        made.cells.append(cell)
    return made


@pytest.fixture
def book(tmp_path: Path) -> Book:
    """One lecture of the two that are owed, and a page that fits."""
    (tmp_path / "lectures").mkdir()
    (tmp_path / "lectures/claims.toml").write_text(TOML)
    made = notebook(
        ("# L04 · Sums\n\n## How much | is it?", "markdown", []),
        ("print(1 + 1)", "claim", ["row-1"]),
        ("Two.\n\n## Next", "markdown", ["correction-1"]),
    )
    nbformat.write(made, tmp_path / "lectures/L04_sums.ipynb")
    write_page(Book(tmp_path))
    return Book(tmp_path)


def test_a_page_links_cells_and_says_what_is_open(book: Book) -> None:
    assert list(problems(book)) == []
    text = page(book)
    cell = "[L04-c002](L04_sums.ipynb#L04-c002) “How much \\| is it?” (claim)"
    assert (
        f"- *Here.* **reproduced** (correction [1](#correction-1)). It is.\n- *Cells.* {cell}"
        in text
    )
    assert "| reproduced | 1 | a cell" in text and "; **open: correction-1**" in text
    assert "“How much \\| is it?” (text)<br>**open**: L05 is not written yet |" in text


def test_a_cell_that_goes_is_missed(book: Book) -> None:
    path = book.lectures / "L04_sums.ipynb"
    changed = nbformat.read(path, as_version=4)
    changed.cells[1].metadata.tags = ["claim"]
    changed.cells[2].metadata.tags = ["row-9"]
    nbformat.write(changed, path)
    assert list(problems(book)) == [
        "L04-c003 has the tag row-9, which is not in claims.toml",
        "row-1: no cell of L04 has this tag",
        "row-1 is reproduced, but no cell of code has this tag",
        "correction-1: no cell of L04 has this tag",
        "CLAIMS.md is not what claims.toml and the lectures say: minifer book pages",
    ]


def test_prose_alone_reproduces_nothing(book: Book) -> None:
    path = book.lectures / "L04_sums.ipynb"
    changed = nbformat.read(path, as_version=4)
    changed.cells[1].metadata.tags, changed.cells[2].metadata.tags = ["claim"], ["row-1"]
    nbformat.write(changed, path)
    assert "row-1 is reproduced, but no cell of code has this tag" in list(problems(book))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("number = 1\nsays", "number = 2\nsays", "numbers must count up from 1"),
        ('["reproduced"]', '["proved"]', "status of row-1 must be of"),
        ("rows = [1]", "rows = [7]", "correction-1 is of unknown rows"),
        ('at = "0:01"', 'when = "0:01"', "a key is missing or unknown"),
    ],
)
def test_data_of_another_shape_is_refused(book: Book, old: str, new: str, message: str) -> None:
    (book.lectures / "claims.toml").write_text(TOML.replace(old, new))
    with pytest.raises(ValueError, match=message):
        load_ledger(book)


def test_a_book_without_a_ledger_has_none(tmp_path: Path) -> None:
    (tmp_path / "lectures").mkdir()
    assert list(problems(Book(tmp_path))) == []
