"""`minifer bench limit`: what this machine can do, what the engine does, and the bytes between.

In every round the two ceilings (memory read, matrix product) and every piece of work take one turn
each, so a neighbour that slows one of them slows all. A ceiling is the best of all rounds.

Predicted is the roofline's floor: no less than the step's FLOPs at the measured rate of a matrix
product, no less than its weight and KV bytes at the measured bandwidth. Measured is the engine's
own time of the forward pass. The ratio is reported, and is no pass or fail: what a step costs
beyond the floor (small operations, copies of gathered keys, a library's slow shapes) is what the
lectures are about. A ratio below 1 is no miracle either. It says that weights came from a cache,
which is faster than memory, or that the ceiling was measured while neighbours were busier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from minifer.config import ModelConfig
from minifer.perf import limit
from minifer.perf.bench import BenchmarkResult, run_benchmark
from minifer.perf.costs import ElementBytes, OpCost, num_parameters, step_cost
from minifer.perf.counted import CountedStep, padded_kv_read
from minifer.perf.devices import DEVICES, Device
from minifer.perf.steps import (
    StepGroup,
    StepRecord,
    Steps,
    decoding,
    element_bytes,
    group,
    prefilling,
)
from minifer.weights.resolve import LoadedModel

READ, PRODUCT = "memory read", "matrix product"
_CEILING_SECONDS = 0.2  # of a turn


@dataclass(frozen=True)
class Work:
    """What the engine is asked: prompts of `tokens` in one step, or `batch` requests of `context`.

    Raises `ValueError` for a batch below 1, a prompt below 1, or a decode's context below 2.
    """

    kind: str  # "prefill" or "decode"
    batch: int
    context: int

    def __post_init__(self) -> None:
        least = 1 if self.kind == "prefill" else 2
        if self.batch < 1 or self.context < least:
            raise ValueError(f"{self} must have a batch from 1 and a context from {least}")

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return [(self.context if self.kind == "prefill" else 1, self.context)] * self.batch

    def __str__(self) -> str:
        if self.kind == "prefill":
            return f"prefill {self.context}"
        return f"decode {self.batch} × {self.context}"


@dataclass(frozen=True)
class ByteCheck:
    """One forward pass counted while it ran, beside what `perf.costs` says.

    weights, kv: predicted; seen: counted. padded: KV bytes beyond the prediction that padding to
    the longest context explains. unexplained: what is left, 0 for `TorchBackend`.
    """

    work: str
    weights: int
    weights_seen: int
    kv: int
    kv_seen: int
    padded: int
    activations: int
    activations_seen: int

    @property
    def unexplained(self) -> int:
        return self.weights_seen - self.weights + self.kv_seen - self.kv - self.padded


@dataclass(frozen=True)
class LimitReport:
    """here: this machine. groups: the engine's steps, in the order asked for. operations: of the
    first decode and the last prefill, for the roofline. result: everything, ready for JSON."""

    here: Device
    groups: tuple[StepGroup, ...]
    operations: Mapping[str, tuple[OpCost, ...]]
    checks: tuple[ByteCheck, ...]
    result: BenchmarkResult


def measure_limit(
    loaded: LoadedModel,
    work: Sequence[Work],
    *,
    runs: int = 3,
    steps: int = 4,
    settings: Mapping[str, Any] | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> LimitReport:
    """Measure the ceilings and the engine's steps in turns, then count one step of each work.

    work: at least one piece. runs: rounds that count, after one that does not. steps: the engine
    takes in each turn. settings: recorded. note: told what happens next.
    """
    if not work:
        raise ValueError("work must hold at least one piece, got none")
    parameter = next(loaded.model.parameters())
    device, dtype = str(parameter.device), str(parameter.dtype).removeprefix("torch.")
    here = limit.described(dtype, device, torch.get_num_threads())
    taken: dict[str, list[StepRecord]] = {}
    sources: dict[str, Steps] = {}
    arms: dict[str, Callable[[], Mapping[str, float]]] = {
        READ: partial(_ceiling, limit.reader(limit.buffer_bytes(here), device), "bytes_per_second"),
        PRODUCT: partial(
            _ceiling,
            lambda s: limit.product_rate(here, dtype=dtype, seconds=s, device=device),
            "flops_per_second",
        ),
    }
    for piece in work:
        note(f"preparing {piece}")
        taken[str(piece)] = []
        sources[str(piece)] = source = _source(loaded, piece, (runs + 1) * steps + 1)
        arms[str(piece)] = partial(_turn, source, steps, taken[str(piece)])
    note(f"{runs} rounds of {len(arms)} turns")
    result = run_benchmark(
        "limit",
        arms,
        runs=runs,
        units={
            "bytes_per_second": "B/s",
            "flops_per_second": "FLOP/s",
            "whole_seconds": "s",
        },
        settings=dict(settings or {}),
    )
    here = replace(
        here,
        memory_bandwidth=result.arms[READ]["bytes_per_second"].max,
        peak_flops=result.arms[PRODUCT]["flops_per_second"].max,
    )
    # The round that warms up does not count.
    groups = tuple(group(loaded, name, records[steps:]) for name, records in taken.items())
    checks = tuple(check_bytes(loaded, name, s.count()) for name, s in sources.items())
    operations = {
        str(p): step_cost(loaded.config, p.pairs, element=element_bytes(loaded)).ops
        for p in _shown(work)
    }
    details = {
        "here": _plain(asdict(here)),
        "steps": [_row(g, here) for g in groups],
        "bytes": [{**asdict(c), "unexplained": c.unexplained} for c in checks],
        "devices": [_plain(asdict(d)) for d in DEVICES.values()],
    }
    result = replace(result, ratios={}, details=details)
    return LimitReport(here, groups, operations, checks, result)


def _ceiling(measure: Callable[[float], float], metric: str) -> dict[str, float]:
    return {metric: measure(_CEILING_SECONDS)}


def _turn(source: Steps, steps: int, kept: list[StepRecord]) -> dict[str, float]:
    """Steps of one turn; "seconds" is the forward pass of the fastest."""
    records = source.take(steps)
    kept += records
    return {
        "seconds": min(r.forward for r in records),
        "whole_seconds": min(r.whole for r in records),
    }


def _source(loaded: LoadedModel, piece: Work, steps: int) -> Steps:
    if piece.kind == "prefill":
        return prefilling(loaded, piece.context)
    return decoding(loaded, piece.batch, piece.context, steps=steps)


def _shown(work: Sequence[Work]) -> list[Work]:
    """Whose operations the roofline shows: the first decode and the largest prefill."""
    decode = [p for p in work if p.kind == "decode"][:1]
    prefill = sorted((p for p in work if p.kind == "prefill"), key=lambda p: p.context)[-1:]
    return decode + prefill


def check_bytes(loaded: LoadedModel, name: str, step: CountedStep) -> ByteCheck:
    """What a step touched beside what `perf.costs` says of it. name: of the work."""
    element = element_bytes(loaded)
    cost = step_cost(loaded.config, step.batch, num_logits=step.num_logits, element=element)
    total = cost.total()
    read = total.kv_bytes - cost["kv_write"].kv_bytes
    return ByteCheck(
        name,
        int(total.weight_bytes),
        step.seen.weights,
        int(total.kv_bytes),
        step.seen.kv,
        int(padded_kv_read(loaded.config, step.batch, element.kv) - read),
        int(total.activation_bytes),
        step.seen.activations,
    )


def _row(steps: StepGroup, here: Device) -> dict[str, Any]:
    floor = steps.floor(here)
    return {
        "work": steps.label,
        "num_tokens": steps.num_tokens,
        "context": steps.context,
        "flops": steps.cost.flops,
        "weight_bytes": steps.cost.weight_bytes,
        "kv_bytes": steps.cost.kv_bytes,
        "intensity": steps.cost.flops / (steps.cost.weight_bytes + steps.cost.kv_bytes),
        "predicted_seconds": floor,
        "measured_seconds": steps.best,
        "measured_median_seconds": steps.median,
        "ratio": steps.best / floor,
        "tokens_per_second": steps.num_tokens / steps.best,
    }


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON has no word for (an unknown power is NaN) becomes null."""
    return {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in values.items()
    }


def table(report: LimitReport) -> str:
    """For people: predicted and measured, then the bytes."""
    rows = [("work", "FLOP/B", "predicted", "measured", "ratio", "tokens/s", "limit")]
    for steps in report.groups:
        row = _row(steps, report.here)
        limited = "arithmetic" if row["intensity"] > report.here.ridge_point else "memory"
        rows.append(
            (
                steps.label,
                f"{row['intensity']:.1f}",
                f"{row['predicted_seconds'] * 1e3:.2f} ms",
                f"{row['measured_seconds'] * 1e3:.2f} ms",
                f"{row['ratio']:.2f}",
                f"{row['tokens_per_second']:,.0f}",
                limited,
            )
        )
    here = report.here
    lines = [
        f"{here.name}: reads {here.memory_bandwidth / 1e9:.1f} GB/s, "
        f"multiplies {here.peak_flops / 1e9:,.0f} GFLOP/s ({here.note.partition(';')[0]}), "
        f"ridge at {here.ridge_point:.1f} FLOPs a byte",
        "",
        *aligned(rows),
        "",
        "predicted: the roofline's floor; measured: the engine's fastest forward pass",
    ]
    below = [s.label for s in report.groups if s.best < s.floor(here)]
    if below:
        lines.append(
            f"faster than the floor: {', '.join(below)}; a cache held the weights, or the ceilings "
            "were measured while the machine was busier"
        )
    counted = [("work", "weights", "KV", "padding", "unexplained", "activations")]
    for c in report.checks:
        counted.append(
            (
                c.work,
                f"{c.weights_seen:,}",
                f"{c.kv_seen:,}",
                f"{c.padded:,}",
                f"{c.unexplained:,}",
                f"{c.activations_seen / c.activations:.1f}× the model's",
            )
        )
    lines += ["", "bytes a step touched, counted while it ran:", "", *aligned(counted)]
    return "\n".join(lines)


def device_table(config: ModelConfig, here: Device, dtype: str = "float32") -> str:
    """Every chip of `DEVICES` in 16 bits, and this machine in `dtype`: one token at best.

    Tokens/s and joules are of one request with an empty context: all weights are read once a
    token. Where the model does not fit one chip, as many as hold it share the reading. The joules
    are full power times the floor of the time: a chip that draws less needs fewer, one that takes
    longer needs more.
    """
    rows = [
        ("chip", "TFLOP/s", "TB/s", "FLOP/B", "GB", "W", "chips", "tokens/s", "J/token", "source")
    ]
    for d in (*DEVICES.values(), here):
        size = 4.0 if d is here and dtype == "float32" else 2.0
        element = ElementBytes(size, size, size)
        cost = step_cost(config, [(1, 1)], element=element).total()
        chips = max(1, math.ceil(num_parameters(config) * size / d.memory_bytes))
        seconds = d.seconds(cost.flops, cost.weight_bytes + cost.kv_bytes) / chips
        joules = d.power_watts * chips * seconds
        rows.append(
            (
                d.name,
                f"{d.peak_flops / 1e12:,.3g}",
                f"{d.memory_bandwidth / 1e12:,.3g}",
                f"{d.ridge_point:.1f}",
                f"{d.memory_bytes / 1e9:,.3g}",
                "?" if math.isnan(d.power_watts) else f"{d.power_watts:,.0f}",
                str(chips),
                f"{1 / seconds:,.0f}",
                "?" if math.isnan(joules) else f"{joules:.2g}",
                f"{d.source}, {d.date}",
            )
        )
    return "\n".join(aligned(rows))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width; the first and the last to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(width) if i in (0, last) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
