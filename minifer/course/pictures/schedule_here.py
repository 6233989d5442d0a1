"""A long prompt among others on this machine: measured, beside what the cost model predicts."""

from __future__ import annotations

from collections.abc import Iterable

from minifer import Engine, EngineConfig, SamplingParams
from minifer.config import ModelConfig
from minifer.course import example
from minifer.course.pictures.schedule_run import Batch, step_seconds
from minifer.events import Event, ListSink
from minifer.perf.costs import ElementBytes
from minifer.perf.devices import Device
from minifer.perf.limit import this_machine

_JOINS_AT, _PROMPT = 10, 900  # the long prompt: the step it comes after, its tokens
_TRIES = 3  # of which the fastest counts, step by step: neighbours only slow a step down


def stall_here(*budgets: int) -> dict[str, tuple[list[int], list[float]]]:
    """Label → (steps, milliseconds of each) for `curves`: measured and predicted, a budget each.

    minifer-tiny serves A, which wants 40 tokens; after ten steps C comes with a prompt of 900.
    """
    stall_events(budgets[0])  # the first run pays for what later ones find ready
    series = {}
    for budget in budgets:
        tries = [timed_steps(stall_events(budget)) for _ in range(_TRIES)]
        steps = [min(same, key=lambda step: step[1]) for same in zip(*tries, strict=True)]
        floor = predicted_steps(steps, example.tiny().config, this_machine(seconds=0.5))
        numbers = [*range(1, len(steps) + 1)]
        series[f"measured, budget {budget}"] = numbers, [taken * 1e3 for _, taken in steps]
        series[f"predicted, budget {budget}"] = numbers, [taken * 1e3 for taken in floor]
    return series


def stall_events(budget: int) -> list[Event]:
    """What the engine reports of A and C, on the wall clock. budget: tokens a step."""
    sink = ListSink()
    config = EngineConfig(
        max_num_batched_tokens=budget, num_kv_blocks=64, enable_prefix_caching=False
    )
    engine = Engine.from_loaded(example.tiny(), config, sinks=[sink])
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=40)
    engine.add_request("A", example.TRIO["A"][0], params)
    while engine.has_unfinished_requests:
        engine.step()
        if engine.events.step == _JOINS_AT:
            engine.add_request("C", [32] * _PROMPT, params.with_(max_tokens=2))
    return sink.events


def timed_steps(events: Iterable[Event]) -> list[tuple[Batch, float]]:
    """Batch and duration in seconds of every step that an engine with a wall clock reported."""
    found: list[tuple[Batch, float]] = []
    batch: list[tuple[int, int]] = []
    begin = 0.0
    for event in events:
        if event.name == "step.started":
            batch, begin = [], event.time
        elif event.name == "request.scheduled" and event.token_range:
            start, end = event.token_range
            batch.append((end - start, end))
        elif event.name == "step.postprocessed":
            found.append((batch, event.time - begin))
    return found


def predicted_steps(
    steps: Iterable[tuple[Batch, float]], model: ModelConfig, device: Device
) -> list[float]:
    """The roofline's floor in seconds of each step of `timed_steps`, in float32."""
    seconds = step_seconds(model, device, element=ElementBytes(4, 4, 4))
    return [seconds(batch) for batch, _ in steps]
