"""How long the engine's own steps take, each with what it should have cost.

The engine reports the seconds of every stage (`step.forward` and its neighbours); the input of the
forward pass says which (query, context) pairs it was. Both together make a `StepRecord`: a point
that `perf.costs` can predict and a roofline can hold.

Weights may be random: what they hold changes no time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minifer import Engine, EngineConfig, ModelConfig, SamplingParams
from minifer.events import Event, ListSink
from minifer.models.transformer import Transformer
from minifer.perf.costs import ElementBytes, OpCost, step_cost
from minifer.perf.counted import batch_of
from minifer.perf.devices import Device
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


class _Recorder:
    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.work: list[tuple[tuple[tuple[int, int], ...], int]] = []

    def forward(self, step: Any) -> Any:
        self.work.append((batch_of(step), len(step.logits_rows)))
        logits = self.runner.forward(step)
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize(self.runner.device)  # or the sampler would wait for it
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)


def random_model(
    config: ModelConfig, *, dtype: str = "float32", device: str = "cpu", seed: int = 0
) -> LoadedModel:
    """A model of these shapes with random weights and no tokenizer: prompts are token ids."""
    model = Transformer(config, getattr(torch, dtype), device)
    with torch.no_grad():
        model.init_weights(seed)
    return LoadedModel(model, config, None, frozenset(), Path())  # type: ignore[arg-type]


def engine_for(loaded: LoadedModel, *, sinks: Sequence[Any] = (), **options: Any) -> Engine:
    """An engine that computes every token itself: greedy, without prefix caching.

    options: fields of `EngineConfig`; by default room for 64 requests of the model's full length,
    or 32,768 tokens if that is less.
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
    engine = Engine.from_loaded(loaded, EngineConfig(**settings), sinks=sinks)
    engine.default_params = SamplingParams(temperature=0, ignore_eos=True)
    return engine


def serve(
    loaded: LoadedModel, prompts: Iterable[int], num_tokens: int, **options: Any
) -> list[StepRecord]:
    """Serve one request a prompt length, random token ids; every step the engine took, in order.

    prompts: lengths in tokens. num_tokens: each is answered with as many. options: as `engine_for`.
    """
    sink = ListSink()
    engine = engine_for(loaded, sinks=[sink], **options)
    engine.runner = recorder = _Recorder(engine.runner)  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(0)
    params = engine.default_params.with_(max_tokens=num_tokens)
    for number, length in enumerate(prompts):
        ids = torch.randint(loaded.config.vocab_size, (length,), generator=generator).tolist()
        engine.add_request(f"r{number}", ids, params)
    while engine.has_unfinished_requests:
        engine.step()
    engine.close()
    return [
        StepRecord(*work, *seconds)
        for work, seconds in zip(recorder.work, durations(sink.events), strict=True)
    ]


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


def prefill_group(loaded: LoadedModel, chunk: int, *, repeats: int = 3) -> StepGroup:
    """A prompt of `chunk` tokens in one step, `repeats` times after one that does not count."""
    records = [
        serve(loaded, [chunk], 1, max_num_batched_tokens=max(chunk, 1))[0]
        for _ in range(repeats + 1)
    ][1:]
    return group(loaded, f"prefill {chunk}", records)


def decode_group(
    loaded: LoadedModel, batch_size: int, context: int, *, repeats: int = 5
) -> StepGroup:
    """`batch_size` requests that decode, `repeats` steps around a context of `context` tokens."""
    before = max(1, context - 1 - repeats // 2)
    records = serve(loaded, [before] * batch_size, repeats + 2)
    steps = [r for r in records if r.kind == "decode" and len(r.batch) == batch_size]
    return group(loaded, f"decode {batch_size} × {context}", steps[-repeats:])


def group(loaded: LoadedModel, label: str, records: Sequence[StepRecord]) -> StepGroup:
    """Steps of one kind as one point. Raises `ValueError` without any."""
    if not records:
        raise ValueError(f"records of {label} must hold at least one step, got none")
    middle = records[len(records) // 2]
    size = next(loaded.model.parameters()).dtype.itemsize
    element = ElementBytes(size, size, size)
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
