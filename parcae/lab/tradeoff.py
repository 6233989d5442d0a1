"""The trade-off of a served loop model: speed against loss, by depth, early exit and KV policy.

`study` measures everything (`minifer parcae tradeoff`), `tradeoff_report` writes it down,
`tradeoff_plots` draws it. Losses are of held-out text, read through the engine; speeds are of the
server, as ratios within one run. Which part of which trade-off is lost where is said in
`kv_quality`, and with its numbers in the report.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from minifer.parcae.costs import decode_cost, parameters
from minifer.parcae.lab import kv_quality
from minifer.parcae.lab.kv_quality import Exit, Row
from minifer.parcae.lab.serving_speed import Setting, Traffic, measure
from minifer.parcae.lab.teacher_forcing import force
from minifer.parcae.presets import PRESETS
from minifer.perf.bench import BenchmarkResult
from minifer.text.byte_tokenizer import VOCAB_SIZE
from minifer.text.help_topics import sections, split

TOLERATED = 0.01  # nats a token that early exit may cost where one threshold must be chosen
MIXED = (1, 4, 8)  # depths of a mixed workload
SCALED = "parcae-1.3b"  # whose weight bytes are modelled from the counts


@dataclass(frozen=True)
class Plan:
    """How much to measure. rows, length: of the held-out text. prompt_len, answer_len: tokens of
    requests to the server; requests: at concurrency 1, and at `concurrency`."""

    rows: int = 48
    length: int = 64
    policies: tuple[str, ...] = kv_quality.POLICIES
    thresholds: tuple[float, ...] = kv_quality.THRESHOLDS
    depths: tuple[int, ...] = kv_quality.DEPTHS
    speed_depths: tuple[int, ...] = (8, 4, 2, 1)
    prompt_len: int = 16
    answer_len: int = 48
    requests: tuple[int, int] = (2, 16)
    concurrency: int = 8
    runs: int = 3
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
    if loaded.config.vocab_size == VOCAB_SIZE:
        _, stream = split(sections())
    else:
        texts = (f"{title}\n\n{body}\n\n" for title, body in sections()[7::16])
        stream = torch.tensor(loaded.tokenizer.encode("".join(texts)))
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

    Raises `ValueError` for a model without a loop, or whose mean depth is not among the plan's.
    """
    plan = plan or Plan()
    config = loaded.config
    if config.loop is None:
        raise ValueError("model must be a loop model such as parcae-tiny; this one has no loop")
    mean = config.loop.mean_recurrence
    if mean not in plan.depths:
        raise ValueError(f"depths must hold the model's mean depth {mean}, got {plan.depths}")
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
    shared = [
        kv_quality.shared_prompt(
            loaded, rows[0, :-1].tolist(), rows[1:, : plan.prompt_len].tolist(), policy
        )
        for policy in ("full", "terminal")
    ]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None  # not on Windows
    speeds = {}
    for name, requests, concurrency in (
        ("single", plan.requests[0], 1),
        ("concurrent", plan.requests[1], plan.concurrency),
    ):
        progress(f"the server, {concurrency} at a time")
        traffic = Traffic(_prompts(rows, requests, plan.prompt_len), plan.answer_len, concurrency)
        settings = _settings(plan, exits, mean, together=concurrency > 1)
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
        "tradeoff": tradeoff(speeds, [*depths, *(entry.engine for entry in exits)]),
        "batching": _batching(config, speeds["concurrent"]),
    }


def chosen_threshold(exits: Sequence[Exit]) -> float:
    """The largest threshold that costs at most `TOLERATED`; where none does, the smallest."""
    cheap = [entry.threshold for entry in exits if entry.engine.excess <= TOLERATED]
    return max(cheap, default=min(entry.threshold for entry in exits))


def _settings(plan: Plan, exits: Sequence[Exit], mean: int, together: bool) -> list[Setting]:
    """Fixed depths, the chosen threshold and its neighbours; several at a time also mixed depths,
    and what needs a comparison in lockstep."""
    settings = [Setting(f"depth {depth}", (depth,)) for depth in plan.speed_depths]
    known, chosen = [entry.threshold for entry in exits], chosen_threshold(exits)
    near = known[max(0, known.index(chosen) - 1) : known.index(chosen) + 2]
    settings += [Setting(f"exit {x:g}", (mean,), x) for x in near if x > 0]
    if together:
        settings.append(Setting("mixed", MIXED))
        settings.append(Setting("mixed, lockstep", MIXED, batching="lockstep"))
        if chosen > 0:
            name = f"exit {chosen:g}, lockstep"
            settings.append(Setting(name, (mean,), chosen, "lockstep"))
    return settings


def _prompts(rows: Tensor, count: int, length: int) -> list[list[int]]:
    """`count` different beginnings, from the rows one after the other."""
    flat = rows.flatten()
    apart = len(flat) // count
    return [flat[i * apart : i * apart + length].tolist() for i in range(count)]


def tradeoff(speeds: Mapping[str, BenchmarkResult], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry for each way to ask: its loss on the held-out text, its speed under each traffic
    (tokens/s, and as a ratio to the first setting) and what the engine counted, a token."""
    losses = {row.name: row for row in rows}
    table = []
    for name in speeds["concurrent"].arms:
        row = losses.get(name.removesuffix(", lockstep"))
        entry: dict[str, Any] = {"name": name}
        entry |= {"loss": row and row.loss, "excess": row and row.excess}
        for traffic, result in speeds.items():
            if name not in result.arms:
                continue
            metrics = result.arms[name]
            tokens = result.settings["requests"] * result.settings["max_tokens"]
            found: dict[str, float] = {}
            for kind in ("second", "cpu_second"):
                metric = f"tokens_per_{kind}"
                ratio = result.ratios[name][metric] if name in result.ratios else None
                found[metric] = metrics[metric].median
                found[f"{kind}_ratio"] = ratio.median if ratio else 1.0
                found[f"{kind}_ratio_iqr"] = ratio.iqr if ratio else 0.0
            entry[traffic] = {
                **found,
                "mean_loops": metrics["mean_loops"].median,
                "core_applications": metrics["core_applications"].median / tokens,
                "steps": metrics["steps"].median / tokens,
            }
        table.append(entry)
    return table


def _batching(config: Any, result: BenchmarkResult) -> list[dict[str, Any]]:
    """Continuous against lockstep: counts, speeds in the same round, and weight bytes a token that
    follow from the counts. Each step reads all weights but the core's, each application those."""
    tokens = result.settings["requests"] * result.settings["max_tokens"]
    found = []
    for name, metrics in result.arms.items():
        other = result.arms.get(f"{name}, lockstep")
        if other is None:
            continue
        entry: dict[str, Any] = {"name": name}
        for kind in ("second", "cpu_second"):
            pairs = zip(
                metrics[f"tokens_per_{kind}"].values,
                other[f"tokens_per_{kind}"].values,
                strict=True,
            )
            entry[f"{kind}_ratios"] = [a / b for a, b in pairs]
        for kind, arm in (("continuous", metrics), ("lockstep", other)):
            steps, applications = arm["steps"].median, arm["core_applications"].median
            entry[kind] = {"steps": steps, "core_applications": applications}
            for size, shape in (("own", config), (SCALED, PRESETS[SCALED])):
                cost = decode_cost(shape, core_resident=True)
                core = cost["core"].weight_bytes
                rest = cost.total().weight_bytes - core
                entry[kind][f"weight_bytes_{size}"] = (steps * rest + applications * core) / tokens
        found.append(entry)
    return found
