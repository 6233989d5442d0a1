"""The end of the book: what each stage of a request's life costs, predicted and measured.

A price list is fitted to requests that the reader has not met, and then names the time of those he
has: a law with a held-out error, like those of lecture 14.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from minifer import Engine, EngineConfig, SamplingParams
from minifer.config import ModelConfig
from minifer.course import example
from minifer.course.figures import SERIES, label_axes, new_figure
from minifer.events import STAGES, Event, ListSink
from minifer.perf.costs import ElementBytes, step_cost
from minifer.perf.counted import CountingRunner
from minifer.perf.devices import Device
from minifer.perf.step_model import StepModel, fit_step_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A lap of the engine's step → what its time may depend on.
LAPS: Mapping[str, tuple[str, ...]] = {
    "step.scheduled": ("requests", "blocks"),  # the scheduler asks for them
    "step.prepared": ("requests",),
    "step.forward": ("requests", "tokens"),
    "step.sampled": ("draws",),
    "step.postprocessed": ("draws",),
}
# Whom the prices are fitted to: other prompts, other lengths, another number of them.
OTHERS: Mapping[str, tuple[str, int]] = {
    "d": ("The for statement is used to iterate", 7),
    "e": ("Boolean operations", 14),
    "f": ("The try statement specifies exception handlers", 5),
    "g": ("def", 16),
    "h": ("An assignment expression", 9),
}


@dataclass(frozen=True)
class Step:
    """One step of the engine. batch: request id → (query, context). blocks: newly taken.
    seconds: by lap. stage: of the forward pass, "prefill" or "decode"."""

    batch: Mapping[str, tuple[int, int]]
    draws: int
    blocks: int
    seconds: Mapping[str, float]
    stage: str

    @property
    def features(self) -> dict[str, float]:
        queries = [query for query, _ in self.batch.values()]
        found = {"requests": len(queries), "tokens": sum(queries)}
        found |= {"draws": self.draws, "blocks": self.blocks}
        return {name: float(count) for name, count in found.items()}

    def stages(self, seconds: Mapping[str, float] | None = None) -> dict[str, float]:
        """Seconds (None: the measured ones) by stage of the book instead of by lap."""
        laps = self.seconds if seconds is None else seconds
        return {
            "scheduling": laps["step.scheduled"],
            "kv": laps["step.prepared"],
            self.stage: laps["step.forward"] + laps["step.sampled"],
            "postprocessing": laps["step.postprocessed"],
        }


def steps_of(events: Sequence[Event]) -> list[Step]:
    """The steps of an event stream whose clock shows real time."""
    found: list[Step] = []
    batch: dict[str, tuple[int, int]] = {}
    seconds: dict[str, float] = {}
    draws, blocks, stage = 0, 0, "decode"
    for event in events:
        if event.name == "step.started":
            batch, seconds, draws, blocks = {}, {}, 0, 0
        elif event.name == "request.scheduled" and event.token_range and event.request_id:
            first, last = event.token_range
            batch[event.request_id] = last - first, last
        elif event.name == "token.sampled":
            draws += 1
        elif event.name == "kv.block_allocated":
            blocks += len(event.data["blocks"])
        elif event.name in LAPS:
            seconds[event.name] = event.data["duration"]
            if event.name == "step.forward":
                stage = event.stage
            elif event.name == "step.postprocessed":
                found.append(Step(batch, draws, blocks, seconds, stage))
    return found


def measure(requests: Mapping[str, tuple[str, int]], rounds: int = 5) -> list[Step]:
    """Serve requests with minifer-tiny as the book does, `rounds` times; of each lap of each step
    the shortest, since neighbours only slow it down. One round more warms up."""
    runs = [steps_of(_events(requests)) for _ in range(rounds + 1)][1:]
    best = []
    for same in zip(*runs, strict=True):
        seconds = {lap: min(step.seconds[lap] for step in same) for lap in LAPS}
        best.append(replace(same[0], seconds=seconds))
    return best


def _events(requests: Mapping[str, tuple[str, int]]) -> list[Event]:
    sink = ListSink()
    options = EngineConfig(
        block_size=example.BLOCK_SIZE,
        num_kv_blocks=4 * example.NUM_BLOCKS,
        max_num_batched_tokens=example.BUDGET,
    )
    engine = Engine.from_loaded(example.tiny(), options, sinks=[sink], clock=time.perf_counter)
    params = SamplingParams(temperature=0, ignore_eos=True)
    for name, (prompt, max_tokens) in requests.items():
        engine.add_request(name, prompt, params.with_(max_tokens=max_tokens))
    while engine.has_unfinished_requests:
        engine.step()
    return sink.events


@dataclass(frozen=True)
class Counts:
    """What an engine did, in units. chunks: A's, of its prompt. hits: request id → tokens found.
    kv_bytes: written. pieces: of text, released."""

    steps: int
    chunks: list[tuple[int, int]]
    hits: dict[str, int]
    computed: int
    kv_bytes: int
    draws: int
    pieces: int


def counts() -> Counts:
    """Serve A, B and C as everywhere in the book, and count."""
    watched: list[CountingRunner] = []

    def watch(engine: Engine) -> None:
        watched.append(CountingRunner(engine.runner))
        engine.runner = watched[0]

    events = example.run(prepare=watch).events
    of = {event.name: [e for e in events if e.name == event.name] for event in events}
    spans = [(e.request_id, *(e.token_range or (0, 0))) for e in of["request.scheduled"]]
    prompt = len(example.TRIO["A"][0])  # a byte is a token
    return Counts(
        steps=len(of["step.forward"]),
        chunks=[(begin, end) for name, begin, end in spans if name == "A" and end <= prompt],
        hits={str(e.request_id): (e.token_range or (0, 0))[1] for e in of["kv.prefix_hit"]},
        computed=sum(end - begin for _, begin, end in spans),
        kv_bytes=sum(step.seen.kv_written for step in watched[0].steps),
        draws=len(of["token.sampled"]),
        pieces=len(of["text.released"]),
    )


def price_list(steps: Sequence[Step]) -> dict[str, StepModel]:
    """Of each lap a fixed part and a price for each thing it may depend on."""
    return {
        lap: fit_step_model(
            {name: [step.features[name] for step in steps] for name in names},
            [step.seconds[lap] for step in steps],
            relative_to=[1.0] * len(steps),  # what counts is the sum over many steps
        )
        for lap, names in LAPS.items()
    }


def priced(prices: Mapping[str, StepModel], step: Step) -> dict[str, float]:
    """Seconds of each lap of a step, by the price list."""
    return {
        lap: model.seconds({name: step.features[name] for name in LAPS[lap]})
        for lap, model in prices.items()
    }


def life(
    request: str, steps: Sequence[Step], prices: Mapping[str, StepModel]
) -> dict[str, tuple[float, float]]:
    """Stage → (predicted, measured) seconds, over all steps that work on a request."""
    total = {stage: [0.0, 0.0] for stage in STAGES}
    for step in steps:
        if request in step.batch:
            for place, laps in enumerate((priced(prices, step), step.seconds)):
                for stage, seconds in step.stages(laps).items():
                    total[stage][place] += seconds
    return {stage: (predicted, measured) for stage, (predicted, measured) in total.items()}


def floors(
    request: str, steps: Sequence[Step], config: ModelConfig, device: Device
) -> dict[str, float]:
    """The roofline's floor of a request's prefill and decode steps, in seconds, in float32."""
    total = {"prefill": 0.0, "decode": 0.0}
    for step in steps:
        if request in step.batch:
            cost = step_cost(config, list(step.batch.values()), num_logits=step.draws,
                             element=ElementBytes(4, 4, 4)).total()  # fmt: skip
            total[step.stage] += device.seconds(cost.flops, cost.weight_bytes + cost.kv_bytes)
    return total


ALT = (
    "Five rows, one a stage, on a logarithmic time axis: measured and predicted time of A's whole "
    "life. Prefill and decode take milliseconds, the three others far less. The floor of the "
    "roofline lies left of both."
)


def life_figure(
    found: Mapping[str, tuple[float, float]], floor: Mapping[str, float], *, title: str
) -> Figure:
    """Three points a stage, on a logarithmic axis: predicted, measured, floor of the roofline."""
    figure = new_figure(9.0, 3.6)
    axes = figure.subplots()
    label_axes(axes, title=title, x="milliseconds of A's whole life (log)", y="")
    names = {"kv": "KV", "postprocessing": "post-processing"}
    series: dict[str, dict[str, Any]] = {
        "measured": {stage: pair[1] for stage, pair in found.items()},
        "predicted by prices of other requests": {s: pair[0] for s, pair in found.items()},
        "floor of the roofline": dict(floor),
    }
    for (colour, marker, _), (label, values) in zip(SERIES, series.items(), strict=False):
        rows = [STAGES.index(stage) for stage in values]
        axes.plot([1e3 * v for v in values.values()], rows, color=colour, marker=marker,
                  markersize=9, linestyle="none", fillstyle="none", markeredgewidth=2,
                  label=label)  # fmt: skip
    axes.set_xscale("log")
    labels = [f"{n} {names.get(stage, stage)}" for n, stage in enumerate(STAGES, start=1)]
    axes.set_yticks(range(len(STAGES)), labels)
    axes.invert_yaxis()
    axes.grid(axis="y", color="#DDDDDD")
    figure.legend(fontsize=9, frameon=False, loc="outside lower center", ncols=3)
    return figure
