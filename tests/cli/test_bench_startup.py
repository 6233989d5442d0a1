"""`minifer bench startup` between the command line and its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minifer.cli import main

Capture = pytest.CaptureFixture[str]
SMALL = ["bench", "startup", "--model", "minifer-tiny", "--runs", "1"]


def test_a_start_arrives_in_the_table_and_in_the_file(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "r.json"
    assert main([*SMALL, "--prompt", "The for", "--num-kv-blocks", "8", "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert (result["schema_version"], result["name"], result["runs"]) == (1, "startup", 1)
    assert result["order"] == ["torch", "torch, command"]
    assert result["settings"]["prompt"] == "The for"
    assert result["arms"]["torch"]["seconds"]["unit"] == "s"
    assert "to the first text" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--backends", "torch,x"], "must be some of torch"),
        (["--backend", "torch"], "--backend is --backends here"),
        (["--runs", "0"], "--runs must be at least 1"),
        (["--block-size", "0"], "block_size"),
        (["--json", "nowhere/x.json"], "there is no folder nowhere"),
    ],
)
def test_bad_options_are_one_sentence(options: list[str], why: str, capsys: Capture) -> None:
    assert main([*SMALL, *options]) == 2
    assert why in capsys.readouterr().err
