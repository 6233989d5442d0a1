"""`minifer bench route`: routing policies on real replicas, and the simulator's word on them.

Every policy has replicas of its own. All get the same conversations, one policy after the other in
each round, with prompts that no round before has seen. What a policy is worth shows in two numbers:
how long a first token took (TTFT), and how many tokens of prompts had to be computed because the
replica that got the request had not seen its beginning.

The prediction takes the prices of steps from the log of the *first* policy's engines, and the
arrivals, prompts and lengths of the run itself; who is sent where, who waits for whom and what is
cached then is simulated, for every policy. It knows nothing of HTTP and tokenizers. An answer's own
tokens it does not take for cached when they come back in the next prompt: a block or two a turn.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minifer.config import EngineConfig
from minifer.perf.bench import BenchmarkResult
from minifer.perf.load import metrics
from minifer.perf.load.benchmark import ServeBenchmark, bench_servers
from minifer.perf.load.client import Record, user_message
from minifer.perf.load.generator import LoadRun
from minifer.perf.load.spawn import spawned_server
from minifer.perf.load.workload import WORDS, Session
from minifer.serving.front.prompt import PromptReader
from minifer.simulation.calibration.fit import StepFit, fit_steps
from minifer.simulation.calibration.step_log import read_log
from minifer.simulation.cluster import Cluster, identical
from minifer.simulation.result import SimulationResult
from minifer.simulation.simulator import simulate
from minifer.simulation.workloads.arrivals import Arrival, Conversation

UNITS: Mapping[str, str] = {
    **{f"ttft_{when}_mean": "s" for when in ("first_turn", "later_turns")},
    "computed_tokens": "tokens",
}


@dataclass(frozen=True)
class RoutingBench:
    """What was measured, and what was predicted.

    runs, predicted: policy → one a round. fit: of the prices that the predictions were made with.
    """

    result: BenchmarkResult
    runs: Mapping[str, Sequence[LoadRun]]
    predicted: Mapping[str, Sequence[SimulationResult]]
    fit: StepFit


def bench_routing(
    bench: ServeBenchmark,
    policies: Sequence[str],
    num_replicas: int,
    arguments: Sequence[str],
    reader: PromptReader,
    folder: Path,
    settings: Mapping[str, Any] | None = None,
) -> RoutingBench:
    """Measure and predict.

    bench: conversations in an open loop. policies: what `make_policy` reads; the first is the
    baseline. arguments: of each `minifer serve`. reader: of the prompts that it will get. folder:
    for the engines' logs. Raises `ValueError` for one policy twice, `RuntimeError` when a server
    does not come up or completes nothing.
    """
    if len(set(policies)) < len(policies) or not policies:
        raise ValueError(f"policies must be different ones, at least one, got {list(policies)}")
    with ExitStack() as stack:
        servers, logs = {}, {}
        for i, policy in enumerate(policies):
            logs[policy] = folder / f"{i}.jsonl"
            given = ["--replicas", str(num_replicas), "--router", policy, *arguments]
            servers[policy] = stack.enter_context(
                spawned_server([*given, "--events", str(logs[policy])])
            )
        result, runs = bench_servers(
            bench,
            servers,
            name="route",
            summarize=summarize,
            units=UNITS,
            settings={"replicas": num_replicas, **(settings or {})},
        )
    first = logs[policies[0]]
    fit, engine = fit_logs(
        [first.with_name(f"{first.stem}.replica-{i}.jsonl") for i in range(num_replicas)]
    )
    predicted = {
        policy: [
            predict(
                chats_of(run, sessions, reader, engine.block_size),
                fit,
                engine,
                policy,
                num_replicas,
            )
            for run, sessions in _rounds(bench, runs[policy])
        ]
        for policy in policies
    }
    foretold = {p: [summarize_predicted(r) for r in results] for p, results in predicted.items()}
    details = {**result.details, "predicted": foretold, "fit": fit.to_dict()}
    return RoutingBench(replace(result, details=details), runs, predicted, fit)


def _rounds(
    bench: ServeBenchmark, runs: Sequence[LoadRun]
) -> Iterator[tuple[LoadRun, list[Session]]]:
    for number, run in enumerate(runs):
        yield run, bench.sessions(WORDS, bench.seed + number)


# -- what was measured


def summarize(run: LoadRun) -> dict[str, float]:
    """Of one run: all of `metrics`, TTFT by turn, and the prompt tokens that were computed."""
    out = metrics.summarize(run)
    done = [record for record in run.records if record.error is None]
    for name, turns in (
        ("first_turn", [r for r in done if r.turn == 0]),
        ("later_turns", [r for r in done if r.turn > 0]),
    ):
        if turns:
            out[f"ttft_{name}_mean"] = math.fsum(map(metrics.ttft, turns)) / len(turns)
    out["computed_tokens"] = sum((r.prompt_tokens or 0) - (r.cached_tokens or 0) for r in done)
    return out


# -- what is predicted


def fit_logs(files: Sequence[Path]) -> tuple[StepFit, EngineConfig]:
    """Prices of steps from the logs of engines with the same settings, and these settings.

    Raises `ValueError` when none of them did anything, or one has no settings.
    """
    logs = [read_log(file) for file in files if _has_steps(file)]
    if not logs:
        raise ValueError(f"none of {len(files)} logs holds a step, such as {files[0]}")
    engine = logs[0].config
    if engine is None:
        raise ValueError(f"{files[0]} does not tell the engine's settings")
    steps = [step for log in logs for step in log.steps]
    return fit_steps(steps, "the engines' log"), engine


def _has_steps(file: Path) -> bool:
    """One that was sent nothing has none."""
    with open(file, encoding="utf-8") as lines:
        return any('"step.postprocessed"' in line for line in lines)


def chats_of(
    run: LoadRun, sessions: Sequence[Session], reader: PromptReader, block_size: int
) -> list[Conversation]:
    """The conversations of a run as the simulator takes them: lengths and blocks of each prompt.

    One ends before a turn that failed. `Arrival.block_names` are of blocks of `block_size`.
    """
    names: dict[Any, int] = {}  # digest → name
    chats = []
    for number, session in enumerate(sessions):
        records = sorted((r for r in run.records if r.session == number), key=lambda r: r.turn)
        history: list[dict[str, str]] = []
        turns: list[Arrival] = []
        for record in records:
            if record.error is not None:
                break
            turn = session.turns[record.turn]
            messages = [*history, user_message(turn.pieces)]
            keys = asyncio.run(reader.read({"messages": messages})).prefix_keys
            turns.append(
                _arrival(
                    record,
                    turn.think_time,
                    run.start,
                    tuple(names.setdefault(key, len(names)) for key in keys),
                )
            )
            history = [*messages, {"role": "assistant", "content": record.text}]
        if turns:
            chats.append(Conversation(tuple(turns)))
    return chats


def _arrival(
    record: Record, think_time: float, start: float, block_names: tuple[int, ...]
) -> Arrival:
    return Arrival(
        f"{record.session}-{record.turn}",
        think_time if record.turn else record.intended - start,
        record.prompt_tokens or 1,
        record.output_tokens or 1,
        block_names,
        session=record.session,
        turn=record.turn,
    )


def predict(
    chats: Sequence[Conversation],
    fit: StepFit,
    engine: EngineConfig,
    policy: str,
    num_replicas: int,
) -> SimulationResult:
    """Serve the same conversations with simulated replicas."""
    engine = replace(engine, kv_dram_bytes=None, kv_disk_path=None, speculative_method="none")
    nodes = identical(num_replicas, fit.steps, engine, name="replica-")
    return simulate(chats, Cluster(nodes, router=policy), name_tokens=engine.block_size)


def summarize_predicted(result: SimulationResult) -> dict[str, float]:
    """The same numbers of a simulated run."""
    done = [record for record in result.requests if record.ttft is not None]
    by_name = {
        "ttft_mean": done,
        "ttft_first_turn_mean": [r for r in done if r.turn == 0],
        "ttft_later_turns_mean": [r for r in done if r.turn > 0],
    }
    out = {
        name: math.fsum(r.ttft or 0.0 for r in records) / len(records)
        for name, records in by_name.items()
        if records
    }
    out["ttft_p50"] = metrics.percentile([r.ttft or 0.0 for r in done], 50)
    out["ttft_p99"] = metrics.percentile([r.ttft or 0.0 for r in done], 99)
    out["computed_tokens"] = sum(r.prompt_len - r.reused_len for r in done)
    return out
