"""How long the engine's own steps take, each with what it should have cost.

The engine reports the seconds of every stage (`step.forward` and its neighbours); the input of the
forward pass says which (query, context) pairs it was. Both together make a `StepRecord`: a point
that `perf.costs` can predict and a roofline can hold.

Weights may be random: what they hold changes no time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minifer import Engine, EngineConfig, ModelConfig, SamplingParams
from minifer.events import Event, ListSink
from minifer.models.transformer import Transformer
from minifer.perf.costs import ElementBytes, OpCost, step_cost
from minifer.perf.counted import CountedStep, CountingRunner, batch_of
from minifer.perf.devices import Device
from minifer.weights.quantized import weight_bytes
from minifer.weights.resolve import LoadedModel

BLOCK_SIZE = 16


@dataclass(frozen=True)
class StepRecord:
    """num_logits: rows of its head. forward: seconds of the model. whole: of all five stages."""

    batch: tuple[tuple[int, int], ...]
    num_logits: int
    forward: float
    whole: float

    @property
    def kind(self) -> str:
        """ "decode" when every request computes one token, else "prefill"."""
        return "decode" if all(query == 1 for query, _ in self.batch) else "prefill"


@dataclass(frozen=True)
class StepGroup:
    """Steps of nearly equal work: a batch that decodes, or the same chunk again and again.

    label: what it is. cost: of the middle step. seconds: forward passes, in order. whole: the
    steps around them.
    """

    label: str
    kind: str
    num_tokens: int
    context: int
    cost: OpCost
    seconds: tuple[float, ...]
    whole: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def floor(self, device: Device) -> float:
        """Seconds below which no program can be: its FLOPs, its weight and KV bytes."""
        return device.seconds(self.cost.flops, self.cost.weight_bytes + self.cost.kv_bytes)


class TimedEngine:
    """An engine whose steps are timed by its own events, with requests of random token ids.

    options: as `engine_for`.
    """

    def __init__(self, loaded: LoadedModel, **options: Any) -> None:
        self._vocabulary = loaded.config.vocab_size
        self._sink = ListSink()
        self._work: list[tuple[tuple[tuple[int, int], ...], int]] = []
        self._generator = torch.Generator().manual_seed(0)
        self._num_requests = 0
        self.engine = engine_for(loaded, sinks=[self._sink], **options)
        self._runner = self.engine.runner
        self.engine.runner = self

    def forward(self, step: Any) -> Any:
        """Stands before the engine's runner."""
        self._work.append((batch_of(step), len(step.logits_rows)))
        logits = self._runner.forward(step)
        device: torch.device = self._runner.device  # type: ignore[attr-defined]
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # or the sampler would wait for it
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def add(self, length: int, num_tokens: int) -> None:
        """A request of `length` random tokens that is answered with `num_tokens`."""
        ids = torch.randint(self._vocabulary, (length,), generator=self._generator).tolist()
        params = self.engine.default_params.with_(max_tokens=num_tokens)
        self.engine.add_request(f"r{self._num_requests}", ids, params)
        self._num_requests += 1

    def counted_step(self) -> CountedStep:
        """One step that nobody times, its bytes counted. Raises `ValueError` as `step`."""
        plain = self._runner
        self._runner = counting = CountingRunner(plain)
        try:
            self.step()
        finally:
            self._runner = plain
        return counting.steps[-1]

    def step(self) -> StepRecord:
        """One step of the engine. Raises `ValueError` when no request is open."""
        if not self.engine.has_unfinished_requests:
            raise ValueError("the engine must have an open request, got none")
        self._sink.events.clear()
        self.engine.step()
        (seconds,) = durations(self._sink.events)
        return StepRecord(*self._work[-1], *seconds)


def random_model(
    config: ModelConfig, *, dtype: str = "float32", device: str = "cpu", seed: int = 0
) -> LoadedModel:
    """A model of these shapes with random weights and no tokenizer: prompts are token ids."""
    model = Transformer(config, getattr(torch, dtype), device)
    with torch.no_grad():
        model.init_weights(seed)
    return LoadedModel(model, config, None, frozenset(), Path())  # type: ignore[arg-type]


def busy_clock() -> float:
    """Seconds this process computed: neighbours on the same cores do not count.

    For torch with one thread on a CPU, as its threads add up. The wall clock where a system counts
    this too coarsely for a step (Windows).
    """
    fine = time.get_clock_info("process_time").resolution < 1e-5
    return time.process_time() if fine else time.perf_counter()


def engine_for(
    loaded: LoadedModel,
    *,
    sinks: Sequence[Any] = (),
    clock: Callable[[], float] = time.perf_counter,
    **options: Any,
) -> Engine:
    """An engine that computes every token itself: greedy, without prefix caching.

    clock: of its events. options: fields of `EngineConfig`; by default room for 64 requests of the
    model's full length, or 32,768 tokens if that is less.
    """
    length = loaded.config.max_position_embeddings
    settings = {
        "block_size": BLOCK_SIZE,
        "num_kv_blocks": -(-min(64 * length, 32_768) // BLOCK_SIZE),
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
        **options,
    }
    engine = Engine.from_loaded(loaded, EngineConfig(**settings), sinks=sinks, clock=clock)
    engine.default_params = SamplingParams(temperature=0, ignore_eos=True)
    return engine


def serve(
    loaded: LoadedModel, prompts: Iterable[int], num_tokens: int, **options: Any
) -> list[StepRecord]:
    """Serve one request a prompt length to the end; every step the engine took, in order.

    prompts: lengths in tokens. num_tokens: each is answered with as many. options: as `engine_for`.
    """
    timed = TimedEngine(loaded, **options)
    for length in prompts:
        timed.add(length, num_tokens)
    records = []
    while timed.engine.has_unfinished_requests:
        records.append(timed.step())
    timed.engine.close()
    return records


def durations(events: Iterable[Event]) -> list[tuple[float, float]]:
    """(forward, whole) seconds of every finished step, from the engine's own laps."""
    out: list[tuple[float, float]] = []
    whole = forward = 0.0
    for event in events:
        if event.name == "step.started":
            whole = forward = 0.0
        elif "duration" in event.data and event.name.startswith("step."):
            whole += event.data["duration"]
            if event.name == "step.forward":
                forward = event.data["duration"]
            elif event.name == "step.postprocessed":
                out.append((forward, whole))
    return out


class Steps:
    """Steps of one kind, as many as asked for: `prefilling` and `decoding` make them.

    timed: the engine. before: makes it ready for the next step.
    """

    def __init__(self, timed: TimedEngine, before: Callable[[], None] = lambda: None) -> None:
        self._timed, self._before = timed, before

    def take(self, count: int) -> list[StepRecord]:
        """The next `count` steps."""
        records = []
        for _ in range(count):
            self._before()
            records.append(self._timed.step())
        return records

    def count(self) -> CountedStep:
        """The next step, its bytes counted."""
        self._before()
        return self._timed.counted_step()


def prefilling(
    loaded: LoadedModel, chunk: int, *, clock: Callable[[], float] = time.perf_counter
) -> Steps:
    """Steps that each prefill a prompt of `chunk` tokens, all of it. clock: that times them."""
    blocks = -(-(chunk + 1) // BLOCK_SIZE)
    timed = TimedEngine(loaded, max_num_batched_tokens=chunk, num_kv_blocks=blocks, clock=clock)
    return Steps(timed, lambda: timed.add(chunk, 1))


def decoding(
    loaded: LoadedModel,
    batch_size: int,
    context: int,
    *,
    steps: int = 64,
    clock: Callable[[], float] = time.perf_counter,
) -> Steps:
    """Steps of `batch_size` requests that all decode; at most `steps` of them.

    The first has contexts of `context` tokens, its own included; each makes them one longer.
    clock: that times them. Raises `ValueError` for a context below 2: a decode has a prompt.
    """
    if context < 2:
        raise ValueError(f"context must be at least 2, got {context}")
    prompt = context - 1
    timed = TimedEngine(
        loaded,
        num_kv_blocks=batch_size * -(-(context + steps) // BLOCK_SIZE),
        max_num_seqs=batch_size,
        clock=clock,
        max_num_batched_tokens=batch_size * prompt,  # all prompts in one step: equal contexts
    )
    for _ in range(batch_size):
        timed.add(prompt, steps + 1)
    timed.step()
    return Steps(timed)


def element_bytes(loaded: LoadedModel) -> ElementBytes:
    """What `perf.costs` multiplies by: of weights the mean, which codes make a fraction."""
    size = next(loaded.model.parameters()).dtype.itemsize
    return ElementBytes(weight_bytes(loaded.model) / loaded.model.num_parameters, size, size)


def group(loaded: LoadedModel, label: str, records: Sequence[StepRecord]) -> StepGroup:
    """Steps of one kind as one point. Raises `ValueError` without any."""
    if not records:
        raise ValueError(f"records of {label} must hold at least one step, got none")
    middle = records[len(records) // 2]
    element = element_bytes(loaded)
    return StepGroup(
        label,
        middle.kind,
        sum(query for query, _ in middle.batch),
        max(context for _, context in middle.batch),
        step_cost(
            loaded.config, middle.batch, num_logits=middle.num_logits, element=element
        ).total(),
        tuple(record.forward for record in records),
        tuple(record.whole for record in records),
    )
