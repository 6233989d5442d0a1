"""A part measured anew beside older ones: what the report then holds and says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minifer import cli
from minifer.parcae.lab.laws import study as laws
from minifer.parcae.lab.laws.depth_task import DEPTHS, TaskJob, TaskResult
from minifer.parcae.lab.laws.merge import merge
from minifer.parcae.lab.laws.plots import task_figure
from minifer.parcae.lab.laws.report import markdown

HEAD: dict[str, Any] = {
    "versions": {"minifer": "0"},
    "machine": {"cpu": "a CPU", "cores": 2, "processes": 1},
    "seeds": [0, 1],
    "quick": False,
    "trainings": 2,
    "seconds": 3.0,
    "cpu_seconds": 2.0,
}


def task_part(share: float) -> dict[str, Any]:
    """Two hops: one right from the start, one rising to `share` at T = 3."""
    accuracy = tuple((1.0, share if depth >= 3 else 0.2) for depth in DEPTHS)
    return laws.task([TaskResult(TaskJob(seed), accuracy, 1.0) for seed in (0, 1)])


def call(started: str, **parts: Any) -> dict[str, Any]:
    return HEAD | {"started": started, "command": f"call of {started}"} | parts


def test_a_new_part_replaces_its_own_and_says_when_it_was_measured() -> None:
    older = {"losses": [1.0]}
    merged = merge(
        call("monday", test_time=older, depth_task=task_part(0.6)),
        call("tuesday", depth_task=task_part(0.99), trainings=2),
    )
    assert merged["started"] == "monday" and merged["test_time"] == older
    assert merged["depth_task"]["mean"][-1] == pytest.approx([1.0, 0.99])
    assert merged["depth_task"]["measured"]["started"] == "tuesday"
    again = merge(merged, call("friday", isoflop={"points": []}))
    assert again["depth_task"]["measured"]["started"] == "tuesday"
    assert again["isoflop"]["measured"]["started"] == "friday"
    del merged["test_time"]
    text = markdown(merged, merged["command"])
    assert "By `call of monday` on monday" in text
    assert (
        "measured anew, in the place of the one of the call above: by `call of tuesday` on" in text
    )
    assert "anew" not in markdown(call("monday", depth_task=task_part(0.6)), "x")


def test_both_thresholds_and_the_recipe_are_said() -> None:
    part = task_part(0.6)
    assert part["solved_from"] == (1, 3) and part["nearly_all_from"] == (1, None)
    assert part["recipe"]["width"] == 64 and part["recipe"]["start_symbol"]
    text = markdown(call("monday", depth_task=part), "x")
    assert "at least 50% right on average" in text and "The threshold is a choice" in text
    assert "are solved: 0: T = 1; 1: T = 3." in text
    assert "With 95% as the threshold: 0: T = 1; 1: never." in text


def test_what_cannot_be_merged_is_refused() -> None:
    good = call("monday")
    nameless = {key: value for key, value in good.items() if key != "command"}
    with pytest.raises(ValueError, match="old must say the command that made it"):
        merge(nameless, good)
    with pytest.raises(ValueError, match="new must not be a quick run"):
        merge(good, good | {"quick": True})


def test_the_command_keeps_what_it_does_not_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["parcae", "laws", "--part", "depth-task", "--out", str(tmp_path), "--merge"]
    assert cli.main(command) != 0  # nothing to merge with
    new = call("tuesday", depth_task=task_part(0.99))
    monkeypatch.setattr(laws, "study", lambda parts, **options: new)
    file = tmp_path / "parcae_laws.json"
    file.write_text(json.dumps(call("monday", kept=[1], depth_task=task_part(0.6))))
    assert cli.main(command) == 0
    data = json.loads(file.read_text())
    assert data["started"] == "monday" and data["kept"] == [1]
    assert data["depth_task"]["nearly_all_from"] == [1, 3]
    assert data["depth_task"]["measured"]["command"] == "minifer parcae laws --part depth-task"
    assert "on tuesday" in (tmp_path / "parcae_laws.md").read_text()
    assert cli.main([*command, "--quick"]) != 0


def test_each_line_of_the_figure_is_named_on_the_line() -> None:
    axes = task_figure(task_part(0.6)).axes[0]
    places = {text.get_text(): text.xy for text in axes.texts}
    assert set(places) == {"0 hops", "1", "guessing"}  # 0 hops are right from the start
    assert 2 < places["1"][0] < 3 and places["1"][1] == pytest.approx(0.4)
