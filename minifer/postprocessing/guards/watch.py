"""The guards of all sequences of an engine, and how often each has seen something."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from minifer.events import EventBus
from minifer.postprocessing.guards import default_guards, requested_guards
from minifer.postprocessing.guards.alarm import Report
from minifer.postprocessing.hooks import TokenHook
from minifer.request import Request


class GuardWatch:
    """Puts guards on requests; counts and reports their alarms.

    action: of the default guards, as `EngineConfig.guards`. decode: token ids, skip special
    tokens → text; None where there is no text. trips: alarms by guard, since the start.
    watching: id of the sequence that took the last token; an alarm is about it.
    """

    def __init__(
        self, action: str, decode: Callable[[list[int], bool], str] | None, events: EventBus
    ) -> None:
        self.trips: Counter[str] = Counter()
        self.watching: str | None = None
        self._action = action
        self._decode = decode
        self._events = events

    def of(self, request: Request) -> list[TokenHook]:
        """The guards of a new sequence: the limits of the request itself, then the default ones."""
        decode, params = self._decode, request.params
        text = None
        if decode is not None and params.detokenize:
            text = lambda: decode(request.prompt_token_ids, True)  # noqa: E731
        own = requested_guards(params, self._reporter("stop"))
        return own + default_guards(self._action, text, self._reporter(self._action))

    def _reporter(self, action: str) -> Report:
        """A plain function: hooks are copied when a sequence forks, and a method would take its
        object along."""
        return lambda guard, reason: self.trip(guard, reason, action)

    def trip(self, guard: str, reason: str, action: str, request_id: str | None = None) -> None:
        """Count an alarm and emit `guard.tripped`. request_id: None is the sequence watched."""
        self.trips[guard] += 1
        if self._events:
            about = self.watching if request_id is None else request_id
            data = {"guard": guard, "reason": reason, "action": action}
            self._events.emit("postprocessing", "guard.tripped", about, None, **data)
