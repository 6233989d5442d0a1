"""Lecture 02 as plain values: what naive and cached generation compute, and what it costs.

A *pass* is (query, context): the tokens one forward pass computes, and the length of the sequence
with them, as in `minifer.perf.costs`. `prefill_decode.py` draws what is computed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from minifer.config import ModelConfig
from minifer.course.figure_data import timeline_data
from minifer.events import Event
from minifer.perf.costs import ElementBytes, StepCost, step_cost
from minifer.perf.devices import Device

Pass = tuple[int, int]
Layout = Literal["half", "interleaved"]

# The shapes of Llama 3.1 8B (https://arxiv.org/abs/2407.21783, table 3).
LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=131_072,
)


@dataclass(frozen=True)
class Cell:
    """One position in one pass. kind: "first" computed, computed "again", or "read" from the cache.

    given: is it a token of the prompt?
    """

    step: int
    position: int
    kind: Literal["first", "again", "read"]
    given: bool


def computed_cells(passes: Sequence[Pass], prompt: int) -> list[Cell]:
    """Every (pass, position): what the pass does about the token there, in order.

    prompt: how many of the tokens were given. Raises `ValueError` for a pass with not
    1 <= query <= context.
    """
    done: set[int] = set()
    cells = []
    for step, (query, context) in enumerate(passes, start=1):
        if not 1 <= query <= context:
            raise ValueError(
                f"passes must be (query, context) with 1 <= query <= context, got {passes}"
            )
        for position in range(context):
            kind: Literal["first", "again", "read"] = "read"
            if position >= context - query:
                kind = "again" if position in done else "first"
                done.add(position)
            cells.append(Cell(step, position, kind, position < prompt))
    return cells


def chunk_rows(chunks: Sequence[int]) -> list[list[str]]:
    """What each query of a prompt cut into chunks does with each key, a row a query.

    "cached": seen, from an earlier chunk; "new": seen, of its own chunk; "hidden": later than the
    query; "absent": not yet computed at all.
    """
    total, start, rows = sum(chunks), 0, []
    for size in chunks:
        end = start + size
        for query in range(start, end):
            row = ["cached"] * start + ["new"] * (query - start + 1)
            rows.append(row + ["hidden"] * (end - query - 1) + ["absent"] * (total - end))
        start = end
    return rows


def rope_pairs(head_dim: int, layout: Layout) -> list[tuple[int, int]]:
    """The dimensions of a head that turn together, pair 0 (the fastest) first."""
    half = head_dim // 2
    if layout == "half":
        return [(i, i + half) for i in range(half)]
    return [(2 * i, 2 * i + 1) for i in range(half)]


def step_passes(events: Iterable[Event]) -> list[list[tuple[str, str, int, int]]]:
    """What each engine step computed: (request, "prefill" or "decode", query, context)."""
    steps: dict[int, list[tuple[str, str, int, int]]] = {}
    for span in timeline_data(events):
        entries = steps.setdefault(span.step, [])
        if span.tokens is not None:
            start, end = span.tokens
            entries.append((span.request_id, span.kind, end - start, end))
    return [steps[number] for number in sorted(steps)]


def token_times(events: Iterable[Event]) -> dict[str, tuple[float, list[float]]]:
    """request → (when it arrived, when each of its tokens was drawn), seconds of the engine."""
    times: dict[str, tuple[float, list[float]]] = {}
    for event in events:
        if event.name == "request.admitted":
            times[event.request_id or ""] = (event.time, [])
        elif event.name == "token.sampled":
            times[event.request_id or ""][1].append(event.time)
    return times


def generation_passes(prompt: int, output: int, *, cached: bool) -> list[Pass]:
    """The passes that draw `output` tokens after `prompt` given ones."""
    contexts = range(prompt, prompt + output)
    if not cached:
        return [(context, context) for context in contexts]
    return [(prompt, prompt)] + [(1, context) for context in contexts[1:]]


def total_flops(config: ModelConfig, passes: Iterable[Pass]) -> int:
    """FLOPs of all passes, each with logits for its last token only."""
    return int(sum(step_cost(config, [one]).total().flops for one in passes))


def floor_seconds(cost: StepCost, device: Device) -> float:
    """No less time than this: each operation alone under the roofline, one after the other."""
    return sum(device.seconds(op.flops, op.bytes) for op in cost.ops)


def predicted_seconds(
    config: ModelConfig, passes: Sequence[Pass], device: Device, price: float = 0.0
) -> list[float]:
    """Seconds of each pass: its floor in float32 plus a fixed price of a pass."""
    element = ElementBytes(4, 4, 4)
    costs = [step_cost(config, [one], element=element) for one in passes]
    return [floor_seconds(cost, device) + price for cost in costs]
