"""`minifer bench serve` between the command line and the benchmark, which has tests of its own."""

from __future__ import annotations

import argparse
import importlib.util
import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from minifer.cli import bench_serve as command
from minifer.cli import main
from minifer.cli.parser import Parser, add_engine_options, engine_arguments, engine_fields
from minifer.perf.load import benchmark, spawn
from minifer.perf.load.benchmark import ServeBenchmark
from minifer.perf.load.traces import Trace
from minifer.perf.load.workload import Distribution, Workload

Capture = pytest.CaptureFixture[str]


class Stopped(Exception):  # noqa: N818 - it is no error
    """Thrown when the benchmark would begin."""


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    """Run the command until the benchmark begins: its plan, its server, what was spawned."""
    seen: dict[str, Any] = {}

    def bench_serve(bench: ServeBenchmark, url: str, **_: Any) -> None:
        seen.update(bench=bench, url=url)
        raise Stopped

    @contextmanager
    def spawned_server(arguments: list[str]):
        seen["spawned"] = arguments
        yield "http://spawned"
        seen["stopped"] = True

    monkeypatch.setattr(benchmark, "bench_serve", bench_serve)
    monkeypatch.setattr(spawn, "spawned_server", spawned_server)

    def run(*arguments: str) -> dict[str, Any]:
        seen.clear()
        assert main(["bench", "serve", *arguments]) == 1
        assert "Stopped" in capsys.readouterr().err
        return dict(seen)

    return run


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rows = [{"time": i, "input_len": 10 * i + 1, "output_len": 2} for i in (2, 0, 1)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path / "trace.jsonl")


def test_without_options_eight_clients_ask_a_server_of_its_own(begun) -> None:
    seen = begun()
    assert (seen["url"], seen["spawned"]) == ("http://spawned", [])
    assert seen["bench"] == ServeBenchmark(
        Workload(64, Distribution.parse("128"), Distribution.parse("32")),
        max_concurrency=8,
        extra={"temperature": 0.0, "ignore_eos": True},
    )


def test_every_option_arrives(begun) -> None:
    options = """--base-url http://other --api-key k --endpoint chat --model m --vocab-size 9
        --timeout 5 --num-prompts 3 --input-len uniform:2:4 --output-len 7 --prefix-groups 2
        --prefix-len 6 --turns 3 --think-time 1.5 --request-rate 2.5 --burstiness 0.5
        --no-ignore-eos --seed 4 --runs 2 --warmup 0 --slo ttft=1 tpot=0.5 --extra-body"""
    seen = begun(*options.split(), '{"temperature": 1, "top_p": 0.5}')
    assert seen["url"] == "http://other" and "spawned" not in seen
    assert seen["bench"] == ServeBenchmark(
        Workload(
            3,
            Distribution.parse("uniform:2:4"),
            Distribution.parse("7"),
            2,
            6,
            3,
            Distribution.parse("1.5"),
        ),
        endpoint="chat",
        request_rate=2.5,
        burstiness=0.5,
        seed=4,
        runs=2,
        warmup=0,
        model="m",
        api_key="k",
        vocab_size=9,
        timeout=5.0,
        slo={"ttft": 1.0, "tpot": 0.5},
        extra={"temperature": 1, "top_p": 0.5},
    )
    assert begun("--max-concurrency", "3")["bench"].max_concurrency == 3


def test_the_key_of_the_environment_is_for_running_servers(begun, monkeypatch) -> None:
    monkeypatch.setenv("MINIFER_API_KEY", "secret")
    assert begun("--base-url", "http://other")["bench"].api_key == "secret"
    assert begun("--base-url", "http://other", "--api-key", "k")["bench"].api_key == "k"
    assert begun()["bench"].api_key is None


def test_a_trace_brings_its_arrivals(begun, trace: str, capsys: Capture) -> None:
    plan = begun("--trace", trace, "--speed-up", "2", "--max-total-len", "20")["bench"]
    assert isinstance(plan.source, Trace)
    assert [row.input_len for row in plan.source.rows] == [1, 11]
    assert (plan.speed_up, plan.request_rate, plan.max_concurrency) == (2.0, None, None)
    assert len(begun("--trace", trace, "--num-prompts", "1")["bench"].source.rows) == 1
    assert begun("--trace", trace, "--trace-jitter", "2")["bench"].source.rows[1].time != 1.0


def test_engine_options_go_to_the_server(begun) -> None:
    seen = begun("--model", "minifer-tiny", "--block-size", "8", "--no-enable-prefix-caching")
    assert seen["spawned"] == [
        *("--model", "minifer-tiny"),
        *("--block-size", "8", "--no-enable-prefix-caching"),
    ]
    assert seen["bench"].model is None  # the server knows


@pytest.mark.parametrize(
    "options",
    [
        "--dtype bfloat16 --max-num-seqs 5 --debug --kv-disk-path blocks --kv-load-timeout 0.5",
        "--priority-ageing-steps none --no-debug --scheduling-policy lpm",
    ],
)
def test_engine_options_are_written_as_they_were_read(options: str) -> None:
    parser = Parser(prog="x")
    add_engine_options(parser)
    read = engine_fields(parser.parse_args(options.split()))
    again = parser.parse_args(engine_arguments(None, read))
    assert engine_fields(again) == read != {}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--request-rate 1 --max-concurrency 2", "exclude each other"),
        ("--max-concurrency 0", "max_concurrency must be at least 1, got 0"),
        ("--num-prompts 0", "num_prompts must be at least 1, got 0"),
        ("--turns 2", "turns above 1 need the endpoint chat"),
        ("--burstiness 2", "--burstiness needs --request-rate"),
        ("--speed-up 2", "--speed-up has no place here: it needs --trace"),
        ("--trace {trace} --turns 2", "--turns has no place here: the trace decides"),
        ("--trace {trace} --request-rate 2", "--request-rate has no place here"),
        ("--trace /nowhere/trace", "No such file or directory: /nowhere/trace"),
        ("--api-key k", "--api-key needs --base-url"),
        ("--base-url http://x --block-size 8", "--block-size is for a server that this command"),
        ("--block-size 0", "block_size must be an integer of at least 1, got 0"),
        ("--input-len many", "uniform:MIN:MAX"),
        ("--slo speed=1", "slo must be NAME=SECONDS"),
        ("--extra-body [1]", "--extra-body must be a JSON object, got '[1]'"),
        ("--out /nowhere/out.json", "--out: there is no folder /nowhere"),
        ("--plot /nowhere/out.png", "--plot: there is no folder /nowhere"),
        ("--request-rate 0", "request_rate must be above 0"),
    ],
)
def test_bad_usage_is_refused_before_a_server_starts(
    options: str, sentence: str, trace: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(spawn, "spawned_server", lambda *_: pytest.fail("a server was started"))
    status = main(["bench", "serve", *options.format(trace=trace).split()])
    out, err = capsys.readouterr()
    assert status in (1, 2) and out == ""
    assert err.splitlines()[-1].startswith("minifer: error: ") and sentence in err


def test_a_plot_that_nobody_can_draw_is_refused_before_a_server_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(spawn, "spawned_server", lambda *_: pytest.fail("a server was started"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "serve", "--plot", "out.png"]) == 2
    assert 'pip install "minifer[course]"' in capsys.readouterr().err


def test_a_benchmark_must_be_named(capsys: Capture) -> None:
    assert main(["bench"]) == 2
    assert "BENCHMARK" in capsys.readouterr().err
    assert main(["bench", "serve", "--help"]) == 0
    out = capsys.readouterr().out
    assert "usage: minifer bench serve [options]" in out and "  minifer bench serve --trace" in out


def test_arguments_are_those_of_argparse() -> None:
    """`_fill_in` names every option that has no default of its own."""
    parser = argparse.ArgumentParser()
    command._add_workload_options(parser)  # type: ignore[arg-type]
    options = vars(parser.parse_args([]))
    assert {*command._WORKLOAD, *command._TRACE} <= options.keys()
    left = options.keys() - {*command._WORKLOAD, *command._TRACE}
    assert left == {"num_prompts", "trace", "ignore_eos", "extra_body"}
