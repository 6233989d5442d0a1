"""`minifer claims`: the list, one claim, its files, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minifer.claims import registry
from minifer.claims.figures import draw
from minifer.cli import main

Capture = pytest.CaptureFixture[str]


def test_lists_every_claim_and_who_made_it(capsys: Capture) -> None:
    assert main(["claims", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[::2]] == registry.names()
    assert all(line.strip().startswith("https://") for line in lines[1::2])
    assert main(["claims", "list", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == registry.names()


def test_a_claim_says_who_what_and_what_breaks_it(capsys: Capture) -> None:
    assert main(["claims", "rare-bugs"]) == 0
    out = capsys.readouterr().out
    labels = ["said by", "basis", "we find", "breaks when", "one may say", "in the code:"]
    places = [out.index(label) for label in labels]
    assert places == sorted(places)
    assert "https://www.youtube.com/watch?v=9EEm4iMAF5s" in out
    assert "299,572" in out
    assert max(map(len, out.splitlines())) <= 100


def test_json_holds_every_number(capsys: Capture) -> None:
    assert main(["claims", "rare-bugs", "--json", "--seed", "7"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["seed"] == 7 and first["values"]["trials_for_95_percent"] == 299_572
    assert first["figure"][0]["x_label"] and first["tables"][0]["rows"]
    main(["claims", "rare-bugs", "--json", "--seed", "7"])
    assert json.loads(capsys.readouterr().out) == first
    main(["claims", "rare-bugs", "--json", "--seed", "8"])
    other = json.loads(capsys.readouterr().out)
    assert other["values"]["drawn_chance"] != first["values"]["drawn_chance"]


@pytest.mark.parametrize("name", ["speed-of-light", "reload", "energy", "launch-overhead"])
def test_a_figure_has_a_title_units_and_a_name_for_every_line(name: str, tmp_path: Path) -> None:
    claim = registry.get(name)
    from minifer.claims.claim import Settings

    findings = claim.reproduce(Settings())
    figure = draw(claim, findings)
    title = " ".join(figure.get_suptitle().split())
    assert title == f"{name}: {claim.statement} {findings.basis}"
    drawn = [axes for part in figure.subfigs for axes in part.axes]
    for axes, panel in zip(drawn, findings.panels, strict=True):
        assert axes.get_xlabel() == panel.x_label
        assert axes.get_title(loc="left") == panel.title
        assert axes.get_ylabel() or axes.get_yticklabels()


def test_figures_are_written_where_they_were_asked_for(tmp_path: Path, capsys: Capture) -> None:
    picture = tmp_path / "one.svg"
    assert main(["claims", "rare-bugs", "--plot", str(picture)]) == 0
    assert "each prompt 1,000 times" in picture.read_text()
    assert main(["claims", "rare-bugs", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "rare-bugs.png").stat().st_size > 10_000
    assert len(list(tmp_path.iterdir())) == 2


def test_all_ends_with_a_line_a_claim(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    few = ["rare-bugs", "reload"]
    monkeypatch.setattr(registry, "names", lambda: few)
    assert main(["claims", "all"]) == 0
    out = capsys.readouterr().out
    assert out.count("we find") == 2
    summary = out.rpartition("─")[2].strip().splitlines()
    assert summary[0].startswith("rare-bugs") and any(s.startswith("reload") for s in summary)
    assert main(["claims", "all", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == few


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["nothing"], "claim must be one of rare-bugs,"),
        (["rare-bugs", "--plot", "x.txt"], "--plot must end in .png, .svg or .pdf, got x.txt"),
        (["rare-bugs", "--out", "nowhere"], "--out: there is no folder nowhere, make it first"),
        (["all", "--plot", "x.png"], "--plot draws one claim, use --out FOLDER with all"),
        (["rare-bugs", "--trace", "x"], "--trace: rare-bugs replays no requests"),
        (["all", "--trace", "x"], "--trace belongs to one claim, not to all"),
        (["lru", "--trace", "x"], "--trace: there is no file x"),
        (["rare-bugs", "--seed", "-1"], "seed must be at least 0, got -1"),
        (["rare-bugs", "--processes", "0"], "processes must be at least 1, got 0"),
        ([], "the following arguments are required: NAME"),
    ],
)
def test_what_makes_no_sense_is_refused(options: list[str], why: str, capsys: Capture) -> None:
    assert main(["claims", *options]) == 2
    captured = capsys.readouterr()
    assert why in captured.err and not captured.out
