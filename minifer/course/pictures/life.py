"""Pictures of lecture 0: what waits before it is shown, and what a step takes.

The first half makes plain values, which claims and tests check; the second half draws them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minifer import Engine, EngineConfig, SamplingParams
from minifer.config import ModelConfig
from minifer.course.figures import (
    HATCHES,
    PALETTE,
    SERIES,
    finish,
    label_axes,
    new_figure,
    patch,
)
from minifer.events import ListSink
from minifer.perf.costs import ElementBytes, prefill_cost
from minifer.perf.devices import Device
from minifer.postprocessing.detokenizer import IncrementalDetokenizer
from minifer.postprocessing.stop_strings import StopStrings
from minifer.weights.resolve import LoadedModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FLOAT32 = ElementBytes(weight=4, activation=4, kv=4)


@dataclass(frozen=True)
class Shown:
    """One token of a byte-level model on its way out. held: bytes drawn that nobody has seen."""

    token: int
    released: str
    held: int


def shown_text(tokens: Sequence[int], decode: Callable[[list[int]], str], stop: str) -> list[Shown]:
    """What each token of a reply lets a reader see: whole characters, no part of the stop string.

    tokens: bytes, up to and with the one that completes the stop string, or to the end. Bytes of a
    stop string that was met count as held for ever.
    """
    detokenizer, stops = IncrementalDetokenizer(decode), StopStrings([stop])
    shown, held = [], 0
    for token in tokens:
        released = stops.push(detokenizer.push(token))
        held += 1 - len(released.encode())
        shown.append(Shown(token, released, held))
        if stops.hit:
            break
    return shown


@dataclass(frozen=True)
class StepTime:
    """A prefill of one prompt. predicted: the roofline's floor; both in seconds."""

    tokens: int
    predicted: float
    measured: float


def step_times(
    loaded: LoadedModel, here: Device, lengths: Sequence[int], *, repeats: int = 3
) -> list[StepTime]:
    """Forward passes of this machine's engine over prompts of these lengths, the best of `repeats`.

    here: what the machine can do at best. Times are those of the engine's `step.forward` events.
    """
    sink = ListSink()
    config = EngineConfig(enable_prefix_caching=False, max_num_batched_tokens=max(lengths))
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    best: dict[int, float] = {}
    with Engine.from_loaded(loaded, config, sinks=[sink]) as engine:
        for number, length in itertools.product(range(repeats), lengths):
            sink.events.clear()
            engine.add_request(f"{length}-{number}", [32 + i % 90 for i in range(length)], params)
            while engine.has_unfinished_requests:
                engine.step()
            seconds = sum(e.data["duration"] for e in sink.events if e.name == "step.forward")
            best[length] = min(seconds, best.get(length, seconds))
    return [StepTime(n, predicted_seconds(loaded.config, here, n), best[n]) for n in lengths]


def predicted_seconds(config: ModelConfig, device: Device, tokens: int) -> float:
    """The roofline's floor under a float32 prefill: FLOPs or bytes, whatever takes longer."""
    cost = prefill_cost(config, tokens, element=_FLOAT32).total()
    return device.seconds(cost.flops, cost.bytes)


# -- drawings


def draw_shown(shown: Sequence[Shown], *, title: str) -> Figure:
    """A row of boxes, a token each: its byte, and what it releases; what is held is hatched."""
    from matplotlib.patches import Rectangle

    figure = new_figure(max(6.5, 0.62 * len(shown) + 1), 2.3)
    axes = figure.subplots()
    for x, token in enumerate(shown):
        byte = chr(token.token) if 32 < token.token < 127 else f"{token.token:02X}"
        axes.text(x, 0, byte, ha="center", va="center", fontsize=11, family="monospace")
        axes.add_patch(Rectangle((x - 0.45, -0.4), 0.9, 0.8, facecolor=PALETTE["free"], zorder=0))
        face, hatch = PALETTE["decode"], ""
        if not token.released:
            face, hatch = PALETTE["waiting"], HATCHES["waiting"]
        axes.add_patch(
            Rectangle((x - 0.45, 0.6), 0.9, 0.8, facecolor=face, hatch=hatch, edgecolor="white")
        )
        label = token.released.replace(" ", "␣")
        axes.text(x, 1, label, ha="center", va="center", fontsize=11, family="monospace")
    axes.set_xlim(-0.6, len(shown) - 0.4)
    axes.set_ylim(1.5, -0.5)
    axes.set_xticks(range(len(shown)), [str(i + 1) for i in range(len(shown))])
    axes.set_yticks([0, 1], ["byte drawn\n(letter or hex)", "text shown"])
    axes.set_xlabel("token of the reply")
    legend = [
        patch("released with this token", PALETTE["decode"]),
        patch("nothing is shown yet", PALETTE["waiting"], HATCHES["waiting"]),
    ]
    finish(figure, axes, title, legend)
    return figure


def draw_step_times(times: Sequence[StepTime], machine: str) -> Figure:
    """Predicted floor and measured time of a step against its tokens, both axes logarithmic."""
    figure = new_figure(7.2, 4.0)
    axes = figure.subplots()
    lines = (
        ("measured: the engine's forward pass", [t.measured for t in times]),
        ("predicted: the roofline's floor", [t.predicted for t in times]),
    )
    for (colour, marker, line), (label, seconds) in zip(SERIES, lines, strict=False):
        milliseconds = [1e3 * s for s in seconds]
        tokens = [t.tokens for t in times]
        axes.plot(tokens, milliseconds, color=colour, marker=marker, linestyle=line, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([t.tokens for t in times], [str(t.tokens) for t in times])
    label_axes(
        axes,
        title=f"A small step pays mostly for being a step\n({machine})",
        x="tokens in the step",
        y="time of the forward pass (ms)",
    )
    return figure
