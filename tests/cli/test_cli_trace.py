"""`minifer trace`: files that other programs open, and a table that a reader does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_model import ABC

from minifer.cli import main

Capture = pytest.CaptureFixture[str]


def trace(folder: Path, *arguments: str) -> int:
    model = ("--model", str(folder), "--raw", "--max-tokens", "3", *ABC)
    return main(["trace", *arguments, *model])


def test_writes_a_chrome_trace_and_the_events(
    model_folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    out, lines = tmp_path / "trace.json", tmp_path / "events.jsonl"
    assert trace(model_folder, "one", "two", "--out", str(out), "--jsonl", str(lines)) == 0
    events = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [e["request_id"] for e in events if e["name"] == "request.admitted"] == [
        "request-0",
        "request-1",
    ]
    assert sum(e["name"] == "token.sampled" for e in events) == 6
    timeline = json.loads(out.read_text())["traceEvents"]
    named = [e["args"]["name"] for e in timeline if e["name"] == "thread_name"]
    assert named == ["steps", "request-0", "request-1"]
    assert {"step 1", "step 2", "step 3"} <= {e["name"] for e in timeline if e["ph"] == "X"}
    printed, noted = capsys.readouterr()
    assert [line.partition(":")[0] for line in printed.splitlines()] == [
        "request-0 (length)",
        "request-1 (length)",
    ]
    assert noted == (f"minifer: note: {out} holds {len(events)} events: ui.perfetto.dev opens it\n")


def test_prints_the_life_of_one_request(model_folder: Path, capsys: Capture) -> None:
    assert trace(model_folder, "one", "two", "--request", "1") == 0
    _, _, _, header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["step", "ms", "stage", "event", "tokens", "data"]
    names = [row.split()[3] for row in rows]
    assert names[0] == "request.admitted"
    assert names.count("token.sampled") == 3 and names.count("request.finished") == 1


def test_prints_the_life_of_one_token(model_folder: Path, capsys: Capture) -> None:
    """Position 4 of "one" + 3 tokens: drawn in step 2, its KV computed in step 3."""
    assert trace(model_folder, "one", "--request", "0", "--token", "4") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    steps = {name: int(step) for step, _, _, name, *_ in rows}
    assert steps["token.sampled"] == 2 and steps["request.scheduled"] == 3


def test_writes_a_page_that_steps_through_one_token(
    model_folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "token.html"
    assert trace(model_folder, "one", "--request", "0", "--microscope", str(out)) == 0
    page = out.read_text(encoding="utf-8")
    assert "The life of a token: request-0, position 3" in page  # the first it drew
    assert "steps through one token of request-0: open" in capsys.readouterr().err
    again = "--request", "0", "--token", "1", "--microscope", str(out)
    assert trace(model_folder, "one", *again) == 0
    assert "position 1</h1>" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("", "nothing to show: add --out FILE, --jsonl FILE or --request N"),
        ("--request 1", "--request must be in [0, 1) for 1 prompts, got 1"),
        ("--request -1", "--request must be in [0, 1) for 1 prompts, got -1"),
        ("--token 1 --out x", "--token needs --request N, the request it belongs to"),
        (
            "--microscope x --out x",
            "--microscope needs --request N, the request whose token it shows",
        ),
        ("--out /no/where/x", "--out: there is no folder /no/where, make it first"),
    ],
)
def test_what_cannot_be_shown_is_refused_before_anything_runs(
    arguments: str, sentence: str, capsys: Capture
) -> None:
    assert main(["trace", "one", "--model", "/nowhere", *arguments.split()]) == 2
    assert capsys.readouterr().err == f"minifer: error: {sentence}\n"
