"""What the pictures of rooflines draw, as plain values: costs, devices and measured steps.

Nothing stands above min(peak, intensity · bandwidth) (Williams, Waterman and Patterson 2009,
CACM 52(4)).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minifer.config import ModelConfig
from minifer.events import Event
from minifer.perf.costs import (
    ElementBytes,
    OpCost,
    decode_cost,
    kv_bytes_per_token,
    num_parameters,
    step_cost,
)
from minifer.perf.devices import Device

if TYPE_CHECKING:
    from minifer.perf.steps import StepGroup


@dataclass(frozen=True)
class Point:
    """A piece of work under a roof. rate: FLOP/s it reaches, or could. kind: a key of `PALETTE`."""

    name: str
    intensity: float
    rate: float
    kind: str


def attainable(device: Device, intensity: float) -> float:
    """FLOP/s a machine allows at an intensity: the roof."""
    return min(device.peak_flops, intensity * device.memory_bandwidth)


def operation_points(ops: Iterable[OpCost], device: Device, kind: str) -> list[Point]:
    """Operations on the roof; what moves no bytes, or computes nothing, has no place there."""
    return [
        Point(op.name, op.intensity, attainable(device, op.intensity), kind)
        for op in ops
        if op.flops and op.bytes
    ]


def floor_intensity(cost: OpCost) -> float:
    """FLOPs a byte of a step of which only weights and KV come from memory."""
    return cost.flops / (cost.weight_bytes + cost.kv_bytes)


def step_points(groups: Iterable[StepGroup]) -> list[Point]:
    """Measured steps: the FLOP/s of the fastest forward pass."""
    return [Point(g.label, floor_intensity(g.cost), g.cost.flops / g.best, g.kind) for g in groups]


def points_of(rows: Iterable[Mapping[str, Any]]) -> list[Point]:
    """Whole steps that `minifer bench decode` or `prefill` measured, from `details.steps` of their
    JSON; a row without FLOPs (a loop model, a mixed workload, drafts) has no place."""
    return [
        Point(row["work"], row["intensity"], row["flops_per_second"], row["kind"])
        for row in rows
        if "intensity" in row and "flops_per_second" in row
    ]


@dataclass(frozen=True)
class BatchRow:
    """Decode at one batch size, modelled. seconds: of a step. fits: weights and KV, on one chip."""

    batch: int
    seconds: float
    tokens_per_second: float
    joules_per_token: float
    intensity: float
    fits: bool


def batch_rows(
    config: ModelConfig,
    device: Device,
    batches: Iterable[int],
    context: int,
    element: ElementBytes | None = None,
) -> list[BatchRow]:
    """The roofline's floor of a decode step by batch size; joules at the chip's full power."""
    e = element if element is not None else ElementBytes()
    rows = []
    for batch in batches:
        cost = decode_cost(config, batch, context, element=e).total()
        seconds = device.seconds(cost.flops, cost.weight_bytes + cost.kv_bytes)
        held = num_parameters(config) * e.weight
        held += batch * context * kv_bytes_per_token(config, e.kv)
        rows.append(
            BatchRow(
                batch,
                seconds,
                batch / seconds,
                device.power_watts * seconds / batch,
                floor_intensity(cost),
                held <= device.memory_bytes,
            )
        )
    return rows


@dataclass(frozen=True)
class EngineStep:
    """A step of an event stream as the cost model reads it. limit: "memory" or "arithmetic"."""

    step: int
    kind: str
    batch: tuple[tuple[int, int], ...]
    cost: OpCost
    limit: str


def engine_steps(
    events: Iterable[Event], config: ModelConfig, device: Device, element: ElementBytes
) -> list[EngineStep]:
    """The steps of an event stream: `request.scheduled` says who computed which positions."""
    work: dict[int, list[tuple[int, int]]] = {}
    draws: dict[int, int] = {}
    for event in events:
        if event.name == "request.scheduled" and event.token_range:
            first, last = event.token_range
            work.setdefault(event.step, []).append((last - first, last))
        elif event.name == "token.sampled":
            draws[event.step] = draws.get(event.step, 0) + 1
    out = []
    for step, batch in sorted(work.items()):
        cost = step_cost(config, batch, num_logits=draws.get(step, 0), element=element).total()
        kind = "decode" if all(query == 1 for query, _ in batch) else "prefill"
        limit = "arithmetic" if floor_intensity(cost) > device.ridge_point else "memory"
        out.append(EngineStep(step, kind, tuple(batch), cost, limit))
    return out


def powers_of_two(first: int, last: int) -> list[int]:
    """first, 2 · first, … up to last."""
    return [first * 2**i for i in range(int(math.log2(last / first)) + 1)]
