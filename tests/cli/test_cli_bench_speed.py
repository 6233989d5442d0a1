"""`minifer bench decode | prefill | throughput` between the command line and the engines."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minifer.cli import main
from minifer.perf import limit
from minifer.perf.limit import MIB

Capture = pytest.CaptureFixture[str]
TINY = ["--model", "minifer-tiny", "--device", "cpu", "--runs", "1", "--threads", "1"]


@pytest.fixture(autouse=True)
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small buffer and short turns: how fast the machine is does not matter here."""
    monkeypatch.setattr(limit, "_SMALLEST", MIB)
    monkeypatch.setattr(limit, "_LARGEST", MIB)
    monkeypatch.setitem(limit._MATRIX, "cpu", (64,))
    monkeypatch.setattr("minifer.perf.speed.ceilings.TURN_SECONDS", 1e-6)


def bench(*arguments: str, out: Path, status: int = 0) -> dict:
    assert main(["bench", arguments[0], *TINY, *arguments[1:], "--json", str(out)]) == status
    return json.loads(out.read_text())


def peer(tmp_path: Path, name: str, body: str) -> str:
    """An interpreter that has the engine `name`, or claims to: --peer-python's value."""
    file = tmp_path / f"{name}-python"
    probe = "job = json.load(sys.stdin)\nif job.get('probe'):\n    print('{\"versions\": {}}')\n"
    file.write_text(f"#!{sys.executable}\nimport json, sys, time\n{probe}    sys.exit()\n{body}")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return f"{name}={file}"


# Answers each request with a token a second, the first after one.
SLOW = """
cells = [
    {"name": c["name"], "started": 0.0, "tokens": None,
     "stamps": [[1.0 + i for i in range(r["max_tokens"])] for r in c["requests"]]}
    for c in job["cells"]
]
print(json.dumps({"engine": "vllm", "versions": {"vllm": "9"}, "dtype": job["dtype"],
                  "config": job["options"], "load_seconds": 2.0, "compile_seconds": 1.5,
                  "cells": cells}))
"""


def test_decode_tells_all_that_a_reader_needs(tmp_path: Path, capsys: Capture) -> None:
    out, picture = tmp_path / "r.json", tmp_path / "r.svg"
    options = [
        "--batch",
        "1,3",
        "--context",
        "20",
        "--tokens",
        "5",
        "--seed",
        "3",
        "--dtype",
        "bfloat16",
    ]
    result = bench("decode", *options, "--plot", str(picture), out=out)
    text = capsys.readouterr().out
    assert (result["schema_version"], result["name"], result["runs"]) == (1, "decode", 1)
    settings = result["settings"]
    assert (settings["model"], settings["dtype"], settings["seed"]) == (
        "minifer-tiny",
        "bfloat16",
        3,
    )
    assert settings["threads"] == 1 and settings["kv_bytes"] > 0
    rows = result["details"]["steps"]
    assert [row["work"] for row in rows] == ["decode 1 × 20", "decode 3 × 20"]
    limit = max(result["details"]["read_bandwidth"].values())
    for row in rows:
        assert 0 < row["preparation_share"] < 1
        assert row["mbu"] == pytest.approx(row["bytes_per_second"] / limit)
        arm = result["arms"]["minifer"]
        assert arm[f"{row['work']}: mbu"]["values"] == [pytest.approx(row["mbu"])]
    for part in ("machine", "versions", "commit", "kv_bytes", "rounds", "MBU", "of the step"):
        assert part in text
    assert "<svg" in picture.read_text()


def test_the_points_join_the_figure_of_limit(tmp_path: Path, capsys: Capture) -> None:
    points, picture = tmp_path / "p.json", tmp_path / "l.svg"
    bench("prefill", "--context", "24", out=points)
    command = ["bench", "limit", "--device", "cpu", "--model", "minifer-tiny", "--runs", "1"]
    command += ["--batch", "1", "--context", "20", "--chunk", "8", "--plot", str(picture)]
    assert main([*command, "--points", str(points)]) == 0
    assert "prefill 1 × 24" in picture.read_text()
    points.write_text('{"details": {"steps": []}}')
    for wrong in (points, tmp_path / "no.json"):
        assert main([*command, "--points", str(wrong)]) == 2
        assert "--points must be a file that" in capsys.readouterr().err


def test_prefill_computes_every_token_in_every_turn(tmp_path: Path) -> None:
    result = bench("prefill", "--context", "24,40", "--batch", "2", out=tmp_path / "r.json")
    assert result["settings"]["engine"]["enable_prefix_caching"] == "False"
    for row, length in zip(result["details"]["steps"], (24, 40), strict=True):
        assert row["kind"] == "prefill" and row["mfu"] > 0
        speed = 2 * length / row["first_token_seconds"]
        assert row["tokens_per_second"] == pytest.approx(speed)


def test_a_known_beginning_is_measured_against_none(tmp_path: Path, capsys: Capture) -> None:
    result = bench("prefill", "--shared-prefix", "64", out=tmp_path / "r.json")
    assert result["details"]["cached_tokens"] == {"with hit": 64, "without hit": 0}
    assert "times sooner" in capsys.readouterr().out


def test_throughput_counts_tokens_in_and_out(tmp_path: Path) -> None:
    options = ["--num-prompts", "5", "--input-len", "uniform:3:9", "--output-len", "4"]
    result = bench("throughput", *options, out=tmp_path / "r.json")
    (row,) = result["details"]["steps"]
    arm = result["arms"]["minifer"]
    requests = arm["throughput: requests_per_second"]["median"]
    assert row["tokens_per_second"] == pytest.approx(4 * requests)
    assert 3 * requests <= row["input_tokens_per_second"] <= 9 * requests


def test_others_answer_the_same_and_who_cannot_is_named(tmp_path: Path, capsys: Capture) -> None:
    options = ["--batch", "2", "--context", "9", "--tokens", "4", "--vs", "vllm,llamacpp"]
    options += ["--peer-python", peer(tmp_path, "vllm", SLOW)]
    options += ["--peer-options", 'vllm={"enforce_eager": true}']
    result = bench("decode", *options, out=tmp_path / "r.json")
    assert result["order"] == ["minifer", "vllm", "memory read", "matrix product"]
    assert result["settings"]["dtype"] == "bfloat16"
    theirs = result["arms"]["vllm"]["decode 2 × 9: tokens_per_second"]["median"]
    ours = result["arms"]["minifer"]["decode 2 × 9: tokens_per_second"]["median"]
    assert theirs == 2.0
    ratio = result["details"]["versus"]["vllm"]["decode 2 × 9"]
    assert ratio["median"] == pytest.approx(ours / theirs)
    assert result["details"]["engines"]["vllm"]["config"] == {"enforce_eager": True}
    compiling = result["arms"]["vllm"]["compile_seconds"]
    assert (compiling["values"], compiling["unit"]) == ([1.5], "s")
    assert "GGUF" in result["details"]["skipped"]["llamacpp"]
    printed = capsys.readouterr()
    assert "loaded in 2.0 s, 1.5 s of it compiling" in printed.out
    assert "vllm, decode 2 × 9" in printed.out and "llamacpp is left out" in printed.out
    assert "llamacpp is skipped" in printed.err


def test_transformers_is_not_asked_for_mixed_lengths(tmp_path: Path) -> None:
    options = ["--num-prompts", "3", "--input-len", "uniform:2:30", "--vs", "transformers"]
    result = bench("throughput", *options, out=tmp_path / "r.json")
    why = "its generate takes requests of one length"
    assert result["details"]["skipped"] == {"transformers": why}


def test_another_of_our_back_ends_takes_turns_with_the_one_asked_for(
    tmp_path: Path, capsys: Capture
) -> None:
    options = ["--context", "9", "--tokens", "4", "--dtype", "float32", "--block-size", "8"]
    options += ["--vs", "minifer:torch,minifer:triton", "--quantize", "int8", "--no-quality"]
    options += ["--peer-options", 'minifer:torch={"quantize": "none"}']
    result = bench("decode", *options, out=tmp_path / "r.json")
    assert result["order"][:2] == ["minifer", "minifer:torch"]
    other = result["details"]["engines"]["minifer:torch"]["config"]
    assert (other["backend"], other["quantize"], other["block_size"]) == ("torch", "none", "8")
    assert result["details"]["engines"]["minifer"]["config"]["quantize"] == "int8"
    assert result["details"]["versus"]["minifer:torch"]["decode 1 × 9"]["median"] > 0
    why = result["details"]["skipped"]["minifer:triton"]
    assert "quantize must be none with backend=triton" in why
    assert "minifer:triton is skipped: quantize must" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("prefill --context 9", "it compiles decode steps alone: bench decode"),
        ("throughput --num-prompts 2 --output-len 3", "it compiles decode steps alone"),
        ("decode --tokens 3 --quantize int4 --no-quality", "no weights of --quantize int4"),
    ],
)
def test_torch_compile_is_not_asked_for_what_it_has_not(
    tmp_path: Path, command: str, why: str
) -> None:
    result = bench(*command.split(), "--vs", "torch-compile", out=tmp_path / "r.json")
    assert why in result["details"]["skipped"]["torch-compile"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("sys.exit('no memory')", "no memory"),
        ("print('hm')", "must answer with a JSON object"),
        ("time.sleep(999)", "took longer than 300 s"),
        (SLOW.replace("1.0 + i for", "1.0 + i for _ in 'ab' for"), "must answer"),
    ],
)
def test_one_that_breaks_down_is_the_status_and_the_rest_is_told(
    tmp_path: Path, body: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    from minifer.perf.speed import worker

    real = worker.ask

    def ask(command, job, *, timeout, environment):
        patient = command[-1] == "minifer" or "sleep" not in body or job.get("probe")
        try:
            return real(command, job, timeout=timeout if patient else 0.5, environment=environment)
        except worker.WorkerError as error:
            raise type(error)(str(error).replace("0.5 s", "300 s")) from None

    monkeypatch.setattr(worker, "ask", ask)
    options = ["--context", "9", "--tokens", "4", "--vs", "vllm"]
    options += ["--peer-python", peer(tmp_path, "vllm", body), "--timeout", "300"]
    result = bench("decode", *options, out=tmp_path / "r.json", status=1)
    assert why in result["details"]["skipped"]["vllm"]
    assert list(result["arms"]) == ["minifer", "memory read", "matrix product"]
    assert f"vllm is left out: {result['details']['skipped']['vllm']}" in capsys.readouterr().out


def test_drafts_are_compared_with_none(tmp_path: Path, capsys: Capture) -> None:
    options = ["--speculative-method", "ngram", "--context", "40", "--tokens", "12"]
    result = bench("decode", *options, out=tmp_path / "r.json")
    assert result["settings"]["prompts"] == "prose.txt"
    assert list(result["details"]["versus"]) == ["minifer without speculation"]
    same = result["details"]["engines"]["minifer without speculation"]["same_tokens"]
    assert same == {"decode 1 × 40": 1.0}
    assert 0 <= result["details"]["steps"][0]["acceptance"] <= 1
    assert "of drafts right" in capsys.readouterr().out


def test_what_smaller_weights_cost_stands_beside_their_speed(tmp_path: Path, capsys) -> None:
    options = ["--quantize", "int8", "--context", "9", "--tokens", "3"]
    bench("decode", *options, out=tmp_path / "r.json")
    assert "perplexity" in capsys.readouterr().out
    bench("decode", *options, "--no-quality", out=tmp_path / "r.json")
    assert "perplexity" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("decode --batch 0", "--batch must be at least 1, got 0"),
        ("decode --tokens 1", "--tokens must be at least 2, got 1"),
        ("decode --batch one", "must be numbers such as 1,4,16, got 'one'"),
        ("decode --context 99999", "--context and --tokens must fit"),
        ("decode --vs ollama", "vllm, torch-compile, minifer:torch"),
        ("decode --vs ollama", "got 'ollama'"),
        ("decode --vs minifer:jax", "got 'minifer:jax'"),
        ("decode --peer-options minifer:torch={}", "minifer:torch=… needs --vs minifer:torch"),
        ("decode --peer-python vllm=x", "--peer-python vllm=… needs --vs vllm"),
        ("decode --vs vllm --peer-python vllm", "must be NAME=FILE"),
        ("decode --vs vllm --peer-options vllm=3", "must be NAME=JSON"),
        ("decode --vs vllm --timeout 0", "--timeout must be above 0"),
        ("decode --runs 0", "--runs must be at least 1, got 0"),
        ("decode --threads 0", "--threads must be at least 1, got 0"),
        ("decode --json no/such/r.json", "--json: there is no folder no/such"),
        ("decode --plot r.gif", "--plot must end in .png, .svg or .pdf"),
        ("decode --prompt-file no/such", "--prompt-file no/such cannot be read: No such file"),
        ("decode --dtype int4", "--dtype"),
        ("decode --model no-such-model", "no-such-model"),
        ("prefill --shared-prefix 0", "--shared-prefix must be at least 1, got 0"),
        ("prefill --shared-prefix 9 --vs vllm", "--vs has no place beside --shared-prefix"),
        ("prefill --shared-prefix 99999", "--shared-prefix must be at most"),
        ("prefill --shared-prefix 9 --no-enable-prefix-caching", "needs the prefix cache"),
        ("throughput --input-len many", "a length must be N"),
        ("throughput --num-prompts 0", "num_prompts must be at least 1, got 0"),
    ],
)
def test_what_cannot_run_is_refused_in_a_sentence(
    options: str, named: str, capsys: Capture
) -> None:
    name, *rest = options.split()
    assert main(["bench", name, *TINY, *rest]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_benchmark_that_is_told_to_end_takes_the_engines_it_asked_with_it(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    file = tmp_path / "python"
    file.write_text(f"#!/bin/sh\necho $$ > {asked}.new\nmv {asked}.new {asked}\nexec sleep 600\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    command = [sys.executable, "-m", "minifer", "bench", "decode", *TINY, "--vs", "vllm"]
    command += ["--peer-python", f"vllm={file}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as running:
        try:
            while not asked.exists() and running.poll() is None:
                time.sleep(0.02)
            peer_id = int(asked.read_text())
            running.send_signal(signal.SIGTERM)
            said, _ = running.communicate(timeout=300)
        finally:
            running.kill()
    assert running.returncode == 128 + signal.SIGTERM
    assert b"Traceback" not in said
    with pytest.raises(ProcessLookupError):
        os.kill(peer_id, 0)
