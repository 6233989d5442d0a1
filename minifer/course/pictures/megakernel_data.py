"""Blocks dealt to SMs, where the time of a step goes, and what others have reported of it."""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minifer.claims.speed_of_light import BASELINE_SHARE, TALK_SHARE, floor_seconds
from minifer.kernels.mega.isa import DecodeShape
from minifer.kernels.mega.schedule import chunks
from minifer.perf.devices import DEVICES
from minifer.perf.timeline.gantt import Panel
from minifer.perf.timeline.launches import launches
from minifer.perf.timeline.model import Task
from minifer.perf.timeline.tables import REPORTED

H100 = DEVICES["H100-SXM"]
FLOOR_US = floor_seconds(H100.memory_bandwidth) * 1e6  # Llama 3.2 1B: every weight once


@dataclass(frozen=True)
class Block:
    """A thread block on an SM: whose it is, and from when to when, in the time of a token."""

    request: str
    sm: int
    start: float
    end: float


@dataclass(frozen=True)
class Dealt:
    """A kernel's blocks on `num_sms` SMs. overhead: the part of each block that is no work."""

    blocks: tuple[Block, ...]
    num_sms: int
    overhead: float

    @property
    def end(self) -> float:
        """When the last block ends, and the next kernel may begin."""
        return max((block.end for block in self.blocks), default=0.0)

    @property
    def busy(self) -> float:
        """The share of the SMs' time, up to the end, that is work."""
        work = sum(block.end - block.start - self.overhead for block in self.blocks)
        return work / (self.num_sms * self.end) if self.blocks else 1.0


def attention(
    contexts: Mapping[str, int],
    num_sms: int,
    *,
    part: int | None = None,
    heads: int = 1,
    overhead: float = 0.0,
    longest_first: bool = False,
) -> Dealt:
    """A decode step's attention as one kernel: a block for each request, KV head and part.

    contexts: request → tokens. part: cut each context into as few parts as have at most so many
    tokens; None: do not cut. overhead: what a block costs besides its tokens, in tokens. Blocks go,
    in their order, to the SM that is free first. Raises `ValueError` for numbers below 1.
    """
    for name, number in (("num_sms", num_sms), ("heads", heads), ("part", part)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    work: list[tuple[str, float]] = []
    for request, tokens in contexts.items():
        pieces = 1 if part is None else -(-tokens // part)
        sizes = [stop - start for start, stop in chunks(tokens, pieces)]
        work += [(request, size + overhead) for size in sizes * heads]
    if longest_first:
        work.sort(key=lambda item: -item[1])
    return Dealt(tuple(_deal(work, num_sms)), num_sms, overhead)


def _deal(work: Sequence[tuple[str, float]], num_sms: int) -> list[Block]:
    free = [(0.0, sm) for sm in range(num_sms)]
    blocks: list[Block] = []
    for request, duration in work:
        start, sm = heapq.heappop(free)
        blocks.append(Block(request, sm, start, start + duration))
        heapq.heappush(free, (start + duration, sm))
    return blocks


@dataclass(frozen=True)
class Kernels:
    """A decode step as kernels, one after the other. names: of a layer, in order."""

    names: tuple[str, ...]
    launches: int
    weight_bytes: float


def kernels(shape: DecodeShape, *, fused: bool, context: int = 512) -> Kernels:
    """The kernels of `minifer.perf.timeline.launches` on an H100."""
    queues = launches(shape, H100.num_sms or 1, context, fused=fused)
    every = sorted((task for queue in queues for task in queue), key=lambda task: task.signal)
    layer = {task.signal: task.name for task in every if task.layer == 0}
    names = [name for name in layer.values() if name not in ("EMBED", "HEAD", "PICK")]
    if shape.layers == 1 and not fused:
        names.pop()  # the norm before the head
    weights = sum(task.weights for task in every)
    return Kernels(tuple(names), 1 + every[-1].signal, weights)


def with_early_kv(queues: Sequence[Sequence[Task]]) -> list[list[Task]]:
    """The same tasks, but the KV cache that attention reads may stream early, as weights may: it
    was written by earlier steps. (The new token's own key and value are too few to count.)"""
    return [[_early(task) if task.name == "ATTENTION" else task for task in q] for q in queues]


def _early(task: Task) -> Task:
    return task._replace(weights=task.weights + task.other, other=0.0)


@dataclass(frozen=True)
class StepTime:
    """A modelled step by what its SMs do, in µs of the whole chip; the parts add up to `total`.

    stream: bytes arrive. overhead: of blocks and instructions. tail: some SMs wait while others
    read. bubble: nobody reads.
    """

    name: str
    launches: int
    stream: float
    overhead: float
    tail: float
    bubble: float

    @property
    def total(self) -> float:
        return self.stream + self.overhead + self.tail + self.bubble

    @property
    def reading(self) -> float:
        """µs in which somebody reads."""
        return self.total - self.bubble


def step_time(panel: Panel) -> StepTime:
    """What a panel of `minifer.perf.timeline.decode` says, by kind."""
    timeline, shares = panel.timeline, panel.timeline.shares()
    microseconds = {kind: share * timeline.seconds * 1e6 for kind, share in shares.items()}
    return StepTime(timeline.name, int(panel.note.split()[0]), **microseconds)


@dataclass(frozen=True)
class Published:
    """A decode step of Llama 3.2 1B in bfloat16, batch 1, on an H100. kind: "limit", "reported" or
    "modelled". source: short, for a label."""

    name: str
    microseconds: float
    kind: str
    source: str = ""

    @property
    def share(self) -> float:
        """Of the data sheet's bandwidth, counting every weight once."""
        return FLOOR_US / self.microseconds


def published(modelled: Mapping[str, float]) -> list[Published]:
    """The floor, what others reported, and minifer's model (name → µs), from fast to slow."""
    blog = next(row["share"] for row in REPORTED if "share" in row)
    graph, megakernel = study("H100-SXM")
    rows = [
        Published("floor: 3.35 TB/s", FLOOR_US, "limit", "data sheet"),
        Published("megakernel, 78 %", FLOOR_US / blog, "reported", "blog, May 2025"),
        Published("the same, timed again", megakernel, "reported", "study, Sept. 2026"),
        Published("CUDA graph, PDL", graph, "reported", "study, Sept. 2026"),
        Published("megakernel, 72 %", FLOOR_US / TALK_SHARE, "reported", "talk, June 2026"),
        Published("engines, 50 % at most", FLOOR_US / BASELINE_SHARE, "reported", "blog, May 2025"),
    ]
    rows += [Published(name, us, "modelled", "minifer") for name, us in modelled.items()]
    return sorted(rows, key=lambda row: row.microseconds)


def study(device: str) -> tuple[float, float]:
    """µs a step, reported for one chip: a CUDA graph with PDL, and Hazy Research's megakernel."""
    timed = {(row["what"], row["device"]): row["us"] for row in REPORTED if "us" in row}
    return timed["CUDA graph, PDL", device], timed["Hazy's megakernel", device]


def measured_steps(results: Path) -> list[str]:
    """Sentences about decode steps that `minifer bench decode --ladder` has measured on a GPU, from
    the JSON files of a folder; none where there are no such files."""
    found = []
    for path in sorted(results.glob("*ladder*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.get("name") != "decode-ladder":
            continue
        machine, day = data["machine"]["accelerator"], data["started"][:10]
        for cell in data["cells"]:
            where = f"{cell['model']}, batch {cell['batch']}, context {cell['context']}"
            found += [f"{machine}, {day}: {where}, {_row(row)}" for row in _timed(cell["rows"])]
    return found


def _timed(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["status"] == "ok" and row["seconds"]]


def _row(row: Mapping[str, Any]) -> str:
    share = row["of_datasheet"]
    of = f", {share:.0%} of the data sheet's bandwidth" if share else ""
    return f"{row['rung']}: {row['seconds']['median'] * 1e6:,.0f} µs{of}"
