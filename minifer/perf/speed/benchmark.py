"""Engines take turns at the same tasks, and the machine's ceilings take turns with them.

In every round each engine answers all tasks once, then memory is read and matrices are multiplied.
A ratio of two engines is the median of the ratios within a round. The ceilings are the best of all
rounds: whatever slowed the machine meanwhile is no excuse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from minifer.config import ModelConfig
from minifer.perf.bench import BenchmarkResult, Summary, run_benchmark
from minifer.perf.devices import Device
from minifer.perf.speed.ceilings import PRODUCT, READ, Ceilings
from minifer.perf.speed.engines import PROCESS, Answers, Tasks
from minifer.perf.speed.measures import UNITS, Task, measures, step_intensity
from minifer.perf.speed.stamps import same_beginning
from minifer.perf.speed.worker import WorkerError

OURS = "minifer"
WITHOUT = "minifer without speculation"
Engine = Callable[[Tasks], Answers]


@dataclass(frozen=True)
class SpeedReport:
    """here: this machine, its rates measured. result: everything, ready for JSON. rows: of our
    engine, a task each (`_row`). versus: other → task → ratio ours ÷ theirs of tokens/s, a round
    each. skipped: other → why it did not run; failed: of those, who broke down."""

    here: Device
    result: BenchmarkResult
    rows: tuple[Mapping[str, Any], ...]
    versus: Mapping[str, Mapping[str, Summary]]
    skipped: Mapping[str, str]
    failed: tuple[str, ...]


@dataclass
class _Kept:
    """What turns leave behind for the report."""

    answers: dict[str, Answers] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def measure_speed(
    name: str,
    engines: Mapping[str, Engine],
    tasks: Tasks,
    config: ModelConfig,
    ceilings: Ceilings,
    *,
    runs: int,
    warmup: int,
    settings: Mapping[str, Any],
    skipped: Mapping[str, str] | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> SpeedReport:
    """Rounds of turns. engines: ours first, under the name `OURS`. tasks: of a turn; equal names
    and lengths in each. skipped: others that were asked for and cannot run, and why; recorded.

    A turn of another engine that fails ends its part, and the report says why. Raises what our own
    engine raises.
    """
    kept = _Kept()
    arms: dict[str, Callable[[], Mapping[str, float]]] = {
        engine: partial(_turn, engine, call, tasks, config, ceilings, kept, note)
        for engine, call in engines.items()
    }
    arms[READ], arms[PRODUCT] = ceilings.read, ceilings.product
    units = {f"{t.name}: {metric}": unit for t in tasks(0) for metric, unit in UNITS.items()}
    units |= {metric: UNITS[metric] for metric in ("bytes_per_second", "flops_per_second")}
    units |= {"same_size_bytes_per_second": "B/s", **PROCESS}
    result = run_benchmark(name, arms, runs=runs, warmup=warmup, units=units, settings=settings)
    gone = set(kept.failed)
    result = replace(
        result,
        arms={arm: values for arm, values in result.arms.items() if arm not in gone},
        ratios={},
    )
    return _report(result, tasks(0), config, ceilings, kept, skipped or {})


def _turn(
    engine: str,
    call: Engine,
    tasks: Tasks,
    config: ModelConfig,
    ceilings: Ceilings,
    kept: _Kept,
    note: Callable[[str], None],
) -> dict[str, float]:
    """One engine answers all tasks: its measures by "task: metric"."""
    if engine in kept.failed:
        return dict.fromkeys(_promised(engine, kept), 0.0)
    note(f"{engine} answers")
    try:
        answers = call(tasks)
        out = {
            f"{task.name}: {metric}": value
            for task in tasks(0)
            for metric, value in measures(
                task, answers.runs[task.name], config, answers.traffic
            ).items()
        }
    except (WorkerError, ValueError) as error:
        if engine == OURS:
            raise
        note(f"{engine} is left out: {error}")
        kept.failed[engine] = str(error)
        return dict.fromkeys(_promised(engine, kept), 0.0)
    if engine == OURS and answers.traffic is not None:
        ceilings.expect(int(answers.traffic.weights))
    for metric in PROCESS:
        if (value := answers.about.get(metric)) is not None:
            out[metric] = float(value)
    kept.answers[engine] = replace(answers, about={**answers.about, "metrics": sorted(out)})
    return out


def _promised(engine: str, kept: _Kept) -> Sequence[str]:
    """The metrics that earlier rounds of an engine had: all rounds must have the same."""
    answers = kept.answers.get(engine)
    return () if answers is None else answers.about["metrics"]


def _report(
    result: BenchmarkResult,
    tasks: Sequence[Task],
    config: ModelConfig,
    ceilings: Ceilings,
    kept: _Kept,
    skipped: Mapping[str, str],
) -> SpeedReport:
    read, product = result.arms[READ], result.arms[PRODUCT]["flops_per_second"]
    both = [read[metric] for metric in ("bytes_per_second", "same_size_bytes_per_second")]
    memory, same_size = (summary.max for summary in both)
    of_rounds = [max(pair) for pair in zip(*(summary.values for summary in both), strict=True)]
    here = ceilings.device(max(memory, same_size), product.max)
    ours = kept.answers[OURS]
    arms = {
        engine: _with_utilisation(metrics, here, of_rounds) if engine in kept.answers else metrics
        for engine, metrics in result.arms.items()
    }
    rows = tuple(_row(task, arms[OURS], config, ours) for task in tasks)
    others = [engine for engine in arms if engine in kept.answers and engine != OURS]
    versus = {other: _versus(arms[OURS], arms[other], tasks) for other in others}
    details = {
        "here": {key: None if value != value else value for key, value in asdict(here).items()},
        "read_bandwidth": {"memory": memory, "same_size": same_size},
        "steps": list(rows),
        "versus": {
            other: {task: asdict(summary) for task, summary in by_task.items()}
            for other, by_task in versus.items()
        },
        "engines": {
            engine: {
                **{key: value for key, value in answers.about.items() if key != "metrics"},
                "same_tokens": _same_tokens(ours, answers, tasks),
            }
            for engine, answers in kept.answers.items()
            if engine in arms
        },
        "skipped": {**skipped, **kept.failed},
    }
    result = replace(result, arms=arms, details=details, units={**result.units, **_UTILISATION})
    missing = {**skipped, **kept.failed}
    return SpeedReport(here, result, rows, versus, missing, tuple(kept.failed))


_UTILISATION = {"mbu": "", "mbu_of_round": "", "mfu": ""}


def _with_utilisation(
    metrics: Mapping[str, Summary], here: Device, of_rounds: Sequence[float]
) -> dict[str, Summary]:
    """With "task: mbu" and "task: mfu" beside the rates they come from.

    mbu: of the best reading of all rounds. mbu_of_round: of what the same round read. Where
    neighbours take and give back bandwidth by the minute, the first says what the machine could do
    and the second what the engine did with what there was.
    """
    out = dict(metrics)
    for metric, summary in metrics.items():
        task, _, name = metric.rpartition(": ")
        limit = {
            "bytes_per_second": ("mbu", here.memory_bandwidth),
            "flops_per_second": ("mfu", here.peak_flops),
        }.get(name)
        if limit is not None:
            out[f"{task}: {limit[0]}"] = Summary.of([v / limit[1] for v in summary.values])
        if name == "bytes_per_second":
            shares = [v / read for v, read in zip(summary.values, of_rounds, strict=True)]
            out[f"{task}: mbu_of_round"] = Summary.of(shares)
    return out


def _row(
    task: Task, metrics: Mapping[str, Summary], config: ModelConfig, answers: Answers
) -> dict[str, Any]:
    """A task of our engine: medians, `mbu` and `mfu` among them, and its place on a roofline."""
    prefix = f"{task.name}: "
    medians = {
        metric.removeprefix(prefix): summary.median
        for metric, summary in metrics.items()
        if metric.startswith(prefix)
    }
    row: dict[str, Any] = {"work": task.name, "kind": task.kind, **medians}
    row["spread"] = metrics[f"{prefix}tokens_per_second"].iqr
    if answers.traffic is not None and task.kind != "throughput":
        flops, num_bytes = step_intensity(task, config, answers.traffic)
        row.update(flops=flops, bytes=num_bytes, intensity=flops / num_bytes)
    return row


def _versus(
    ours: Mapping[str, Summary], theirs: Mapping[str, Summary], tasks: Sequence[Task]
) -> dict[str, Summary]:
    out = {}
    for task in tasks:
        key = f"{task.name}: tokens_per_second"
        pairs = zip(ours[key].values, theirs[key].values, strict=True)
        ratios = [a / b for a, b in pairs if b and math.isfinite(a / b)]
        if ratios:
            out[task.name] = Summary.of(ratios)
    return out


def _same_tokens(ours: Answers, theirs: Answers, tasks: Sequence[Task]) -> dict[str, float]:
    """Task → share of tokens equal to ours, up to the first that differs; where tokens are told."""
    return {
        task.name: same_beginning(ours.runs[task.name].tokens, theirs.runs[task.name].tokens)
        for task in tasks
        if ours.runs[task.name].tokens and theirs.runs[task.name].tokens
    }
