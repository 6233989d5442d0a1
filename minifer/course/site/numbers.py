"""The page "Numbers and sources": what was measured or modelled, when and where."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from minifer.course.book.builder import Book

_LINK = re.compile(r"\[([^\]]+)\]\((https?://[^)\s]+)\)")


def numbers_page(book: Book, lectures: Mapping[str, Any]) -> str:
    """Markdown. lectures: page → notebook, whose links outside are listed."""
    return "\n".join(
        [
            "# Numbers and sources",
            "",
            "A number in this book is computed by a cell, or carries its source and date. "
            "*Measured* is what ran on the machine that is named, *modelled* what follows from a "
            "cost model or a simulator, *reported* what somebody else says.",
            "",
            "## Results that are kept",
            "",
            "| what | by | date | on |",
            "|---|---|---|---|",
            *_results(book),
            "",
            "## Chips",
            "",
            "What makers print; rates are dense, of 16-bit products. Ceilings, not measurements.",
            "",
            "| chip | TFLOP/s | TB/s | FLOPs a byte | memory | W | source | date |",
            "|---|--:|--:|--:|--:|--:|---|---|",
            *_chips(),
            "",
            "## Talks, papers and posts of the claims laboratory",
            "",
            *_sources(),
            "",
            "## What the lectures cite",
            "",
            *_cited(lectures),
        ]
    )


def _results(book: Book) -> Iterator[str]:
    for path in sorted((book.lectures / "results").glob("*.md")):
        data = path.with_suffix(".json")
        facts = json.loads(data.read_text(encoding="utf-8")) if data.is_file() else {}
        dates = sorted({str(d)[:10] for d in _found(facts, "date", "started")})
        cpus = sorted({str(c) for c in _found(facts, "cpu")})
        commands = sorted({str(c) for c in _found(facts, "command")})
        title = re.match(r"# (.+)", path.read_text(encoding="utf-8"))
        by = f"`{commands[0]}`" if len(commands) == 1 else "see the page"
        modelled = str(facts.get("what", "")).startswith("MODELLED")
        where = "modelled" if modelled else ", ".join(cpus) or "any machine"
        name = title[1] if title else path.stem
        yield f"| [{name}](lectures/results/{path.name}) | {by} | {_span(dates)} | {where} |"


def _span(dates: list[str]) -> str:
    return " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else ""


def _found(data: Any, *names: str) -> Iterator[Any]:
    """Values of these keys, wherever they stand."""
    if isinstance(data, dict):
        for key, value in data.items():
            if key in names and isinstance(value, str):
                yield value
            else:
                yield from _found(value, *names)
    elif isinstance(data, list):
        for value in data:
            yield from _found(value, *names)


def _chips() -> Iterator[str]:
    from minifer.perf.devices import DEVICES

    for chip in DEVICES.values():
        rates = f"{chip.peak_flops / 1e12:,.0f} | {chip.memory_bandwidth / 1e12:.2f}"
        memory = f"{chip.ridge_point:.0f} | {chip.memory_bytes / 1e9:g} GB | {chip.power_watts:g}"
        yield f"| {chip.name} | {rates} | {memory} | {chip.source} | {chip.date} |"


def _sources() -> Iterator[str]:
    from minifer.claims import sources
    from minifer.claims.claim import Source

    for value in vars(sources).values():
        if isinstance(value, Source):
            text, link = vars(value).values()
            yield f"- [{text}]({link})"


def _cited(lectures: Mapping[str, Any]) -> Iterator[str]:
    for page, notebook in lectures.items():
        links: dict[str, str] = {}
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                for label, link in _LINK.findall(cell.source):
                    links.setdefault(link, " ".join(label.split()))
        if links:
            cited = "; ".join(f"[{label}]({link})" for link, label in links.items())
            yield f"- [{page.rpartition('/')[2][:3]}]({page}.ipynb): {cited}"
