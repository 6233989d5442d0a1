"""What drawing a token costs: bytes counted and times measured, in one picture (lecture 8)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minifer.course.figures import SERIES, label_axes, new_figure
from minifer.course.pictures.sampling import make_request
from minifer.execution.sampler import Sampler, SampleRow
from minifer.perf.counted import count_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SIZES = tuple(2**n for n in (9, 11, 13, 15, 17))  # of vocabularies, small to large


@dataclass(frozen=True)
class SamplingCost:
    """Drawing one token from V logits. counted: bytes that its operations read and write.

    predicted: seconds that moving them takes at the machine's bandwidth. measured: seconds.
    """

    vocab_size: int
    counted: float
    predicted: float
    measured: float


def _batch(rows: int, vocab_size: int, params: Mapping[str, Any]) -> tuple[Tensor, list[SampleRow]]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, vocab_size, generator=generator)
    request = make_request(**params)
    return logits, [SampleRow(i, request, i) for i in range(rows)]


def bytes_a_logit(vocab_size: int, *, rows: int = 8, **params: Any) -> float:
    """Bytes that the engine's sampler moves for each logit, counted operation by operation."""
    logits, batch = _batch(rows, vocab_size, params)
    _, counted = count_bytes(lambda: Sampler()(logits, batch), (), ())
    return counted.activations / (rows * vocab_size)


def sampling_costs(
    bandwidth: float, *, sizes: Sequence[int] = SIZES, rows: int = 8, **params: Any
) -> list[SamplingCost]:
    """Count and time the engine's sampler, a row's share of `rows` rows; the fastest of five calls.

    bandwidth: bytes/s, which is a best value, too: neighbours can only slow a call down.
    """
    sampler, costs = Sampler(), []
    for size in sizes:
        logits, batch = _batch(rows, size, params)
        counted = bytes_a_logit(size, rows=rows, **params) * size  # warms up, too
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            sampler(logits, batch)
            times.append(time.perf_counter() - begin)
        measured = min(times) / rows
        costs.append(SamplingCost(size, counted, counted / bandwidth, measured))
    return costs


def costs_figure(costs: Mapping[str, Sequence[SamplingCost]], title: str) -> Figure:
    """Microseconds a token against the vocabulary: lines are predicted, marks measured."""
    figure = new_figure(7.5, 4.0)
    axes = figure.subplots()
    for (label, points), (colour, marker, line) in zip(costs.items(), SERIES, strict=False):
        sizes = [point.vocab_size for point in points]
        predicted = [1e6 * point.predicted for point in points]
        measured = [1e6 * point.measured for point in points]
        axes.plot(sizes, predicted, color=colour, linestyle=line, label=f"{label}: predicted")
        axes.plot(
            sizes, measured, color=colour, marker=marker, linestyle="", label=f"{label}: measured"
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    label_axes(axes, title=title, x="vocabulary size V", y="µs a token")
    return figure
