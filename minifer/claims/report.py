"""A claim and its findings as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from minifer.claims.claim import BarPanel, Cell, Claim, CurvePanel, Findings, Panel, Settings, Table

WIDTH = 96
_LABEL = 13


def text(claim: Claim, findings: Findings) -> str:
    """Claim, source, basis, what we find, what breaks it, what one may say, the tables."""
    lines = [f"{claim.name}: {claim.statement}", "=" * (len(claim.name) + 1), ""]
    for i, source in enumerate(claim.sources):
        lines += _paragraph("said by" if i == 0 else "", source.title)
        lines += _paragraph("", source.url)
    lines += ["", *_paragraph("basis", findings.basis), ""]
    lines += [*_paragraph("we find", findings.reproduction), ""]
    lines += [*_paragraph("breaks when", findings.breaking), ""]
    for i, sentence in enumerate(findings.honest):
        lines += _paragraph("one may say" if i == 0 else "", f"- {sentence}", hang="  ")
    for table in findings.tables:
        lines += ["", *table_lines(table)]
    if claim.code:
        lines += ["", "in the code:"]
        width = max(len(place) for place, _ in claim.code) + 2
        lines += [f"  {place:{width}}{what}" for place, what in claim.code]
    return "\n".join(lines)


def _paragraph(label: str, sentence: str, hang: str = "") -> list[str]:
    indent = " " * _LABEL
    return textwrap.wrap(
        sentence,
        WIDTH,
        initial_indent=f"{label:<{_LABEL}}",
        subsequent_indent=indent + hang,
        break_long_words=False,
        break_on_hyphens=False,
    )


def table_lines(table: Table) -> list[str]:
    """Columns as wide as they need to be: text to the left, numbers to the right."""
    rows = [
        [_cell(cell, spec) for cell, spec in zip(row, table.columns.values(), strict=True)]
        for row in table.rows
    ]
    widths = [max(map(len, column)) for column in zip(list(table.columns), *rows, strict=True)]
    is_text = [not spec for spec in table.columns.values()]

    def line(cells: Iterable[str]) -> str:
        padded = [
            f"{cell:<{width}}" if left else f"{cell:>{width}}"
            for cell, width, left in zip(cells, widths, is_text, strict=True)
        ]
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return [table.title, "", line(table.columns), rule, *map(line, rows)]


def _cell(cell: Cell, spec: str) -> str:
    return cell if isinstance(cell, str) else f"{cell:{spec}}"


def summary(results: Sequence[tuple[Claim, Findings, float]]) -> list[str]:
    """One line a claim: name, seconds it took, verdict, what breaks it."""
    width = max(len(claim.name) for claim, *_ in results)
    lines = []
    for claim, findings, seconds in results:
        label = f"{claim.name:<{width}}  {seconds:5.1f} s  "
        lines += textwrap.wrap(
            findings.verdict,
            WIDTH + 8,
            initial_indent=label,
            subsequent_indent=" " * len(label),
            break_on_hyphens=False,
        )
    return lines


def to_dict(claim: Claim, findings: Findings, settings: Settings) -> dict[str, Any]:
    """JSON-ready: everything that `text` prints, the figure's data, and what made them."""
    return {
        "name": claim.name,
        "statement": claim.statement,
        "sources": [asdict(source) for source in claim.sources],
        "seed": settings.seed,
        "trace": None if settings.trace is None else settings.trace.name,
        "basis": findings.basis,
        "verdict": findings.verdict,
        "reproduction": findings.reproduction,
        "breaking": findings.breaking,
        "honest": list(findings.honest),
        "values": dict(findings.values),
        "tables": [
            {"title": table.title, "columns": list(table.columns), "rows": list(table.rows)}
            for table in findings.tables
        ],
        "figure": [_panel(panel) for panel in findings.panels],
    }


def _panel(panel: Panel) -> dict[str, Any]:
    common = {"title": panel.title, "x_label": panel.x_label, "log": panel.log}
    marks = {"x_marks": dict(panel.x_marks), "hollow_label": panel.hollow_label}
    if isinstance(panel, BarPanel):
        hollow = sorted(panel.hollow)
        return common | marks | {"names": panel.names, "bars": dict(panel.bars), "hollow": hollow}
    assert isinstance(panel, CurvePanel)
    curves = [asdict(curve) for curve in panel.curves]
    return (
        common
        | marks
        | {
            "y_label": panel.y_label,
            "y_marks": dict(panel.y_marks),
            "curves": curves,
        }
    )
