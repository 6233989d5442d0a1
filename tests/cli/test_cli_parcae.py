"""`minifer parcae` and its stability experiment, between the command line and the laboratory."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import minifer
from minifer.cli import main, parcae_stability
from minifer.parcae.lab.stability import report as stability_report
from minifer.parcae.lab.stability.forced import forced_radius
from minifer.parcae.lab.stability.report import Study
from minifer.parcae.lab.stability.sweep import PUBLISHED, Run, full_plan, quick_plan, train_run

ROOT = Path(minifer.__file__).parents[1]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def small() -> Study:
    """A study of both parts that takes a second."""
    run = Run(PUBLISHED[0], 0.01, seed=0, steps=1)
    return Study(forced_radius((0.5, 1.2), num_loops=64, width=8), [train_run(run)], "a command")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, small: Study) -> dict[str, Any]:
    """What the command asks the laboratory for; the answer is in "answer"."""
    seen: dict[str, Any] = {"answer": small}

    def study(runs: list[Run], **rest: Any) -> Study:
        seen.update(runs=runs, **rest)
        for run in runs:
            rest["done"](run)
        return seen["answer"]

    monkeypatch.setattr(stability_report, "study", study)
    return seen


def test_the_parent_lists_its_experiments_and_names_code_that_exists(capsys: Capture) -> None:
    assert main(["parcae", "--help"]) == 0
    out = capsys.readouterr().out
    assert "\n    stability" in out
    _, _, code = out.partition("in the code:\n")
    assert all((ROOT / line.split()[0]).exists() for line in code.splitlines() if line.strip())


def test_the_parent_alone_is_bad_usage(capsys: Capture) -> None:
    assert main(["parcae"]) == 2
    assert "EXPERIMENT" in capsys.readouterr().err


def test_the_help_shows_examples_and_names_code_that_exists(capsys: Capture) -> None:
    assert main(["parcae", "stability", "--help"]) == 0
    out = capsys.readouterr().out
    assert "  minifer parcae stability --quick" in out
    _, _, code = out.partition("in the code:\n")
    places = [line.split()[0] for line in code.splitlines() if line.strip()]
    assert places and all((ROOT / place).exists() for place in places)


def test_by_default_both_parts_run_in_full(asked: dict[str, Any]) -> None:
    assert main(["parcae", "stability"]) == 0
    assert asked["runs"] == full_plan() and asked["forced"] is True
    assert asked["command"] == "minifer parcae stability" and asked["jobs"] >= 1


def test_options_are_passed_on(asked: dict[str, Any]) -> None:
    words = "parcae stability --part sweep --quick --seeds 4,7 --steps 5 --jobs 3"
    assert main(words.split()) == 0
    assert asked["runs"] == quick_plan(seeds=[4, 7], steps=5)
    assert asked["forced"] is False and asked["jobs"] == 3
    # processes change no number
    assert asked["command"] == "minifer parcae stability --part sweep --seeds 4,7 --steps 5 --quick"


def test_a_state_above_its_bound_is_status_1(asked: dict[str, Any], small: Study) -> None:
    row = small.forced[0]
    broken = replace(row, check=replace(row.check, fits=1.5))
    asked["answer"] = replace(small, forced=[broken])
    assert main(["parcae", "stability"]) == 1


def test_the_forced_part_prints_a_line_a_radius(capsys: Capture) -> None:
    assert main(["parcae", "stability", "--part", "forced", "--quick"]) == 0
    out = capsys.readouterr().out
    firsts = [line.split()[0] for line in out.splitlines()[3:8]]
    assert firsts == ["0.447", "0.9", "1.0", "1.05", "1.2"]
    assert "- The bound holds in 5 of 5 rows" in out and "Trained" not in out


def test_a_short_sweep_runs_in_this_process(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("minifer.parcae.lab.stability.sweep.PUBLISHED", PUBLISHED[2:])
    words = "parcae stability --part sweep --quick --steps 1 --jobs 1"
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    assert "Trained for 1 steps: seed 0" in out and out.count("\n      add ") == 2
    assert "The bound holds in 2 of 2 rows" in out


def test_out_makes_a_folder_of_data_and_figures(
    asked: dict[str, Any], tmp_path: Path, capsys: Capture
) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new" / "results"
    assert main(["parcae", "stability", "--out", str(folder)]) == 0
    assert str(folder) in capsys.readouterr().err
    data = json.loads((folder / "parcae_stability.json").read_text())
    assert len(data["forced"]) == 2 and len(data["sweep"]) == 1
    assert "| diagonal | 0.01 |" in (folder / "parcae_stability.md").read_text()
    assert len(list(csv.reader((folder / "parcae_stability_curves.csv").open()))) == 2
    for name, label in (("forced", "ρ = 1.2"), ("training", "learning rate 0.01")):
        picture = (folder / f"parcae_stability_{name}.svg").read_text()
        assert picture.startswith("<?xml") and f"{label} -->" in picture


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--jobs 0", "--jobs must be at least 1, got 0"),
        ("--steps 0", "steps must be at least 1, got 0"),
        ("--seeds 1,1", "seeds must name at least one, each once, got [1, 1]"),
        ("--seeds one", "must be integers such as 0,1,2, got 'one'"),
        ("--seeds -1", "seeds must be 0 to 2147483647, got -1"),
        ("--part both", "invalid choice: 'both'"),
        ("--part forced --seeds 1", "--seeds is of the sweep: leave it out with --part forced"),
        ("--out FILE", "--out must be a folder, and FILE is a file"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(
    words: str, sentence: str, asked: dict[str, Any], tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "file"
    file.touch()
    given = words.replace("FILE", str(file)).split()
    assert main(["parcae", "stability", *given]) == 2
    assert sentence.replace("FILE", str(file)) in capsys.readouterr().err
    assert "runs" not in asked


def test_without_matplotlib_out_is_refused_before_the_work(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(parcae_stability, "find_spec", lambda name: None)
    assert main(["parcae", "stability", "--out", str(tmp_path)]) == 1
    assert "--out draws with matplotlib" in capsys.readouterr().err
    assert "runs" not in asked
