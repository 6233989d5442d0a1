"""`minifer bench startup` between the command line and its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minifer.cli import main

Capture = pytest.CaptureFixture[str]
SMALL = ["bench", "startup", "--model", "minifer-tiny", "--runs", "1"]


def test_a_start_arrives_in_the_table_and_in_the_file(tmp_path: Path, capsys: Capture) -> None:
    out, plot = tmp_path / "r.json", tmp_path / "r.svg"
    given = ["--prompt", "The for", "--num-kv-blocks", "8", "--json", str(out), "--plot", str(plot)]
    assert main([*SMALL, *given]) == 0
    result = json.loads(out.read_text())
    assert (result["schema_version"], result["name"], result["runs"]) == (1, "startup", 1)
    assert result["order"] == ["torch", "torch, command"]
    assert result["settings"]["prompt"] == "The for"
    assert result["settings"]["dtype"] == "float32"
    assert result["settings"]["engine"] == {"num_kv_blocks": "8"}
    assert result["arms"]["torch"]["seconds"]["unit"] == "s"
    printed = capsys.readouterr().out
    assert "to the first text" in printed
    # 4 layers, keys and values, 16 tokens a block, 6 heads of 16, float32
    assert f"{8 * (4 * 2 * 16 * 6 * 16 * 4) / 1e6:.0f} MB asked for as KV pool" in printed
    assert "; commit " in printed and "dtype float32" in printed
    drawn = plot.read_text(encoding="utf-8")
    assert drawn.startswith("<?xml") and len(drawn) > 10_000


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--backends", "torch,x"], "must be some of torch"),
        (["--backend", "torch"], "--backend is --backends here"),
        (["--runs", "0"], "--runs must be at least 1"),
        (["--block-size", "0"], "block_size"),
        (["--json", "nowhere/x.json"], "there is no folder nowhere"),
        (["--plot", "x.gif"], "--plot must end in .png, .svg or .pdf"),
    ],
)
def test_bad_options_are_one_sentence(options: list[str], why: str, capsys: Capture) -> None:
    assert main([*SMALL, *options]) == 2
    assert why in capsys.readouterr().err
