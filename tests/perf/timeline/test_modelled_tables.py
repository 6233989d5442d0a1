"""The committed tables: complete, what the JSON says, and what the model says today."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minifer.perf.timeline import tables as modelled_tables
from minifer.perf.timeline.decode import AHEAD, COUNTERS, PREFETCH, Assumptions

RESULTS = Path(__file__).parents[3] / "lectures" / "results"
STALE = "out of date: run `minifer kernels timeline --table` as the file says"


def committed() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RESULTS / "modelled_bandwidth.json").read_text("utf-8"))
    return data


def test_the_committed_tables_cover_every_overhead_and_tile_and_are_what_the_json_says() -> None:
    data = committed()
    found = [(r["device"], r["overhead_us"], r["tile"], r["arm"]) for r in data["bandwidth"]]
    assert found == [
        (device, overhead, tile, arm)
        for device in ("H100-SXM", "H200-SXM")
        for overhead in (0.5, 0.8, 1.2, 1.8, 2.5)
        for tile in (8, 16, 32)
        for arm in (COUNTERS, PREFETCH, AHEAD)
    ]
    text = (RESULTS / "modelled_bandwidth.md").read_text(encoding="utf-8")
    assert text == modelled_tables.markdown(data), STALE
    assert "Modelled, not measured" in text and data["what"].startswith("MODELLED")


@pytest.mark.parametrize("index", [0, 13, 44, 61, 89])
def test_cells_of_the_committed_tables_come_out_again(index: int) -> None:
    row = committed()["bandwidth"][index]
    overhead = row["overhead_us"] * 1e-6
    again = modelled_tables.cell(row["device"], row["arm"], tile=row["tile"], overhead=overhead)
    assert again == {"us": row["us"], "share": row["share"]}, STALE


def test_what_the_tables_say_of_the_reported_times_holds() -> None:
    """The same overhead serves both chips to within half a microsecond."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in committed()["reported"]:
        if "2026" in row["source"]:
            for arm, overhead in row["implied_overhead_us"].items():
                found.setdefault((row["what"], arm), []).append(overhead)
    assert len(found) == 8
    assert all(abs(h100 - h200) < 0.5 for h100, h200 in found.values())


def test_the_reported_time_is_met_at_the_overhead_that_the_tables_give() -> None:
    row = next(r for r in committed()["reported"] if r.get("us") == 972.8)
    overhead = row["implied_overhead_us"][f"{COUNTERS} at 100%"] * 1e-6
    us = modelled_tables.cell("H100-SXM", COUNTERS, context=96, overhead=overhead)["us"]
    assert us == pytest.approx(972.8, abs=1.5)
    assert Assumptions().achievable == 1
