"""A loop model in the engine: requests of different depth, who waits for whom, who leaves early."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from minifer import Engine, EngineConfig, SamplingParams
from minifer.course import example
from minifer.course.figures import (
    HATCHES,
    PALETTE,
    SERIES,
    finish,
    label_axes,
    new_figure,
    patch,
    request_colours,
)
from minifer.execution.reference import DenseBackend, sequence_batch
from minifer.outputs import RequestOutput
from minifer.parcae.monitor import loss_by_depth
from minifer.text.help_topics import sections, split
from minifer.weights.resolve import LoadedModel, load_model

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Ask:
    """What a request wants of a loop model; None: what the engine does by default."""

    prompt: str
    max_tokens: int
    num_loops: int | None = None
    exit_threshold: float | None = None

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=0,
            ignore_eos=True,
            max_tokens=self.max_tokens,
            num_loops=self.num_loops,
            exit_threshold=self.exit_threshold,
        )


DEPTHS: Mapping[str, int] = {"A": 8, "B": 4, "C": 1}
# The book's three requests, each with a depth of its own.
TRIO: Mapping[str, Ask] = {
    name: Ask(*example.TRIO[name], num_loops=depth) for name, depth in DEPTHS.items()
}


@dataclass(frozen=True)
class Application:
    """One reading of the core's weights. step: from 1 on. loops: request → the iteration, from 0
    on, that its tokens run in it."""

    step: int
    loops: Mapping[str, int]


@dataclass(frozen=True)
class Served:
    """A run of the engine, and every application of the core in it."""

    run: example.Run
    applications: list[Application]

    @property
    def steps(self) -> int:
        return self.applications[-1].step


@cache
def loop_tiny() -> LoadedModel:
    """parcae-tiny in float32, loaded once a process."""
    return load_model("parcae-tiny", dtype="float32")


def serve(asks: Mapping[str, Ask] = TRIO, **options: Any) -> Served:
    """Serve all at once on parcae-tiny, to the end. options: as of `example.run`."""
    seen: list[Application] = []

    def prepare(engine: Engine) -> None:
        _watch(engine.runner.runner, seen)  # type: ignore[attr-defined]
        for name, ask in asks.items():
            engine.add_request(name, ask.prompt, ask.params)

    return Served(example.run({}, model=loop_tiny(), prepare=prepare, **options), seen)


def one_after_another(asks: Iterable[Ask], **options: Any) -> list[RequestOutput]:
    """Serve each when the one before has gone, in one engine, and return the answers."""
    settings = {"block_size": example.BLOCK_SIZE, "num_kv_blocks": 64, **options}
    found = []
    with Engine.from_loaded(loop_tiny(), EngineConfig(**settings)) as engine:
        for number, ask in enumerate(asks):
            engine.add_request(str(number), ask.prompt, ask.params)
            last: dict[str, RequestOutput] = {}
            while engine.has_unfinished_requests:
                last |= {output.request_id: output for output in engine.step()}
            found.append(last[str(number)])
    return found


@torch.inference_mode()
def greedy_alone(ask: Ask) -> list[int]:
    """The slow twin: for every token the whole sequence again, one request, no cache."""
    loaded, backend = loop_tiny(), DenseBackend()
    ids = list(loaded.tokenizer.encode(ask.prompt))
    for _ in range(ask.max_tokens):
        hidden = loaded.model(sequence_batch(ids), None, backend, ask.num_loops)
        ids.append(int(loaded.model.logits(hidden[-1:], backend).argmax()))
    return ids[-ask.max_tokens :]


def bits_by_depth(depths: Sequence[int], rows: int = 24, length: int = 128) -> dict[int, float]:
    """Bits a byte of parcae-tiny on text that it was not trained on, at each depth.

    The text is Python's own help, which differs between versions of Python.
    """
    _, unseen = split(sections())
    apart = len(unseen) // rows
    pieces = [unseen[r * apart : r * apart + length + 1] for r in range(rows)]
    losses = loss_by_depth(loop_tiny().model, torch.stack(pieces), depths)
    return {depth: loss / math.log(2) for depth, loss in losses.items()}


def _watch(runner: Any, seen: list[Application]) -> None:
    """Stand before a loop runner's iteration and note who takes part."""
    iterate = runner._iterate
    steps: list[Any] = []

    def watched(rows: Any) -> bool:
        if not steps or steps[-1] is not rows:
            steps.append(rows)
        loops = {}
        for entry, spans in zip(rows.step.scheduled, rows.spans, strict=True):
            running = [span.loops for span in spans if span.looping]
            if running:
                loops[entry.request.request_id] = max(running)
        seen.append(Application(len(steps), loops))
        return bool(iterate(rows))

    runner._iterate = watched


def applications_figure(ways: Mapping[str, Served], *, title: str) -> Figure:
    """A row a request, a column a reading of the core; the thick lines are where steps end."""
    longest = max(len(served.applications) for served in ways.values())
    figure = new_figure(min(11.0, 1.6 + 0.34 * longest), 1.2 + 1.5 * len(ways))
    plots = figure.subplots(len(ways), 1, squeeze=False)[:, 0]
    names = sorted({name for s in ways.values() for a in s.applications for name in a.loops})
    colours = request_colours(names)
    for axes, (way, served) in zip(plots, ways.items(), strict=True):
        _draw_applications(axes, served, names, colours)
        count = f"{len(served.applications)} readings of the core, {served.steps} steps"
        axes.set_title(f"{way}: {count}", fontsize=10, loc="left")
        axes.set_xlim(-0.6, longest - 0.4)
    plots[-1].set_xlabel("reading of the core's weights; in each box the iteration", fontsize=10)
    legend = [patch(f"request {name}", colours[name]) for name in names]
    legend.append(patch("waits for the step's end", "white", HATCHES["waiting"]))
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    figure.legend(handles=legend, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    return figure


def _draw_applications(
    axes: Axes, served: Served, names: Sequence[str], colours: Mapping[str, str]
) -> None:
    from matplotlib.patches import Rectangle

    for y, name in enumerate(names):
        own = [x for x, a in enumerate(served.applications) if name in a.loops]
        for x in range(own[0], own[-1] + 1):
            loops = served.applications[x].loops.get(name)
            face, hatch = (colours[name], "") if loops is not None else ("white", "....")
            corner = (x - 0.5, y - 0.38)
            axes.add_patch(
                Rectangle(corner, 1, 0.76, facecolor=face, hatch=hatch, edgecolor="#777777")
            )
            if loops is not None:
                axes.text(x, y, str(loops), ha="center", va="center", fontsize=9)
    for x in range(1, len(served.applications)):
        if served.applications[x].step != served.applications[x - 1].step:
            axes.axvline(x - 0.5, color="black", linewidth=2)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), list(names))
    axes.set_xticks([])
    axes.tick_params(labelsize=9, length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def exit_figure(text: str, loops: Sequence[int], deepest: int, *, title: str) -> Figure:
    """A bar a token of a reply: the loops it took. text: one character a token."""
    figure = new_figure(min(11.0, 1.2 + 0.24 * len(loops)), 3.4)
    axes = figure.subplots()
    places = range(len(loops))
    axes.bar(places, loops, color=PALETTE["decode"], width=0.8)
    axes.bar(places, [deepest - n for n in loops], bottom=loops, color=PALETTE["free"], width=0.8,
             edgecolor=PALETTE["waiting"], linewidth=0.5)  # fmt: skip
    axes.set_xticks(places, [{" ": "␣", "\n": "↵"}.get(c, c) for c in text])
    axes.set_xlabel("the reply, a character a token")
    axes.set_ylabel("loops")
    axes.set_yticks(range(0, deepest + 1, 2))
    legend = [patch("run", PALETTE["decode"]), patch("saved", PALETTE["free"])]
    finish(figure, axes, title, legend)
    return figure


def depth_figure(bits: Mapping[int, float], *, title: str) -> Figure:
    """Bits a byte against loops."""
    figure = new_figure(7.0, 3.8)
    axes = figure.subplots()
    colour, marker, line = SERIES[0]
    axes.plot(list(bits), list(bits.values()), color=colour, marker=marker, linestyle=line)
    for depth, value in bits.items():
        axes.annotate(f"{value:.2f}", (depth, value), textcoords="offset points", xytext=(4, 7),
                      fontsize=9)  # fmt: skip
    axes.set_xticks(list(bits))
    axes.set_ylim(min(bits.values()) - 0.15, max(bits.values()) + 0.15)
    label_axes(axes, title=title, x="loops T", y="bits a byte, held-out text (lower is better)")
    return figure
