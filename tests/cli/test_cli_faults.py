"""`minifer faults`: the list, one fault live, the matrix and its exit status."""

from __future__ import annotations

import json

import pytest

from minifer.cli import main
from minifer.faults import matrix, registry

Capture = pytest.CaptureFixture[str]


def test_lists_every_fault_in_a_line(capsys: Capture) -> None:
    assert main(["faults"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == registry.names()
    assert lines[0].split(maxsplit=1)[1] == "One NaN in the cache"


def test_shows_a_fault_live(capsys: Capture) -> None:
    assert main(["faults", "--show", "tool-result-dropped"]) == 0
    out = capsys.readouterr().out
    places = [
        "The model never sees the tool's result",
        "mechanism: ",
        "symptom: ",
        "def tool_result_dropped(engine: Engine)",
        "without the fault:",
        "It is 18 degrees in Paris.",
        "with the fault:",
        "tool-loop",
        "https://github.com/earendil-works/pi/issues/9637",
    ]
    found = [out.index(place) for place in places]
    assert found == sorted(found)
    assert out.count("It is 18 degrees in Paris.") == 1


def test_prints_the_matrix_and_its_json(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(registry, "names", lambda: ["eos-ignored"])
    assert main(["faults", "--matrix", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert list(data["caught"]) == ["eos-ignored"] and data["missed"] == []
    assert list(data["caught"]["eos-ignored"]) == ["end-token"] and not data["false_alarms"]


def test_a_fault_that_nobody_notices_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    blind = matrix.Matrix({"canary": "…"}, {"nan-row": {}}, {})
    monkeypatch.setattr(matrix, "run_matrix", lambda *args, **options: blind)
    assert main(["faults", "--matrix"]) == 1
    *_, row, _, legend = capsys.readouterr().out.splitlines()
    assert row.split() == ["nan-row", "·"]
    assert legend.startswith("● caught, · silent, ✕ of no use")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--json"], "--json needs --matrix"),
        (["--show", "x"], "fault must be one of nan-row,"),
        (["--show", "x", "--matrix"], "not allowed with"),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: list[str], sentence: str, capsys: Capture
) -> None:
    assert main(["faults", *arguments]) == 2
    assert sentence in capsys.readouterr().err
