"""A routing benchmark: what was measured, read as a workload, and simulated."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from minifer.async_llm import AsyncLLM
from minifer.cli import main
from minifer.cli.serve import _event_log
from minifer.config import EngineConfig
from minifer.perf.bench import run_benchmark
from minifer.perf.load.client import Record, user_message
from minifer.perf.load.generator import LoadRun
from minifer.perf.load.workload import Session, Turn
from minifer.sampling_params import SamplingParams
from minifer.serving.replicas.run import prompt_reader
from minifer.simulation.calibration.fit import StepFit
from minifer.simulation.calibration.routing_bench import (
    UNITS,
    RoutingBench,
    bench_routing,
    chats_of,
    fit_logs,
    predict,
    summarize,
    summarize_predicted,
)
from minifer.simulation.calibration.routing_report import draw, table
from minifer.simulation.steps.times import FixedSteps

P = 16
ENGINE = EngineConfig(model="minifer-tiny", block_size=P, num_kv_blocks=256)
READER = prompt_reader(ENGINE)
FIT = StepFit(FixedSteps(0.5), 10, 1.0, 0.0, 1.0, {})  # type: ignore[arg-type]


def num_tokens(messages: list[dict[str, str]]) -> int:
    return asyncio.run(READER.read({"messages": messages})).num_tokens


def played(
    sessions: list[Session], answer: str = "yes", cached: int = 0, every: float = 10.0
) -> LoadRun:
    """A run in which each session came so many seconds after the one before."""
    run = LoadRun(100.0)
    for number, session in enumerate(sessions):
        history: list[dict[str, str]] = []
        for k, turn in enumerate(session.turns):
            due = 100.0 + every * number + 2 * k
            record = Record(number, k, due, sent=due, chunk_times=[due + 0.5], end=due + 1)
            messages = [*history, user_message(turn.pieces)]
            record.prompt_tokens, record.output_tokens = num_tokens(messages), 3
            record.cached_tokens, record.text = cached, answer
            record.finish_reason = "length"
            history = [*messages, {"role": "assistant", "content": answer}]
            run.records.append(record)
    run.end = 200.0
    return run


def words(*texts: str) -> tuple[str, ...]:
    return tuple(" ".join(texts).split())


SHARED = "every conversation of this group begins with these words and "
SESSIONS = [
    Session((Turn(words(SHARED, "then one"), 3), Turn(words("what is next"), 3, 1.5)), 0.0),
    Session((Turn(words(SHARED, "now two"), 3), Turn(words("and then"), 3, 1.5)), 10.0),
    Session((Turn(words("another one begins in its own way"), 3),), 20.0),
]


def test_a_run_is_read_as_conversations_with_the_blocks_of_their_prompts():
    chats = chats_of(played(SESSIONS), SESSIONS, READER, P)
    first, second, third = (chat.turns for chat in chats)
    assert [turn.time for turn in first] == [0.0, 1.5]
    assert second[0].time == 10.0 and third[0].time == 20.0
    for turn in (*first, *second, *third):
        assert len(turn.block_names) == turn.prompt_len // P and turn.output_len == 3
    assert first[1].block_names[: len(first[0].block_names)] == first[0].block_names
    common = len(SHARED) // P
    assert first[0].block_names[:common] == second[0].block_names[:common]
    assert not set(third[0].block_names[1:]) & set(first[0].block_names)
    assert [turn.request_id for turn in second] == ["1-0", "1-1"]


def test_a_conversation_ends_before_what_failed():
    run = played(SESSIONS)
    run.records[1].error = "HTTP 500"
    run.records[4].error = "timeout"
    chats = chats_of(run, SESSIONS, READER, P)
    assert [[turn.request_id for turn in chat.turns] for chat in chats] == [["0-0"], ["1-0", "1-1"]]


def test_round_robin_computes_a_prompt_twice_and_affinity_once():
    """One conversation of four turns on two replicas, redone by hand."""
    question = "a question of fifty characters, more or less, again"
    session = Session(tuple(Turn(words(question), 3, 1.0) for _ in range(4)), 0.0)
    run = played([session], answer="the answer, in nineteen letters or so")
    (chat,) = chats_of(run, [session], READER, P)
    lengths = [turn.prompt_len for turn in chat.turns]
    full = [length // P * P for length in lengths]
    turns = predict([chat], FIT, ENGINE, "round_robin", 2)
    assert [r.path for r in turns.requests] == [("replica-0",), ("replica-1",)] * 2
    computed = summarize_predicted(turns)["computed_tokens"]
    assert computed == sum(lengths) - full[0] - full[1]
    follows = predict([chat], FIT, ENGINE, "prefix_affinity", 2)
    assert len({r.path for r in follows.requests}) == 1
    found = sum(r.reused_len for r in follows.requests)
    assert found == sum(full[:3])
    assert summarize_predicted(follows)["computed_tokens"] == sum(lengths) - found
    assert summarize_predicted(follows)["ttft_mean"] == 0.5


def test_what_was_measured_tells_first_turns_from_later_ones():
    run = played(SESSIONS, cached=32)
    for record in run.records:
        if record.turn:
            record.chunk_times = [record.intended + 0.25]
    values = summarize(run)
    assert values["ttft_first_turn_mean"] == 0.5 and values["ttft_later_turns_mean"] == 0.25
    assert values["computed_tokens"] == values["prompt_tokens"] - 5 * 32
    assert UNITS["computed_tokens"] == "tokens"


def bench_of(policies: list[str]) -> RoutingBench:
    runs = {policy: [played(SESSIONS, cached=16 * i)] for i, policy in enumerate(policies)}
    arms: dict[str, Any] = {p: (lambda p=p: summarize(runs[p][0])) for p in policies}
    result = run_benchmark("route", arms, runs=1, warmup=0, units=UNITS)
    chats = chats_of(runs[policies[0]][0], SESSIONS, READER, P)
    predicted = {policy: [predict(chats, FIT, ENGINE, policy, 2)] for policy in policies}
    return RoutingBench(result, runs, predicted, FIT)


def test_the_table_shows_measured_and_simulated_side_by_side():
    bench = bench_of(["round_robin", "prefix_affinity"])
    text = table(bench)
    assert text.splitlines()[0].split() == ["round_robin", "prefix_affinity"]
    (row,) = [line for line in text.splitlines() if line.startswith("TTFT, mean")]
    assert row.split() == ["TTFT,", "mean", "500", "500", "500", "500", "ms"]
    assert "prefix_affinity ÷ round_robin: TTFT 1.00× (simulated 1.00×)" in text
    assert "10 steps of the first policy's engines" in text


def test_the_picture_says_what_is_simulated(tmp_path: Path):
    pytest.importorskip("matplotlib")
    bench = bench_of(["round_robin", "prefix_affinity"])
    draw(bench, "two policies").savefig(tmp_path / "route.svg")
    assert (tmp_path / "route.svg").stat().st_size > 5_000


@pytest.mark.parametrize("policies", [[], ["random", "random"]])
def test_policies_must_differ(policies: list[str], tmp_path: Path):
    with pytest.raises(ValueError, match="policies must be different ones"):
        bench_routing(None, policies, 2, [], READER, tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--replicas 0", "--replicas must be at least 1, got 0"),
        ("--policies round_robin nonsense", "router must be one of"),
        ("--turns 0", "turns must be at least 1, got 0"),
        ("--request-rate 0", "request_rate must be above 0"),
        ("--plot x.txt", "--plot must end in .png, .svg or .pdf"),
    ],
)
def test_bad_usage_is_one_sentence(options: str, said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "route", "--model", "minifer-tiny", *options.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error


def test_a_server_writes_the_log_that_prices_are_fitted_to(tmp_path: Path):
    """What `minifer serve --events` does; a replica that was sent nothing has no steps."""
    file, empty = tmp_path / "log.jsonl", tmp_path / "empty.jsonl"
    for log in (file, empty):
        llm = AsyncLLM("minifer-tiny", block_size=P, num_kv_blocks=99)
        with _event_log(llm, log), llm:
            if log is file:
                asyncio.run(llm.complete("Hello", SamplingParams(max_tokens=5, ignore_eos=True)))
    fit, engine = fit_logs([file, empty])
    assert fit.num_steps == 5 and (engine.block_size, engine.num_kv_blocks) == (P, 99)
    with pytest.raises(ValueError, match="none of 1 logs holds a step"):
        fit_logs([empty])


@pytest.mark.slow
def test_two_policies_on_real_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Affinity computes fewer tokens than turns do, as the simulator says."""
    out = tmp_path / "route.json"
    command = ["bench", "route", "--model", "minifer-tiny", "--sessions", "5", "--turns", "3"]
    options = ["--input-len", "20", "--request-rate", "2", "--think-time", "0.3", "--runs", "2"]
    plot = tmp_path / "route.png"
    assert main([*command, *options, "--json", str(out), "--plot", str(plot)]) == 0
    data = json.loads(out.read_text())
    median = {arm: data["arms"][arm]["computed_tokens"]["median"] for arm in data["order"]}
    assert median["prefix_affinity"] < 0.9 * median["round_robin"]
    assert all(data["arms"][arm]["failed"]["median"] == 0 for arm in data["order"])
    foretold = data["details"]["predicted"]
    for arm in data["order"]:
        tokens = [row["computed_tokens"] for row in foretold[arm]]
        assert tokens == pytest.approx(data["arms"][arm]["computed_tokens"]["values"], rel=0.15)
    assert plot.stat().st_size > 10_000
    assert "(simulated 0." in capsys.readouterr().out
