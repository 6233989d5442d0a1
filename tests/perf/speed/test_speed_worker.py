"""The protocol between a benchmark and an engine in another process: whatever comes back."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from minifer.perf.speed import worker
from minifer.perf.speed.worker import MissingError, WorkerError, ask, cells_of, command_for

JOB = {
    "threads": 1,
    "warmup_tokens": 2,
    "cells": [{"name": "c", "requests": [{"prompt": [3, 1, 4], "max_tokens": 2}]}],
}


def script(tmp_path: Path, body: str) -> list[str]:
    file = tmp_path / "fake.py"
    file.write_text("import json, os, sys, time\njob = json.load(sys.stdin)\n" + body)
    return [sys.executable, str(file)]


def test_a_job_goes_in_and_its_answer_comes_out(tmp_path: Path) -> None:
    body = "print('chatter'); print(json.dumps({'threads': job['threads'], 'e': os.environ['E']}))"
    environment = {"E": "é", "PATH": "", "PYTHONIOENCODING": "utf-8"}
    answer = ask(script(tmp_path, body), JOB, timeout=60, environment=environment)
    assert answer == {"threads": 1, "e": "é"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sys.exit('no more memory')", "ended with status 1: no more memory"),
        ("os._exit(7)", "ended with status 7: it said nothing"),
        ("os.kill(os.getpid(), 9)", "ended with status -9"),
        ("print('Segfault?')", "must answer with a JSON object, got b'Segfault"),
        ("print('[1]')", "must answer with a JSON object"),
        ("pass", "must answer with a JSON object, got b''"),
        ("sys.stdout.buffer.write(bytes([255, 254]))", "must answer with a JSON object"),
    ],
)
def test_a_process_that_gives_no_answer_is_named_with_its_reason(
    tmp_path: Path, body: str, message: str
) -> None:
    with pytest.raises(WorkerError, match=r"fake\.py") as raised:
        ask(script(tmp_path, body), JOB, timeout=60)
    assert message in str(raised.value)


def test_a_process_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"took longer than 0.5 s \(--timeout\)"):
        ask(script(tmp_path, "time.sleep(600)"), JOB, timeout=0.5)


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    python = tmp_path / "no" / "python"
    with pytest.raises(WorkerError, match="cannot be run: No such file"):
        ask(command_for("vllm", python), JOB, timeout=5)


def test_an_engine_that_is_not_installed_says_so(tmp_path: Path) -> None:
    body = "print(json.dumps({'missing': 'No module named vllm'}))"
    with pytest.raises(MissingError, match=r"not installed \(No module named vllm\)"):
        ask(script(tmp_path, body), JOB, timeout=60)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "answer is not complete"),
        ({"cells": [{"name": "other"}]}, "answer is not complete"),
        ({"cells": [{"name": "c", "started": 0.0, "stamps": [5]}]}, "answer is not complete"),
        ({"cells": [{"name": "c", "started": "now", "stamps": [[1, 2]]}]}, "not complete"),
        ({"cells": [{"name": "c", "started": 0.0, "stamps": [[1.0]]}]}, "with 2 tokens, got 1"),
        ({"cells": [{"name": "c", "started": 0.0, "stamps": []}]}, "with 2 tokens, got 0"),
    ],
)
def test_an_answer_must_hold_every_token_of_every_request(answer, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        cells_of({"engine": "x", **answer}, JOB)


def test_a_whole_answer_is_taken() -> None:
    cell = {"name": "c", "started": 0.5, "stamps": [[1.0, 2.0]], "tokens": None, "extra": {}}
    assert cells_of({"cells": [cell]}, JOB) == {"c": cell}


def test_others_do_not_get_what_our_command_line_sets_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    ours = worker.environment_for("minifer", 2)
    theirs = worker.environment_for("vllm", 2)
    assert ours["OMP_NUM_THREADS"] == theirs["OMP_NUM_THREADS"] == "2"
    assert ours["GOMP_SPINCOUNT"] == "1000" and ours["TRITON_INTERPRET"] == "1"
    assert not {"GOMP_SPINCOUNT", "TRITON_INTERPRET"} & set(theirs)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")  # a user's own
    assert worker.environment_for("vllm", 2)["GOMP_SPINCOUNT"] == "7"


@pytest.mark.parametrize("engine", [e for e in worker.ENGINES if e != "minifer"])
def test_the_scripts_need_nothing_but_python(engine: str) -> None:
    """An interpreter without any package answers a probe, and says what it misses."""
    command = [sys.executable, "-I", "-S", *command_for(engine)[1:]]
    done = subprocess.run(command, input=b'{"probe": true}', capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "No module named" in json.loads(done.stdout)["missing"]


class Counting:
    """A peer whose tokens arrive one a second on its own clock."""

    dtype, config = "float99", {"k": "v"}

    def __init__(self) -> None:
        self.asked: list[list[dict]] = []

    def run(self, requests):
        self.asked.append(requests)
        stamps = [[float(i) for i in range(r["max_tokens"])] for r in requests]
        return 0.0, stamps, [[7] * len(own) for own in stamps], {"n": len(self.asked)}


def test_each_cell_is_run_for_its_warmth_and_then_for_the_record() -> None:
    spec = importlib.util.spec_from_file_location("peers_main", worker.FOLDER / "__main__.py")
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    peer = Counting()
    cell = {"name": "c", "requests": [{"prompt": [3, 1, 4], "max_tokens": 9}]}
    out = program.measure(peer, cell, 2)
    assert peer.asked == [[{"prompt": [4, 1, 3], "max_tokens": 2}], cell["requests"]]
    assert (out["name"], out["extra"], out["started"]) == ("c", {"n": 2}, 0.0)
    assert out["stamps"] == [[float(i) for i in range(9)]] and out["tokens"] == [[7] * 9]
