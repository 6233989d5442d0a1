"""Decode: what a step reads, what batching shares, what launches cost, who is busy."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minifer.config import ModelConfig
from minifer.course.figures import (
    HATCHES,
    PALETTE,
    SERIES,
    finish,
    label_axes,
    log_axes,
    new_figure,
    patch,
)
from minifer.perf.costs import ElementBytes, decode_cost
from minifer.perf.devices import Device

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from minifer.execution.kv_storage import KVStorage

FLOAT32 = ElementBytes(4, 4, 4)


@dataclass(frozen=True)
class DecodePoint:
    """One batch size. seconds: of a step, so the time between a request's tokens (TPOT).

    weight_bytes, kv_bytes: what the step reads of either.
    """

    batch: int
    seconds: float
    weight_bytes: float
    kv_bytes: float

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together."""
        return self.batch / self.seconds


@dataclass(frozen=True)
class Launches:
    """A step as kernels in a row. busy: seconds of work each. gap: seconds a launch costs."""

    kernels: int
    busy: float
    gap: float

    @property
    def seconds(self) -> float:
        return self.kernels * (self.busy + self.gap)

    @property
    def share(self) -> float:
        """The part of the step in which the memory is read: the share of the speed of light."""
        return self.busy / (self.busy + self.gap)


def decode_points(
    config: ModelConfig,
    device: Device,
    batches: Sequence[int],
    context: int,
    element: ElementBytes | None = None,
) -> list[DecodePoint]:
    """The roofline's floor of a decode step, for each batch size."""
    points = []
    for batch in batches:
        cost = decode_cost(config, batch, context, element=element).total()
        seconds = device.seconds(cost.flops, cost.bytes)
        points.append(DecodePoint(batch, seconds, cost.weight_bytes, cost.kv_bytes))
    return points


def measure_decode(
    model: Any, config: ModelConfig, batches: Sequence[int], context: int, rounds: int = 3
) -> list[DecodePoint]:
    """A decode step of the engine's own model and attention, timed; the best of some rounds."""
    import torch

    from minifer.execution.backend import TorchBackend
    from minifer.execution.forward_batch import ForwardBatch
    from minifer.execution.kv_storage import KVStorage

    backend, P = TorchBackend(), 16
    width = -(-context // P)
    heads, C = config.num_kv_heads, config.head_dim
    kv = KVStorage(config.num_kv_slots, width * max(batches), P, heads, C, torch.float32)
    for tensor in (*kv.keys, *kv.values):
        tensor.normal_()
    best: dict[int, float] = {}
    for _ in range(rounds):
        for B in batches:
            tables = [list(range(b * width, (b + 1) * width)) for b in range(B)]
            slots = [table[-1] * P + (context - 1) % P for table in tables]
            rows = list(range(B))
            batch = ForwardBatch.build(
                [0] * B, [context - 1] * B, slots, [*rows, B], [context] * B, tables, rows, P
            )
            with torch.inference_mode():
                begin = time.perf_counter()
                model.logits(model(batch, kv, backend), backend)
                taken = time.perf_counter() - begin
            best[B] = min(taken, best.get(B, taken))
    predicted = {B: decode_cost(config, B, context, element=FLOAT32).total() for B in batches}
    return [DecodePoint(B, best[B], c.weight_bytes, c.kv_bytes) for B, c in predicted.items()]


def scattered_context(
    tables: Sequence[Sequence[int]], lengths: Sequence[int], shape: tuple[int, int, int, int]
) -> tuple[Tensor, Tensor]:
    """Key and value cache of shape [N, P, K, C]: random where a context lies, NaN elsewhere."""
    import torch

    generator = torch.Generator().manual_seed(7)
    P = shape[1]
    keys, values = (torch.full(shape, torch.nan) for _ in range(2))
    for table, length in zip(tables, lengths, strict=True):
        for p in range(length):
            for cache in (keys, values):
                place = cache[table[p // P], p % P]
                place.copy_(torch.randn(place.shape, generator=generator))
    return keys, values


def full_cache(config: ModelConfig, num_blocks: int, block_size: int) -> KVStorage:
    """A KV cache of random numbers, the same at every call."""
    import torch

    from minifer.execution.kv_storage import KVStorage

    heads, C = config.num_kv_heads, config.head_dim
    kv = KVStorage(config.num_kv_slots, num_blocks, block_size, heads, C, torch.float32)
    for tensor in (*kv.keys, *kv.values):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    return kv


def launches(
    config: ModelConfig, device: Device, batch: int, context: int, per_layer: int, gap: float
) -> Launches:
    """A decode step cut evenly into `per_layer` kernels a layer and one for the head."""
    kernels = config.num_layers * per_layer + 1
    floor = decode_points(config, device, [batch], context)[0].seconds
    return Launches(kernels, floor / kernels, gap)


def busy_sms(programs: int, num_sms: int) -> float:
    """The share of SM time in use when equal programs run in waves: the tail effect.

    Programs that do not fill the last wave leave SMs idle until it ends.
    """
    return programs / (math.ceil(programs / num_sms) * num_sms)


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Tokens a verification step yields when each draft is accepted with one probability.

    1 + a + … + a^k: the accepted drafts and one more of the model's own (Leviathan, Kalman and
    Matias 2022, https://arxiv.org/abs/2211.17192, equation 1).
    """
    return sum(acceptance**i for i in range(drafts + 1))


def bytes_figure(points: Sequence[DecodePoint], *, title: str) -> Figure:
    """The bytes of a step by kind, as shares; above each bar what a token costs."""
    figure = new_figure(8.0, 3.8)
    axes = figure.subplots()
    places = range(len(points))
    totals = [point.weight_bytes + point.kv_bytes for point in points]
    weights = [100 * p.weight_bytes / total for p, total in zip(points, totals, strict=True)]
    kv = [100 - share for share in weights]
    axes.bar(places, weights, color=PALETTE["free"], edgecolor="black", linewidth=0.5)
    axes.bar(places, kv, bottom=weights, color=PALETTE["cached"], edgecolor="black", linewidth=0.5)
    for place, (point, total) in enumerate(zip(points, totals, strict=True)):
        each = f"{total / point.batch / 1e9:.2f} GB a token"
        axes.text(place, 102, each, ha="center", fontsize=9)
    axes.set_ylim(0, 110)
    axes.set_xticks(places, [str(point.batch) for point in points])
    axes.set_xlabel("requests in the step")
    axes.set_ylabel("bytes the step reads (%)")
    legend = [
        patch("weights, shared by the batch", PALETTE["free"]),
        patch("keys and values, each request's own", PALETTE["cached"]),
    ]
    finish(figure, axes, title, legend)
    return figure


def pareto_figure(series: Mapping[str, Sequence[DecodePoint]], *, title: str) -> Figure:
    """Throughput against latency: a point a batch size, a line a context length."""
    figure = new_figure(8.0, 4.2)
    axes = figure.subplots()
    for (colour, marker, line), (label, points) in zip(SERIES, series.items(), strict=False):
        latency = [point.seconds * 1e3 for point in points]
        throughput = [point.tokens_per_second for point in points]
        axes.plot(latency, throughput, color=colour, marker=marker, linestyle=line, label=label)
        ends = (points[0], points[-1]) if colour == SERIES[0][0] else (points[-1],)
        for point in ends:
            axes.annotate(
                f"B = {point.batch}",
                (point.seconds * 1e3, point.tokens_per_second),
                textcoords="offset points",
                xytext=(-34, -4) if point is points[0] else (6, -12),
                fontsize=9,
            )
    log_axes(axes, (4, 8, 16, 32, 64, 128))
    axes.set_xlim(left=3.2)
    label_axes(axes, title=title, x="time per output token (ms)", y="tokens a second, all requests")
    return figure


def decode_figure(
    predicted: Sequence[DecodePoint], measured: Sequence[DecodePoint], *, title: str
) -> Figure:
    """Predicted floor and measured time of a decode step, against its requests."""
    figure = new_figure(8.0, 4.0)
    axes = figure.subplots()
    both = {"measured": measured, "predicted floor": predicted}
    for (colour, marker, line), (label, points) in zip(SERIES, both.items(), strict=False):
        axes.plot(
            [point.batch for point in points],
            [point.seconds * 1e3 for point in points],
            color=colour, marker=marker, linestyle=line, label=label,
        )  # fmt: skip
    log_axes(axes, [point.batch for point in measured])
    label_axes(axes, title=title, x="requests in the step", y="time of the step (ms)")
    return figure


def launch_figure(rows: Mapping[str, Launches], *, title: str, shown: int = 14) -> Figure:
    """The first kernels of a step, in a row a case: work, and the gaps before it."""
    figure = new_figure(9.0, 1.6 + 0.6 * len(rows))
    axes = figure.subplots()
    for row, step in enumerate(rows.values()):
        for kernel in range(shown):
            left = kernel * (step.busy + step.gap) * 1e6
            gap, busy = step.gap * 1e6, step.busy * 1e6
            axes.barh(row, gap, 0.6, left, color=PALETTE["waiting"], hatch=HATCHES["waiting"])
            axes.barh(
                row, busy, 0.6, left + gap, color=PALETTE["decode"], edgecolor="white", linewidth=1
            )
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlabel("time since the step began (µs, modelled)")
    legend = [
        patch("a kernel reads memory", PALETTE["decode"]),
        patch("launch: nothing is read", PALETTE["waiting"], HATCHES["waiting"]),
    ]
    finish(figure, axes, title, legend)
    return figure


def split_figure(num_sms: int, programs: int, splits: Sequence[int], *, title: str) -> Figure:
    """The share of a GPU's SMs that work, against the parts each context is cut into."""
    figure = new_figure(8.0, 3.6)
    axes = figure.subplots()
    shares = [busy_sms(programs * parts, num_sms) for parts in splits]
    axes.bar(range(len(splits)), [100 * share for share in shares], color=PALETTE["decode"])
    for place, share in enumerate(shares):
        axes.text(place, 100 * share + 1, f"{share:.0%}", ha="center", fontsize=9)
    axes.set_ylim(0, 110)
    axes.set_xticks(range(len(splits)), [str(parts) for parts in splits])
    label_axes(axes, title=title, x="parts of a context", y="busy SM time (%)")
    return figure
