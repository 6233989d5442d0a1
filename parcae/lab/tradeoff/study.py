"""The trade-off of a served loop model: speed against loss, by depth, early exit and KV policy.

`study` measures everything (`minifer parcae tradeoff`), `report` and `losses` write it down,
`plots` draws it. Losses are of held-out text, read through the engine; speeds are of the server, as
ratios within one run. What each trade-off loses, and why, is said in `kv_quality`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minifer.config import EngineConfig, ModelConfig
from minifer.loops import LOOP_BATCHING
from minifer.parcae.costs import parameters
from minifer.parcae.lab.depth_batching import edge_of, simulate, workload
from minifer.parcae.lab.tradeoff import kv_quality
from minifer.parcae.lab.tradeoff.kv_quality import Exit, Row
from minifer.parcae.lab.tradeoff.serving_speed import Setting, Traffic, measure
from minifer.parcae.lab.tradeoff.teacher_forcing import force
from minifer.parcae.presets import PRESETS
from minifer.perf.bench import BenchmarkResult, Summary
from minifer.perf.costs import ElementBytes
from minifer.text.byte_tokenizer import VOCAB_SIZE
from minifer.text.help_topics import held_out, sections, token_stream

TOLERATED = 0.01  # nats a token that early exit may cost where one threshold must be chosen
SCALED = "parcae-1.3b"  # whose weight bytes are modelled from the counts, beside the model's own


@dataclass(frozen=True)
class Plan:
    """How much to measure. rows, length: of the held-out text. mixed: depths of the mixed workload,
    in turn. prompt_len, answer_len: tokens of requests to the server; requests: at concurrency 1,
    and at `concurrency`. longer: how many times as many requests are simulated."""

    rows: int = 48
    length: int = 64
    policies: tuple[str, ...] = kv_quality.POLICIES
    thresholds: tuple[float, ...] = kv_quality.THRESHOLDS
    depths: tuple[int, ...] = kv_quality.DEPTHS
    speed_depths: tuple[int, ...] = (8, 4, 2, 1)
    mixed: tuple[int, ...] = (1, 4, 8)
    prompt_len: int = 16
    answer_len: int = 48
    requests: tuple[int, int] = (2, 16)
    concurrency: int = 8
    longer: tuple[int, ...] = (1, 2, 4)
    runs: int = 5
    warmup: int = 1


QUICK = Plan(
    rows=2,
    length=10,
    policies=("full", "first-1", "terminal"),
    thresholds=(0.0, 1e-2, 1e-1),
    depths=(1, 8, 12),
    speed_depths=(8, 1),
    prompt_len=4,
    answer_len=5,
    requests=(1, 6),
    concurrency=3,
    runs=1,
    warmup=0,
)


def held_out_rows(loaded: Any, rows: int, length: int) -> Tensor:
    """int64 [rows, length + 1], spread evenly over the help topics' held-out sections.

    Held out of the models that come with this package; another model's tokenizer is given the
    same sections as text. Raises `ValueError` when they are too short.
    """
    unseen = held_out(sections())
    if loaded.config.vocab_size == VOCAB_SIZE:
        stream = token_stream(unseen)
    else:
        text = "".join(f"{title}\n\n{body}\n\n" for title, body in unseen)
        stream = torch.tensor(loaded.tokenizer.encode(text))
    if len(stream) < rows * (length + 1):
        raise ValueError(
            f"rows and length must fit into {len(stream)} tokens of held-out text, got {rows} rows "
            f"of {length + 1}"
        )
    apart = len(stream) // rows
    return torch.stack([stream[r * apart : r * apart + length + 1] for r in range(rows)])


def study(
    loaded: Any, plan: Plan | None = None, progress: Callable[[str], None] = lambda name: None
) -> dict[str, Any]:
    """Everything, JSON-ready. loaded: a `LoadedModel` of a loop model, with a tokenizer.

    Raises `ValueError` for a model without a loop, and for a plan that lacks a depth it needs or a
    threshold above 0.
    """
    plan = plan or Plan()
    config = loaded.config
    if config.loop is None:
        raise ValueError("model must be a loop model such as parcae-tiny; this one has no loop")
    mean = config.loop.mean_recurrence
    if missing := {mean, *plan.speed_depths}.difference(plan.depths):
        raise ValueError(
            f"depths must hold the model's mean depth {mean} and speed_depths {plan.speed_depths}, "
            f"got {plan.depths} without {sorted(missing)}"
        )
    if max(plan.thresholds, default=0) <= 0:
        raise ValueError(f"thresholds must hold one above 0, got {plan.thresholds}")
    rows = held_out_rows(loaded, plan.rows, plan.length)
    progress("the engine against whole rows")
    dense = kv_quality.dense_losses(loaded.model, rows)
    difference = float((force(loaded, rows).losses - dense).abs().max())
    progress("KV policies")
    policies = kv_quality.policy_table(loaded, rows, plan.policies)
    progress("early exit")
    exits = kv_quality.exit_table(loaded, rows, plan.thresholds)
    progress("depths")
    depths = kv_quality.depth_table(loaded, rows, plan.depths)
    prefix, tails = rows[0, :-1].tolist(), rows[1:, : plan.prompt_len].tolist()
    shared = [
        kv_quality.shared_prompt(loaded, prefix, tails, policy) for policy in ("full", "terminal")
    ]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None  # not on Windows
    alone = fixed_settings(plan, exits, mean)
    together = [*alone, *batching_settings(plan, chosen_threshold(exits), mean)]
    speeds = {}
    for name, settings, requests, concurrency in (
        ("single", alone, plan.requests[0], 1),
        ("concurrent", together, plan.requests[1], plan.concurrency),
    ):
        progress(f"the server, {concurrency} at a time")
        traffic = Traffic(_prompts(rows, requests, plan.prompt_len), plan.answer_len, concurrency)
        speeds[name] = measure(loaded, traffic, settings, runs=plan.runs, warmup=plan.warmup)
    first = speeds["single"]
    return {
        "started": first.started,
        "machine": first.machine,
        "load_average": load,
        "versions": first.versions,
        "git": first.git,
        "plan": asdict(plan),
        "model": {
            "architecture": config.architecture,
            "hidden_size": config.hidden_size,
            "loop": asdict(config.loop),
            "parameters": parameters(config).total,
            "dtype": str(next(loaded.model.parameters()).dtype).removeprefix("torch."),
        },
        "engine_against_dense": difference,
        "policies": [asdict(row) for row in policies],
        "exits": [asdict(row) for row in exits],
        "depths": [asdict(row) for row in depths],
        "shared_prompt": [asdict(row) for row in shared],
        "chosen_threshold": chosen_threshold(exits),
        "speed": {name: result.to_dict() for name, result in speeds.items()},
        "tradeoff": tradeoff(alone, speeds, [*depths, *(entry.engine for entry in exits)]),
        "default_batching": EngineConfig.loop_batching,
        "batching": batching(config, together, speeds["concurrent"]),
        "simulated": simulated(config, plan),
    }


def chosen_threshold(exits: Sequence[Exit]) -> float:
    """The largest threshold that costs at most `TOLERATED`; where none does, the smallest above 0,
    which is the first at which a token may leave."""
    leaving = [entry for entry in exits if entry.threshold > 0]
    cheap = [entry.threshold for entry in leaving if entry.engine.excess <= TOLERATED]
    return max(cheap, default=min(entry.threshold for entry in leaving))


def fixed_settings(plan: Plan, exits: Sequence[Exit], mean: int) -> list[Setting]:
    """Fixed depths, the chosen threshold and its neighbours: the engine batches as it likes."""
    known = sorted(entry.threshold for entry in exits if entry.threshold > 0)
    chosen = known.index(chosen_threshold(exits))
    return [
        *(Setting(f"depth {depth}", (depth,)) for depth in plan.speed_depths),
        *(Setting(f"exit {x:g}", (mean,), x) for x in known[max(0, chosen - 1) : chosen + 2]),
    ]


def batching_settings(plan: Plan, threshold: float, mean: int) -> list[Setting]:
    """What `loop_batching` decides: mixed depths in all its ways, and early exit in those that are
    not among the fixed settings."""
    mixed, early = Setting("mixed", plan.mixed), Setting(f"exit {threshold:g}", (mean,), threshold)
    settings = [replace(one, batching=way) for one in (mixed, early) for way in LOOP_BATCHING]
    return [setting for setting in settings if setting != early]


def _prompts(rows: Tensor, count: int, length: int) -> list[list[int]]:
    """`count` different beginnings, from the rows one after the other."""
    flat = rows.flatten()
    apart = len(flat) // count
    return [flat[i * apart : i * apart + length].tolist() for i in range(count)]


def tradeoff(
    settings: Sequence[Setting], speeds: Mapping[str, BenchmarkResult], rows: Sequence[Row]
) -> list[dict[str, Any]]:
    """One entry for each setting: its loss on the held-out text, and under each traffic its speed
    (tokens/s, and against the first setting's) and what the engine counted, a token."""
    losses = {row.name: row for row in rows}
    table = []
    for setting in settings:
        row = losses[setting.name]
        entry: dict[str, Any] = {"name": row.name, "loss": row.loss, "excess": row.excess}
        for traffic, result in speeds.items():
            metrics, tokens = result.arms[row.name], _tokens(result)
            entry[traffic] = {
                "tokens_per_second": metrics["tokens_per_second"].median,
                "ratios": _ratios(result, row.name, settings[0].name),
                "mean_loops": metrics["mean_loops"].median,
                "core_applications": metrics["core_applications"].median / tokens,
                "steps": metrics["steps"].median / tokens,
            }
        table.append(entry)
    return table


def batching(
    config: ModelConfig, settings: Sequence[Setting], result: BenchmarkResult
) -> list[dict[str, Any]]:
    """Every way to end a step under the workloads that were served in all of them: counts, what
    follows from them, and the speed against lockstep's."""
    table = []
    ways = {(s.workload, s.batching): s for s in settings}
    for asked in dict.fromkeys(s.workload for s in settings):
        served = [ways.get((asked, way)) for way in LOOP_BATCHING]
        base = ways[asked, "lockstep"].name if all(served) else ""
        for setting in (s for s in served if s is not None and base):
            metrics = result.arms[setting.name]
            counts = metrics["core_applications"].median, metrics["steps"].median
            table.append(
                {
                    "workload": asked,
                    "batching": setting.batching,
                    "tokens_per_second": metrics["tokens_per_second"].median,
                    "ratios": _ratios(result, setting.name, base),
                    **_reads(config, *counts, _tokens(result)),
                }
            )
    return table


def simulated(config: ModelConfig, plan: Plan) -> list[dict[str, Any]]:
    """The mixed workload with more requests than were served: the counts that follow from its
    depths (`depth_batching.simulate`). In a short run its end weighs most, where few are left."""
    table = []
    for times in plan.longer:
        jobs = workload(plan.mixed, times * plan.requests[1], plan.answer_len)
        for way in LOOP_BATCHING:
            count = simulate(jobs, plan.concurrency, way)
            reads = _reads(
                config, count.core_applications, count.steps, len(jobs) * plan.answer_len
            )
            table.append({"requests": len(jobs), "batching": way, **reads})
    return table


def _reads(config: ModelConfig, applications: float, steps: float, tokens: int) -> dict[str, Any]:
    """The counts, and weight bytes a token (bfloat16): an application reads the core's, a step
    those of prelude, coda and head. By the model's own shape, and that of `SCALED`."""
    weight_bytes = {}
    for size, shape in (("own", config), (SCALED, PRESETS[SCALED])):
        core = parameters(shape).core * ElementBytes().weight
        weight_bytes[size] = (applications + edge_of(shape) * steps) * core / tokens
    return {"core_applications": applications, "steps": steps, "weight_bytes": weight_bytes}


def _ratios(result: BenchmarkResult, name: str, base: str) -> dict[str, Any]:
    """Tokens a second and a CPU second of an arm, divided by another's in the same round."""
    found = {}
    for kind in ("second", "cpu_second"):
        own, other = (result.arms[arm][f"tokens_per_{kind}"].values for arm in (name, base))
        found[kind] = asdict(Summary.of([a / b for a, b in zip(own, other, strict=True)]))
    return found


def _tokens(result: BenchmarkResult) -> int:
    """Generated in one round of one arm."""
    return result.settings["requests"] * result.settings["max_tokens"]
