"""`minifer bench limit` between the command line, the measurements and its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minifer.cli import main
from minifer.perf import limit
from minifer.perf.limit import MIB

Capture = pytest.CaptureFixture[str]
SMALL = ["bench", "limit", "--device", "cpu", "--model", "minifer-tiny", "--runs", "1"]


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small buffer and a short turn: what is measured does not matter here."""
    monkeypatch.setattr(limit, "_SMALLEST", MIB)
    monkeypatch.setattr(limit, "_LARGEST", MIB)
    monkeypatch.setitem(limit._MATRIX, "cpu", (64,))
    monkeypatch.setattr("minifer.perf.limit_bench._CEILING_SECONDS", 1e-6)


def test_every_number_arrives_in_the_table_and_in_the_files(
    instant: None, tmp_path: Path, capsys: Capture
) -> None:
    out, picture = tmp_path / "r.json", tmp_path / "r.svg"
    options = ["--batch", "1,3", "--context", "20", "--chunk", "8"]
    assert main([*SMALL, *options, "--out", str(out), "--out", str(picture)]) == 0
    printed = capsys.readouterr().out
    result = json.loads(out.read_text())
    assert (result["schema_version"], result["name"], result["runs"]) == (1, "limit", 1)
    works = ["decode 1 × 20", "decode 3 × 20", "prefill 8"]
    assert result["order"] == ["memory read", "matrix product", *works]
    assert [row["work"] for row in result["details"]["steps"]] == works
    here = result["details"]["here"]
    assert here["memory_bandwidth"] == result["arms"]["memory read"]["bytes_per_second"]["max"]
    assert here["peak_flops"] == result["arms"]["matrix product"]["flops_per_second"]["max"]
    for row in result["details"]["steps"]:
        moved = (row["weight_bytes"] + row["kv_bytes"]) / here["memory_bandwidth"]
        floor = max(moved, row["flops"] / here["peak_flops"])
        assert row["predicted_seconds"] == pytest.approx(floor)
        assert row["ratio"] == pytest.approx(row["measured_seconds"] / floor)
    for check in result["details"]["bytes"]:
        assert check["unexplained"] == check["padded"] == 0
        assert check["weights"] == check["weights_seen"] > 0
    chips = {device["name"] for device in result["details"]["devices"]}
    assert {"H100-SXM", "T4", "Groq-LPU-v1", "Cerebras-WSE-3"} <= chips
    assert all(name in printed for name in (*works, *chips, "ridge at"))
    assert "<svg" in picture.read_text() and "decode 3 × 20" not in picture.read_text()[:500]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--context 1", "--context must be from 2, got 1"),
        ("--batch 0", "--batch must be from 1, got 0"),
        ("--chunk 2,0", "--chunk must be from 1, got 0"),
        ("--runs 0", "--runs must be at least 1"),
        ("--threads 0", "--threads must be at least 1"),
        ("--model gpt-5", "--model must be one of"),
        ("--layers 9", "--layers must be 1 to 4"),
        ("--dtype int4", "--dtype must be one of float32, bfloat16, float16"),
        ("--context 99999", "--chunk and --context must leave 64"),
        ("--out no/such/r.json", "there is no folder no/such"),
        ("--out r.gif", "--out must end in .json, .png, .svg or .pdf"),
    ],
)
def test_what_cannot_run_is_refused_in_a_sentence(
    instant: None, capsys: Capture, options: str, named: str
) -> None:
    assert main([*SMALL, *options.split()]) == 2
    assert named in capsys.readouterr().err
