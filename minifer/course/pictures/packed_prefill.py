"""Prefill: prompts packed on one token axis, who may look at whom, and what a chunk costs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minifer.config import ModelConfig
from minifer.course.figures import (
    HATCHES,
    PALETTE,
    REQUEST_COLOURS,
    SERIES,
    finish,
    label_axes,
    log_axes,
    new_figure,
    patch,
)
from minifer.kv.step_input import StepInput
from minifer.perf.costs import ElementBytes, step_cost
from minifer.perf.devices import Device

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Part:
    """One request's share of a step: it computes `queries` tokens, and its context ends at `seen`.

    computed: tokens whose keys lie in the cache already.
    """

    request_id: str
    queries: int
    seen: int

    @property
    def computed(self) -> int:
        return self.seen - self.queries

    @property
    def pairs(self) -> int:
        """(query, key) pairs that causal attention needs: query i sees computed + i + 1 keys."""
        return self.queries * self.computed + self.queries * (self.queries + 1) // 2


@dataclass(frozen=True)
class ChunkCost:
    """A prompt prefilled in chunks, next to decoding requests. Seconds are the roofline's floor.

    ttft: of the whole prompt. slowest: the longest step, what the neighbours wait for.
    """

    chunk: int
    steps: int
    ttft: float
    slowest: float
    kv_bytes: float


def parts_of(step: StepInput) -> list[Part]:
    """The shares of a step of the engine, in batch order."""
    return [Part(e.request.request_id, e.num_new, e.end) for e in step.scheduled]


def chunk_cost(
    config: ModelConfig,
    device: Device,
    prompt: int,
    chunk: int,
    *,
    decoding: int = 0,
    context: int = 1,
    element: ElementBytes | None = None,
) -> ChunkCost:
    """Prefill `prompt` tokens in chunks, in steps that also decode for `decoding` requests.

    context: tokens of a decoding request. Raises `ValueError` for a chunk below 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    seconds, kv = [], 0.0
    for start in range(0, prompt, chunk):
        end = min(prompt, start + chunk)
        batch = [(end - start, end)] + [(1, context)] * decoding
        rows = decoding + (end == prompt)
        total = step_cost(config, batch, num_logits=rows, element=element).total()
        seconds.append(device.seconds(total.flops, total.bytes))
        kv += step_cost(config, batch[:1], num_logits=0, element=element).total().kv_bytes
    return ChunkCost(chunk, len(seconds), sum(seconds), max(seconds), kv)


def random_model(config: ModelConfig) -> Any:
    """A transformer of these shapes with random float32 weights: good for its times only."""
    import torch

    from minifer.models.registry import build_model

    model = build_model(config, torch.float32)
    model.init_weights(0)
    return model


def measure_prefill(
    model: Any, config: ModelConfig, lengths: Sequence[int], rounds: int = 3
) -> dict[int, float]:
    """Seconds of one forward pass over n tokens, for each n; the best of some rounds."""
    import torch

    from minifer.execution.backend import TorchBackend
    from minifer.execution.forward_batch import ForwardBatch
    from minifer.execution.kv_storage import KVStorage

    backend, block = TorchBackend(), 16
    blocks = -(-max(lengths) // block)
    kv = KVStorage(
        config.num_kv_slots, blocks, block, config.num_kv_heads, config.head_dim, torch.float32
    )
    best: dict[int, float] = {}
    for _ in range(rounds):
        for n in lengths:
            rows = list(range(n))
            table = [list(range(blocks))]
            batch = ForwardBatch.build([0] * n, rows, rows, [0, n], [n], table, [n - 1], block)
            with torch.inference_mode():
                begin = time.perf_counter()
                hidden = model(batch, kv, backend)
                model.logits(hidden[batch.logits_rows], backend)
                taken = time.perf_counter() - begin
            best[n] = min(taken, best.get(n, taken))
    return best


def packing_figure(lengths: Mapping[str, int], *, title: str) -> Figure:
    """Above, a rectangle padded to the longest prompt; below, one packed row."""
    from matplotlib.patches import Rectangle

    longest, total = max(lengths.values()), sum(lengths.values())
    figure = new_figure(9.0, 3.6)
    axes = figure.subplots()

    def box(left: int, row: float, width: int, face: str, hatch: str, text: str) -> None:
        axes.add_patch(
            Rectangle((left, row), width, 0.8, facecolor=face, hatch=hatch, edgecolor="white")
        )
        axes.text(left + width / 2, row + 0.4, text, ha="center", va="center", fontsize=9)

    left = 0
    for row, (name, length) in enumerate(lengths.items()):
        colour = REQUEST_COLOURS[row]
        box(0, row, length, colour, "", f"{name}: {length}")
        if length < longest:
            box(length, row, longest - length, PALETTE["waiting"], HATCHES["waiting"], "")
        box(left, len(lengths) + 0.6, length, colour, "", f"{name}: {length}")
        left += length
    axes.set_xlim(0, max(total, longest))
    axes.set_ylim(len(lengths) + 1.6, -0.2)
    axes.set_yticks([(len(lengths) - 1) / 2 + 0.4, len(lengths) + 1.0], ["padded", "packed"])
    axes.set_xlabel("rows of the token axis (tokens)")
    legend = [patch("padding: computed, then thrown away", PALETTE["waiting"], HATCHES["waiting"])]
    finish(figure, axes, title, legend)
    return figure


def mask_figure(parts: Sequence[Part], *, title: str) -> Figure:
    """Queries of a step (rows) and all contexts (columns): filled where a query may look."""
    from matplotlib.patches import Rectangle

    figure = new_figure(9.0, 1.9 + 3.4 * min(1.0, sum(p.queries for p in parts) / 40))
    axes = figure.subplots()
    names = sorted({part.request_id for part in parts})
    colours = {name: REQUEST_COLOURS[_place(name, i)] for i, name in enumerate(names)}
    top = left = 0
    for part in parts:
        colour = colours[part.request_id]
        for query in range(part.queries):
            row = top + query
            if part.computed:
                axes.add_patch(
                    Rectangle(
                        (left, row), part.computed, 1, facecolor=PALETTE["cached"],
                        hatch=HATCHES["cached"], edgecolor="white", linewidth=0,
                    )
                )  # fmt: skip
            axes.add_patch(
                Rectangle((left + part.computed, row), query + 1, 1, facecolor=colour, linewidth=0)
            )
        axes.add_patch(Rectangle((left, top), part.seen, part.queries, fill=False, clip_on=False))
        axes.text(left + part.seen / 2, top - 0.4, part.request_id, ha="center", fontsize=10)
        top, left = top + part.queries, left + part.seen
    axes.set_xlim(0, left)
    axes.set_ylim(top, -max(1.5, top * 0.06))
    axes.set_xlabel("keys: the contexts, one after the other (tokens)")
    axes.set_ylabel("queries of this step (tokens)")
    legend = []
    if any(part.computed for part in parts):
        cached = PALETTE["cached"], HATCHES["cached"], "white"
        legend.append(patch("key in the cache already", *cached))
    legend += [patch(f"key of {name}, this step", colours[name]) for name in names]
    finish(figure, axes, title, legend)
    return figure


def chunk_figure(costs: Sequence[ChunkCost], *, title: str) -> Figure:
    """TTFT of the prompt and the slowest step of its neighbours, against the chunk size."""
    figure = new_figure(8.0, 4.0)
    axes = figure.subplots()
    chunks = [cost.chunk for cost in costs]
    series = {
        "TTFT of the long prompt": [cost.ttft * 1e3 for cost in costs],
        "longest step: its neighbours' ITL": [cost.slowest * 1e3 for cost in costs],
    }
    for (colour, marker, line), (label, values) in zip(SERIES, series.items(), strict=False):
        axes.plot(chunks, values, color=colour, marker=marker, linestyle=line, label=label)
    log_axes(axes, chunks)
    label_axes(axes, title=title, x="chunk size (tokens)", y="time, modelled (ms)")
    return figure


def prefill_figure(
    predicted: Mapping[int, float], measured: Mapping[int, float], *, title: str
) -> Figure:
    """Predicted floor and measured time of one prefill step, against its tokens."""
    figure = new_figure(8.0, 4.0)
    axes = figure.subplots()
    for (colour, marker, line), (label, values) in zip(
        SERIES, (("measured", measured), ("predicted floor", predicted)), strict=False
    ):
        milliseconds = [seconds * 1e3 for seconds in values.values()]
        axes.plot(
            list(values), milliseconds, color=colour, marker=marker, linestyle=line, label=label
        )
    log_axes(axes, list(measured))
    label_axes(axes, title=title, x="tokens in the step", y="time of the step (ms)")
    return figure


def _place(name: str, index: int) -> int:
    """Which colour: A, B and C have their own everywhere in the book."""
    return "ABC".index(name) if name in ("A", "B", "C") else index % len(REQUEST_COLOURS)
