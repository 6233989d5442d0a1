"""Who notices: the detectors, each of which watches a real engine while it serves.

Three kinds. Some are part of the engine, and are only read here: the check for finite logits, the
guards, debug mode. Some compare what went in with what came out, which costs next to nothing. And
some ask the engine again when it is idle: the canary, and the replay of one request in N.

A detector that reports nothing has proven nothing; one that reports without a fault is useless.
`matrix.py` counts both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from minifer.debug import DebugError
from minifer.engine import Engine
from minifer.events import Event
from minifer.execution.sampler import NON_FINITE
from minifer.kv.invariants import check_invariants
from minifer.outputs import RequestOutput
from minifer.postprocessing.guards.tool_loop import tool_loop
from minifer.request import SamplingParams

Message = Mapping[str, Any]


class Detector:
    """Watches one engine. `alarms` says what it saw; every method may add to it.

    name: a slug. title: what it does, in a line. debug: does it need `EngineConfig.debug`?
    """

    name: ClassVar[str]
    title: ClassVar[str]
    debug: ClassVar[bool] = False

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.alarms: list[str] = []

    def on_request(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        """A request was admitted."""

    def on_step(self) -> None:
        """A step is over."""

    def on_output(self, output: RequestOutput) -> None:
        """A caller gets this."""

    def on_conversation(self, messages: Sequence[Message]) -> None:
        """A chat request brings this history."""

    def on_exception(self, error: Exception) -> None:
        """A call of the engine raised."""

    def on_idle(self) -> None:
        """Nobody is served: time for what costs a few steps of its own."""


class _Errors(Detector, ABC):
    """Requests that ended with an error whose text `matches`."""

    def on_output(self, output: RequestOutput) -> None:
        for answer in output.outputs:
            reason = str(answer.stop_reason)
            if answer.finish_reason == "error" and self.matches(reason):
                self.alarms.append(f"{output.request_id}: {reason}")

    @abstractmethod
    def matches(self, reason: str) -> bool:
        """Is this the error that the detector stands for?"""


class FiniteLogits(_Errors):
    name = "finite-logits"
    title = "every row of logits is checked for NaN and infinity before a token is drawn"

    def matches(self, reason: str) -> bool:
        return reason in NON_FINITE


class Poison(_Errors):
    name = "poison"
    title = "memory nobody owns holds NaN, and so do bands around the pool"
    debug = True

    def matches(self, reason: str) -> bool:
        return reason in NON_FINITE or reason.startswith("DebugError: something wrote")


class Shadow(_Errors):
    name = "shadow-kv"
    title = "what each slot holds is tracked by hand, and compared with who reads it"
    debug = True

    def matches(self, reason: str) -> bool:
        return reason.startswith("DebugError:") and "something wrote" not in reason


class PoolInvariants(Detector):
    name = "pool-invariants"
    title = "reference counts, free queue, index and tables agree after every step"

    def on_step(self) -> None:
        scheduler = self.engine.scheduler
        try:
            check_invariants(self.engine.kv, [*scheduler.running, *scheduler.waiting])
        except DebugError as error:
            self.alarms.append(str(error))

    def on_exception(self, error: Exception) -> None:
        self.alarms.append(f"{type(error).__name__}: {error}")

    def on_idle(self) -> None:
        pool = self.engine.kv.pool
        if pool.num_free < pool.num_blocks:
            self.alarms.append(f"{pool.num_blocks - pool.num_free} blocks are never given back")


class TierCheck(Detector):
    name = "tier-check"
    title = "what goes to a tier is finite (fresh memory is poisoned), what comes back unharmed"
    debug = True

    def on_idle(self) -> None:
        tiers = self.engine.kv.tiers
        if tiers is not None and tiers.stats.rejected:
            self.alarms.append(f"{tiers.stats.rejected} blocks to be stored held NaN or infinity")
        if tiers is not None and tiers.stats.corrupt:
            self.alarms.append(f"{tiers.stats.corrupt} files failed a check")


class HitAudit(Detector):
    name = "hit-audit"
    title = "a prefix hit is a beginning of something that this tenant has sent or received"

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._salts: dict[str, str | None] = {}
        self._sent: dict[tuple[str | None, str], list[list[int]]] = {}  # (salt, request) → tokens

    def on_request(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        self._salts[request_id] = params.cache_salt
        self._sent[params.cache_salt, request_id] = [prompt]

    def on_output(self, output: RequestOutput) -> None:
        if not output.finished or output.request_id not in self._salts:
            return
        name, salt = output.request_id, self._salts.pop(output.request_id)
        prompt = output.prompt_token_ids
        hit = prompt[: output.num_cached_tokens]
        others = (sent for who, sent in self._sent.items() if who[0] == salt and who[1] != name)
        if hit and not any(tokens[: len(hit)] == hit for sent in others for tokens in sent):
            self.alarms.append(f"{name}: {len(hit)} tokens found that nobody had sent")
        self._sent[salt, name] = [prompt + answer.token_ids for answer in output.outputs]


class EndToken(Detector):
    name = "end-token"
    title = "nothing follows a token that ends a reply"

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        # From the checkpoint, not from the engine: what this one ends at may be the fault.
        model: Any = getattr(engine.runner, "model", None)
        self._end = set(model.config.eos_token_ids) if model is not None else set()
        if engine.tokenizer is not None:
            self._end.add(engine.tokenizer.eos_token_id)
        self._ignoring: set[str] = set()

    def on_request(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        if params.ignore_eos or params.min_tokens:
            self._ignoring.add(request_id)

    def on_output(self, output: RequestOutput) -> None:
        if output.request_id in self._ignoring:
            return
        for answer in output.outputs:
            early = [t for t in answer.token_ids[:-1] if t in self._end]
            if early:
                self.alarms.append(f"{output.request_id} went on after token {early[0]}")


class _Guard(Detector):
    """Reads the alarms of one of the engine's guards from its events."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        engine.events.sinks.append(self)

    def write(self, event: Event) -> None:
        if event.name == "guard.tripped" and event.data["guard"] == self.guard:
            self.alarms.append(f"{event.request_id}: {event.data['reason']}")

    guard: ClassVar[str]


class Repetition(_Guard):
    name = guard = "repetition"
    title = "a reply whose tail says the same over and over"


class ScriptDrift(_Guard):
    name, guard = "script-drift", "language_drift"
    title = "a reply in a script that neither the prompt uses nor the user asked for"


class ToolLoop(Detector):
    name = "tool-loop"
    title = "a conversation that calls the same tool with the same arguments again and again"

    def on_conversation(self, messages: Sequence[Message]) -> None:
        reason = tool_loop(messages)
        if reason is not None:
            self.alarms.append(reason)
