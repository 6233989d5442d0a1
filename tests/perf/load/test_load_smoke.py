"""The load generator against the real server, on minifer-tiny. What is asserted are counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minifer.cli import main
from minifer.perf.load.spawn import spawned_server


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with spawned_server(["--model", "minifer-tiny", "--num-kv-blocks", "200"]) as url:
        yield url


@pytest.fixture
def bench(server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def bench(options: str) -> tuple[dict[str, Any], str]:
        out = tmp_path / "out.json"
        command = ["bench", "serve", "--base-url", server, "--out", str(out), *options.split()]
        assert main(command) == 0
        return json.loads(out.read_text()), capsys.readouterr().out

    return bench


def test_a_closed_loop_of_token_ids(bench, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    data, table = bench(
        f"--num-prompts 12 --max-concurrency 4 --input-len uniform:20:40 --output-len 8 "
        f"--slo ttft=60 --plot {plot}"
    )
    values = {name: metric["median"] for name, metric in data["arms"]["serve"].items()}
    assert (values["completed"], values["failed"]) == (12, 0)
    assert values["output_tokens"] == 96  # ignore_eos
    requests = data["details"]["runs"][0]["requests"]
    assert sum(request["prompt_tokens"] for request in requests) == values["prompt_tokens"]
    assert all(20 <= request["prompt_tokens"] <= 40 for request in requests)
    assert {request["finish_reason"] for request in requests} == {"length"}
    assert values["max_in_flight"] <= 4 and values["slo_attainment"] == 1
    assert "12 completed, 0 failed" in table and plot.stat().st_size > 10_000


def test_shared_prefixes_are_found_in_the_cache(bench) -> None:
    data, table = bench(
        "--num-prompts 8 --max-concurrency 1 --warmup 0 --prefix-groups 2 --prefix-len 64 "
        "--input-len 8 --output-len 2 --seed 7"
    )
    cached = [r["cached_tokens"] for r in data["details"]["runs"][0]["requests"]]
    assert sorted(cached) == [0, 0, *[64] * 6]  # the first of each group finds nothing
    assert "prefix cache 66.7% of the prompt tokens" in table


def test_a_conversation_grows_by_the_models_own_answers(bench) -> None:
    data, _ = bench(
        "--endpoint chat --turns 3 --num-prompts 2 --max-concurrency 2 --input-len 5 --output-len 6"
    )
    requests = data["details"]["runs"][0]["requests"]
    assert len(requests) == 6
    for session in (0, 1):
        turns = [r for r in requests if r["session"] == session]
        assert [r["turn"] for r in turns] == [0, 1, 2]
        lengths = [r["prompt_tokens"] for r in turns]
        assert lengths == sorted(lengths) and len(set(lengths)) == 3


def test_requests_that_are_refused_are_counted_by_kind(bench, tmp_path: Path) -> None:
    rows = [{"time": 0, "input_len": n, "output_len": 2} for n in (10, 2000, 12)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    data, table = bench(f"--trace {trace} --warmup 0")
    assert data["details"]["runs"][0]["failures"] == {"HTTP 400": 1}
    assert "note: 1 failed: HTTP 400" in table


def test_a_server_that_does_not_start_is_an_error_with_its_last_words() -> None:
    with (
        pytest.raises(RuntimeError, match=r"minifer serve ended with status 2: minifer: error"),
        spawned_server(["--model", "minifer-tiny", "--block-size", "0"]),
    ):
        pytest.fail("it started")
