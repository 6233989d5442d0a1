"""The running example of the book: three requests, A, B and C, and the engine that serves them.

Always the same prompts, ids and colours (`minifer.course.figures.REQUEST_COLOURS`, in this order).
B begins with A's words, so it finds A's blocks; C shares nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from minifer import Engine, EngineConfig, SamplingParams
from minifer.events import Event, ListSink
from minifer.outputs import RequestOutput
from minifer.weights.resolve import LoadedModel, load_model

# request id → (prompt, tokens wanted)
TRIO: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "A": ("The import statement", 12),
        "B": ("The import statement executes", 9),
        "C": ("A class definition", 6),
    }
)
BLOCK_SIZE, NUM_BLOCKS, BUDGET = 8, 12, 16


@dataclass(frozen=True)
class Run:
    """What came out of a run. steps: (StepInput, logits float32 [R, V]) of every forward pass."""

    outputs: Mapping[str, RequestOutput]
    events: list[Event]
    steps: list[tuple[Any, Any]]
    engine: Engine

    def tokens(self, request_id: str) -> list[int]:
        """The tokens a request was answered with."""
        return list(self.outputs[request_id].outputs[0].token_ids)


class Recorder:
    """Stands before the engine's runner and keeps every step's input and logits."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.steps: list[tuple[Any, Any]] = []

    def forward(self, step: Any) -> Any:
        logits = self.runner.forward(step)
        self.steps.append((step, logits))
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)


@cache
def tiny() -> LoadedModel:
    """minifer-tiny in float32, loaded once a process."""
    return load_model("minifer-tiny", dtype="float32")


def run(
    requests: Mapping[str, tuple[str, int]] = TRIO,
    *,
    sampling: SamplingParams | None = None,
    model: LoadedModel | None = None,
    prepare: Callable[[Engine], None] | None = None,
    **options: Any,
) -> Run:
    """Serve {id: (prompt, tokens wanted)} to the end, greedily, and keep what happened.

    sampling: parameters instead of the greedy ones; `max_tokens` is the request's in any case.
    prepare: called with the engine before it gets the requests, to put something of one's own in.
    options: fields of `EngineConfig`; by default blocks of 8 tokens, 12 of them, and a budget of
    16 tokens a step. The clock is virtual, a millisecond a step.
    """
    sink = ListSink()
    settings = {
        "block_size": BLOCK_SIZE,
        "num_kv_blocks": NUM_BLOCKS,
        "max_num_batched_tokens": BUDGET,
        **options,
    }
    engine: Engine = Engine.from_loaded(
        model if model is not None else tiny(),
        EngineConfig(**settings),
        sinks=[sink],
        clock=lambda: engine.events.step / 1000,
    )
    engine.runner = recorder = Recorder(engine.runner)
    if prepare is not None:
        prepare(engine)
    params = sampling or SamplingParams(temperature=0, ignore_eos=True)
    for name, (prompt, max_tokens) in requests.items():
        engine.add_request(name, prompt, params.with_(max_tokens=max_tokens))
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests:
        outputs |= {output.request_id: output for output in engine.step()}
    return Run(outputs, sink.events, recorder.steps, engine)
