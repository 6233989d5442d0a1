"""minifer's engine, asked like any other: requests in, the moments of their tokens out.

The engine reports how long each stage of a step took. Only its step is listened to: the scheduler,
the KV manager and post-processing go without events, as they do for a user who watches nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minifer.engine import Engine
from minifer.events import EventBus, ListSink
from minifer.outputs import RequestOutput
from minifer.perf.speed.cells import Ask
from minifer.perf.speed.traffic import Traffic
from minifer.request import OutputKind, SamplingParams

STAGES = ("scheduled", "prepared", "forward", "sampled", "postprocessed")


@dataclass(frozen=True)
class StepLaps:
    """ended: when its outputs were there. seconds: of each of `STAGES`."""

    ended: float
    seconds: tuple[float, ...]

    @property
    def whole(self) -> float:
        return sum(self.seconds)

    @property
    def preparation(self) -> float:
        """Seconds of scheduling and of laying the batch out; its tensors are made in `forward`."""
        return self.seconds[0] + self.seconds[1]


@dataclass(frozen=True)
class Run:
    """Requests answered. started: before the first was added. tokens: what each was answered.
    cached: tokens of each prompt that were found in the prefix cache.
    speculation: drafts proposed and accepted meanwhile, where the engine drafts.
    repeated: the engine was asked before, so its first tokens may come from its prefix cache."""

    started: float
    stamps: list[list[float]]
    tokens: list[list[int]]
    steps: list[StepLaps]
    cached: list[int] = field(default_factory=list)
    speculation: dict[str, float] = field(default_factory=dict)
    repeated: bool = False


class Session:
    """An engine that is asked again and again. options: fields of `EngineConfig`.

    Raises `ValueError` for what the engine refuses, `RuntimeError` when a request fails in it.
    """

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        self.engine = Engine.from_pretrained(model, **options)
        self._sink = ListSink()
        # The engine's own bus alone: what it handed to the stages stays silent.
        self.engine.events = EventBus(self._sink, clock=time.perf_counter)
        self._count = 0

    @property
    def model(self) -> Any:
        return self.engine.runner.model  # type: ignore[attr-defined]

    @property
    def dtype(self) -> str:
        """Of activations and KV."""
        return str(self._kv.keys[0].dtype).removeprefix("torch.")

    @property
    def kv_bytes(self) -> int:
        """Of the whole pool."""
        return sum(t.nbytes for t in (*self._kv.keys, *self._kv.values))

    @property
    def _kv(self) -> Any:
        return self.engine.runner.kv  # type: ignore[attr-defined]

    def traffic(self) -> Traffic | None:
        """None for a loop model, and where a draft model reads weights of its own."""
        if getattr(self.engine.config, "speculative_method", "none") not in ("none", "ngram"):
            return None
        return Traffic.of(self.model, self.model.config, self._kv.keys[0].dtype.itemsize)

    def run(self, asks: Sequence[Ask]) -> Run:
        """All requests at once, to their ends; greedy, no token ends one early."""
        numbers: dict[str, int] = {}
        before = _speculation(self.engine)
        run = Run(time.perf_counter(), [[] for _ in asks], [[] for _ in asks], [], [0] * len(asks))
        for i, ask in enumerate(asks):
            params = SamplingParams(
                temperature=0,
                max_tokens=ask.max_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=OutputKind.DELTA,
            )
            numbers[name := f"r{self._count}"] = i
            self._count += 1
            self.engine.add_request(name, list(ask.prompt), params)
        while self.engine.has_unfinished_requests:
            self._sink.events.clear()
            outputs = self.engine.step()
            now = time.perf_counter()
            for output in outputs:
                self._keep(output, numbers[output.request_id], run, now)
            if laps := self._laps():
                run.steps.append(StepLaps(now, laps))
        after = _speculation(self.engine)
        run.speculation.update({name: after[name] - before.get(name, 0) for name in after})
        return run

    def _keep(self, output: RequestOutput, i: int, run: Run, now: float) -> None:
        (piece,) = output.outputs
        if piece.finish_reason == "error":
            raise RuntimeError(f"a request failed: {piece.stop_reason}")
        run.tokens[i] += piece.token_ids
        run.cached[i] = output.num_cached_tokens
        run.stamps[i] += [now] * len(piece.token_ids)

    def _laps(self) -> tuple[float, ...]:
        seconds = {e.name: e.data.get("duration", 0.0) for e in self._sink.events}
        if "step.postprocessed" not in seconds:
            return ()
        return tuple(seconds.get(f"step.{stage}", 0.0) for stage in STAGES)

    def close(self) -> None:
        self.engine.close()


def _speculation(engine: Engine) -> dict[str, float]:
    """The engine's counters of drafts; empty where it does not draft."""
    stats = getattr(engine, "speculation_stats", None)
    if stats is None or getattr(engine.config, "speculative_method", "none") == "none":
        return {}
    return {
        "drafted": float(stats.num_draft_tokens),
        "accepted": float(stats.num_accepted_tokens),
    }
