"""What the climb leaves behind: rows, the file they are kept in, and the table.

Schema of the JSON (`schema_version` 1)::

    schema_version, name "decode-ladder", started, machine, versions, git   as in perf/bench.py
    settings        seed, probes, budget of a cell in seconds, and what the caller adds
    bandwidth       {copy, read, samples} as measured here; datasheet: bytes/s, null if unknown
    cells           model, batch, context, layers (null: all), weight_bytes and kv_bytes of a step,
                    reason (why nothing ran, or null), and rows, one a rung:
        rung, change
        status      ok · wrong (its speed is void) · failed · skipped · running (its process ended)
        reason      why it is not ok, or what else must be known; null if nothing
        timing      "in turns", "alone" (before the turns began), or null: not timed
        seconds     of a step: {values, median, min, max, iqr}
        bytes_per_second, of_copy, of_read, of_datasheet
        launches    a step: {host, kernels, other}; null where they were not counted
        error       of logits against float32: {max, rms, ratio: rms ÷ eager's, fidelity: is that
                    no worse than eager's?, agreement: share of equal greedy tokens}
        build_seconds, notes

The file is replaced as a whole after each change, so a kill at any moment leaves a valid one.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from minifer.perf.bench import Summary, git_state, machine, versions
from minifer.perf.gpu.bandwidth import Bandwidth, datasheet
from minifer.perf.gpu.cell import Cell

SCHEMA_VERSION = 1
NAME = "decode-ladder"
# Rounding in another order changes an error by some per cent, a lost tile by orders of magnitude.
WRONG_RATIO = 4.0


@dataclass
class Row:
    """A rung of a cell; the fields are the schema's."""

    rung: str
    change: str
    status: str = "running"
    reason: str | None = None
    timing: str | None = None
    seconds: dict[str, Any] | None = None
    bytes_per_second: float | None = None
    of_copy: float | None = None
    of_read: float | None = None
    of_datasheet: float | None = None
    launches: dict[str, float] | None = None
    error: dict[str, Any] | None = None
    build_seconds: float | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    def refuse(self, status: str, reason: str) -> None:
        """Whatever speed it had is void."""
        self.status, self.reason, self.timing, self.seconds = status, reason, None, None
        self.bytes_per_second = self.of_copy = self.of_read = self.of_datasheet = None


@dataclass
class Ladder:
    """What was measured so far, and the file it is kept in."""

    settings: dict[str, Any]
    bandwidth: Bandwidth
    out: Path | None = None
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    cells: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machine = machine()
        sheet = datasheet(self.machine["accelerator"])
        self.datasheet = sheet.memory_bandwidth if sheet else None
        self._versions, self._git = versions(), git_state()

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "name": NAME,
            "started": self.started,
            "machine": self.machine,
            "versions": self._versions,
            "git": self._git,
            "settings": self.settings,
            "bandwidth": asdict(self.bandwidth) | {"datasheet": self.datasheet},
            "cells": self.cells,
        }

    def flush(self) -> None:
        """Replace the file in one step."""
        if self.out is not None:
            part = self.out.with_name(self.out.name + ".part")
            text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)
            part.write_text(text + "\n", encoding="utf-8")
            os.replace(part, self.out)

    def resume(self) -> None:
        """Take over the cells of the file; what ran when its process ended counts as failed.

        Raises `ValueError` when the file holds something else, or another machine's numbers.
        """
        if self.out is None or not self.out.exists():
            return
        old = json.loads(self.out.read_text(encoding="utf-8"))
        same = (old.get("name"), old.get("schema_version")) == (NAME, SCHEMA_VERSION)
        if not same or old["machine"]["accelerator"] != self.machine["accelerator"]:
            raise ValueError(f"{self.out} cannot be resumed: it is no ladder of this machine")
        self.started, self.cells = old["started"], old["cells"]
        for cell in self.cells:
            for row in cell["rows"]:
                if row["status"] == "running":
                    row["status"] = "failed"
                    row["reason"] = "the process ended while this rung ran: a crash or a hang"

    def entry(self, cell: Cell) -> dict[str, Any]:
        """The cell's place, made if there is none."""
        for entry in self.cells:
            if all(entry[key] == value for key, value in asdict(cell).items()):
                return entry
        cost = cell.cost()
        floor = {"weight_bytes": cost.weight_bytes, "kv_bytes": cost.kv_bytes}
        self.cells.append({**asdict(cell), **floor, "reason": None, "rows": []})
        return self.cells[-1]

    def time(self, row: Row, summary: Summary, timing: str, num_bytes: float) -> None:
        """Fill in a step's seconds and what follows from them."""
        row.timing, row.seconds = timing, asdict(summary)
        row.bytes_per_second = rate = num_bytes / summary.median
        row.of_copy, row.of_read = rate / self.bandwidth.copy, rate / self.bandwidth.read
        row.of_datasheet = rate / self.datasheet if self.datasheet else None


def judge(row: Row, maximum: float, rms: float, agreement: float, eager: float | None) -> None:
    """Hold errors against float32 beside eager's rms (None: this is eager), and say what is wrong.

    The fidelity gate is the one of "Megakernels versus CUDA graphs"
    (https://github.com/msaroufim/megakernels-vs-cuda-graphs): an error against float32 that is no
    worse than plain bfloat16's, here to two decimals. Missing it is reported; far beyond it, the
    result is wrong.
    """
    if not (math.isfinite(maximum) and math.isfinite(rms)):
        row.refuse("wrong", "its error against float32 is not a finite number")
        return
    ratio = None if not eager else rms / eager
    row.error = {
        "max": maximum,
        "rms": rms,
        "ratio": ratio,
        "fidelity": None if ratio is None else round(ratio, 2) <= 1.0,
        "agreement": agreement,
    }
    row.status = "ok"
    if ratio is not None and ratio > WRONG_RATIO:
        row.refuse(
            "wrong",
            f"its error against float32 is {ratio:.3g} times eager's, more than {WRONG_RATIO:g}",
        )


def table(ladder: Ladder) -> str:
    """For people: a table a cell, and where it was measured."""
    lines = []
    for cell in ladder.cells:
        moved = (cell["weight_bytes"] + cell["kv_bytes"]) / 1e9
        title = Cell(cell["model"], cell["batch"], cell["context"], cell["layers"])
        lines += ["", f"{title}: {moved:.3g} GB a step", _HEADER]
        if cell["reason"]:
            lines.append(f"  {cell['reason']}")
        lines += [line(Row(**row)) for row in cell["rows"]]
    b, sheet = ladder.bandwidth, ladder.datasheet
    where = ladder.machine["accelerator"] or ladder.machine["cpu"]
    versions = ", ".join(f"{k} {v}" for k, v in ladder.to_dict()["versions"].items())
    against = f"; datasheet {sheet / 1e9:,.0f} GB/s" if sheet else ""
    lines += [
        "",
        "µs/step: median; copy: share of the copy bandwidth; launch: by the host, a step; max |Δ|:",
        "of logits to float32; ÷eager: their rms error, eager's is 1; agree: equal greedy tokens",
        f"measured bandwidth: copy {b.copy / 1e9:,.0f} GB/s, read {b.read / 1e9:,.0f} GB/s"
        f"{against}; {where}; {versions}",
    ]
    return "\n".join(lines[1:])


_COLUMNS = ((16, "rung"), (9, "µs/step"), (7, "IQR"), (7, "GB/s"), (6, "copy"), (7, "launch"))
_ERRORS = ((9, "max |Δ|"), (7, "÷eager"), (6, "agree"))
_HEADER = "  " + "".join(
    text.ljust(width) if i == 0 else text.rjust(width)
    for i, (width, text) in enumerate((*_COLUMNS, *_ERRORS))
)


def line(row: Row) -> str:
    """One row: speed, then correctness, then what else must be known."""
    cells = [row.rung]
    if row.seconds is not None and row.bytes_per_second is not None and row.of_copy is not None:
        cells += [f"{row.seconds['median'] * 1e6:.1f}", f"{row.seconds['iqr'] * 1e6:.1f}"]
        rate = row.bytes_per_second / 1e9
        cells += [f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}", f"{row.of_copy:.0%}"]
    else:
        cells += ["–"] * 4
    cells.append(f"{row.launches['host']:.0f}" if row.launches else "–")
    if row.error is not None:
        ratio = row.error["ratio"]
        cells += [f"{row.error['max']:.2g}", "1" if ratio is None else f"{ratio:.2f}"]
        cells.append(f"{row.error['agreement']:.0%}")
    else:
        cells += ["–"] * 3
    widths = [width for width, _ in (*_COLUMNS, *_ERRORS)]
    text = cells[0].ljust(widths[0])
    text += "".join(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
    remarks = [] if row.status == "ok" else [row.status]
    if row.error is not None and row.error["fidelity"] is False:
        remarks.append("misses the fidelity gate")
    if row.reason:
        remarks.append(row.reason)
    return "  " + text + ("  " + "; ".join(remarks) if remarks else "")
