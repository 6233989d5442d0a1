"""Lecture 02 as plain values: what naive and cached generation compute, and what it costs.

A *pass* is (query, context): the tokens one forward pass computes, and the length of the sequence
with them, as in `minifer.perf.costs`. `prefill_decode.py` draws what is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import get_clock_info, perf_counter, thread_time
from typing import Literal

from minifer import Engine, EngineConfig, ModelConfig, SamplingParams
from minifer.course.example import TRIO, tiny
from minifer.course.figure_data import timeline_data
from minifer.events import Event, ListSink
from minifer.perf.costs import ElementBytes, StepCost, num_parameters, step_cost
from minifer.perf.devices import Device
from minifer.perf.limit import read_bandwidth, this_machine

Pass = tuple[int, int]
Layout = Literal["half", "interleaved"]


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


def floors(config: ModelConfig, passes: Sequence[Pass], device: Device) -> list[float]:
    """The floor of each pass in float32, in seconds."""
    element = ElementBytes(4, 4, 4)
    return [floor_seconds(step_cost(config, [p], element=element), device) for p in passes]


def late_prompt(budget: int) -> list[Event]:
    """A and B decode on the real clock; after ten steps D comes with 900 tokens. The events."""
    sink = ListSink()
    options = EngineConfig(num_kv_blocks=96, max_num_batched_tokens=budget)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=24)
    with Engine.from_loaded(tiny(), options, sinks=[sink]) as engine:
        for name in "AB":
            engine.add_request(name, TRIO[name][0], params)
        for _ in range(10):
            engine.step()
        engine.add_request("D", "and so on " * 90, params.with_(max_tokens=8))
        while engine.has_unfinished_requests:
            engine.step()
    return sink.events


@dataclass(frozen=True)
class Series:
    """One way of generating. x: tokens; floor, predicted, measured: seconds at each x."""

    name: str
    x: Sequence[int]
    floor: Sequence[float]
    predicted: Sequence[float]
    measured: Sequence[float]

    def every(self, step: int) -> Series:
        """Every `step`-th point, for a picture that can be read; not the first, which warms up."""
        points = (self.floor, self.predicted, self.measured)
        return Series(self.name, self.x[1::step], *(values[1::step] for values in points))

    def totals(self, counts: Sequence[int]) -> Series:
        """Seconds of the first n passes together, for each n of `counts`."""
        points = (self.floor, self.predicted, self.measured)
        sums = ([sum(values[:n]) for n in counts] for values in points)
        return Series(self.name, counts, *sums)


@dataclass(frozen=True)
class Comparison:
    """Predicted and measured passes. price: seconds of a pass over one token, above its floor."""

    device: Device
    price: float
    series: tuple[Series, Series]  # naive, cached

    def summary(self) -> str:
        """The three measured numbers that the predictions are made of."""
        flops, bandwidth = self.device.peak_flops / 1e9, self.device.memory_bandwidth / 1e9
        rates = f"this machine: {flops:.0f} GFLOP/s, {bandwidth:.0f} GB/s"
        return f"{rates}\nfixed price of a pass: {self.price * 1e3:.2f} ms"


def compare_times(
    config: ModelConfig, one_pass: Callable[[int, int], object], prompt: int, output: int
) -> Comparison:
    """Time both ways of generating on this machine's CPU, and predict them.

    one_pass(query, context) runs a pass in float32. The bandwidth is that of reading as many bytes
    as the model has, which may fit a cache. The price is measured on passes over one token of a
    short text; nothing is fitted to what is then predicted.
    """
    device = this_machine(seconds=0.3, device="cpu")
    bandwidth = read_bandwidth(4 * num_parameters(config), device="cpu")
    device = replace(device, memory_bandwidth=bandwidth)
    single = generation_passes(1, 8, cached=True)
    price = min(seconds_of(one_pass, single)) - floors(config, single, device)[0]
    both = []
    for name, cached in (("naive", False), ("cached", True)):
        passes = generation_passes(prompt, output, cached=cached)
        floor = floors(config, passes, device)
        predicted = [seconds + price for seconds in floor]
        drawn = range(output)
        both.append(Series(name, drawn, floor, predicted, seconds_of(one_pass, passes)))
    return Comparison(device, price, (both[0], both[1]))


def seconds_of(
    one_pass: Callable[[int, int], object], passes: Sequence[Pass], repeats: int = 3
) -> list[float]:
    """Seconds of each pass, the best of `repeats` runs through all of them.

    The time that this thread had a processor, where the system tells it finely enough: one thread
    computes, and what the machine does for others meanwhile is not its time.
    """
    fine = get_clock_info("thread_time").resolution < 1e-5  # on Windows it is 16 ms
    clock = thread_time if fine else perf_counter
    runs = []
    for _ in range(repeats):
        seconds = []
        for query, context in passes:
            begin = clock()
            one_pass(query, context)
            seconds.append(clock() - begin)
        runs.append(seconds)
    return [min(times) for times in zip(*runs, strict=True)]
