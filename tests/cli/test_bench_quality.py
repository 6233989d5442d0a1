"""`minifer bench quality` between the command line, the comparison and its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minifer.cli import main

Capture = pytest.CaptureFixture[str]


def test_every_way_is_a_line_and_a_row_of_the_file(
    text_model: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "q.json"
    options = ["--tokens", "80", "--quantize", "none,int8,file", "--json", str(out)]
    assert main(["bench", "quality", "--model", str(text_model), *options]) == 0
    printed = capsys.readouterr()
    assert "file is left out: quantize=file needs the codes" in printed.err
    assert [line.split()[0] for line in printed.out.splitlines()[3:5]] == ["bfloat16", "int8"]
    result = json.loads(out.read_text())
    assert (result["name"], result["order"]) == ("quality", ["bfloat16", "int8"])
    assert result["settings"]["tokens"] == 79
    assert 0 < result["arms"]["bfloat16"]["kl"]["median"] < result["arms"]["int8"]["kl"]["median"]
    kinds = {entry["kind"] for entry in result["details"]["weights"]["int8"]}
    assert kinds == {"embed_tokens", "qkv_proj", "o_proj", "gate_up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--quantize", "int2"], "--quantize must be of none, file, int8, int4, got 'int2'"),
        (["--tokens", "1"], "--tokens must be at least 2, got 1"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--json", "nowhere/q.json"], "there is no folder nowhere"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_loads(
    options: list[str], said: str, capsys: Capture
) -> None:
    assert main(["bench", "quality", "--model", "no such model", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_model_that_cannot_be_held_in_any_way_is_an_error(
    text_model: Path, capsys: Capture
) -> None:
    assert main(["bench", "quality", "--model", str(text_model), "--quantize", "file"]) == 2
    assert "named no way" in capsys.readouterr().err
