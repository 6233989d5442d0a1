"""`minifer bench scaling` between the command line, the measurements and its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minifer.cli import main

Capture = pytest.CaptureFixture[str]
SMALL = ["bench", "scaling", "--model", "minifer-tiny", "--runs", "1", "--steps", "1"]
SIZES = ["--batch", "1,2,4", "--context", "16,32,64", "--waiting", "1,2,3"]


def test_every_sweep_arrives_in_the_table_and_in_the_files(tmp_path: Path, capsys: Capture) -> None:
    out, picture = tmp_path / "r.json", tmp_path / "r.svg"
    assert main([*SMALL, *SIZES, "--json", str(out), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    result = json.loads(out.read_text())
    assert (result["schema_version"], result["name"], result["runs"]) == (1, "scaling", 1)
    fits = result["details"]["fits"]
    queues = [f"waiting, {p}, for {w}" for p in ("fcfs", "priority", "lpm") for w in WAITS]
    assert list(fits) == ["batch", "context", *queues, "step, batch", "step, context"]
    for name, metrics in fits.items():
        for metric, fit in metrics.items():
            measured = [result["arms"][f"{name}={size}"][metric]["min"] for size in fit["sizes"]]
            assert measured == fit["costs"]
    assert printed.count("exponent") == len(fits)
    assert "preparation" in printed
    assert "of the step" in printed
    assert picture.read_text().count("preparation (") == 8


WAITS = ("a seat", "memory")


def test_the_models_own_steps_can_be_left_out(capsys: Capture) -> None:
    assert main([*SMALL, *SIZES, "--prepare-only"]) == 0
    printed = capsys.readouterr().out
    assert "whole step" not in printed
    assert "of the step" not in printed


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--batch", "1,2"], "--batch must name at least 3 sizes"),
        (["--batch", "0,1,2"], "--batch must be from 1"),
        (["--context", "1,2,3"], "--context must be from 2"),
        (["--waiting", "a"], "--waiting: must be numbers"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--max-num-seqs", "3"], "--max-num-seqs is what a sweep sets by itself"),
        (["--plot", "x.txt"], "--plot must end in"),
        (["--context", "16,32,100000"], "context must be at most"),
    ],
)
def test_bad_options_are_one_sentence(options: list[str], why: str, capsys: Capture) -> None:
    assert main([*SMALL, *SIZES, *options]) == 2
    assert why in capsys.readouterr().err
