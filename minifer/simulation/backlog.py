"""What one node has left to prefill: what routers ask for before they send it more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from minifer.scheduling.plan import ScheduledRequest
from minifer.simulation.sim_request import SimRequest

_SOON = 1e-9  # seconds: a backlog that is not nothing


class Backlog:
    """Requests whose first token on this node is still to come.

    price: seconds to that token for a request of which so many tokens are computed, and which has
    the node to itself. tokens: left, of all requests.
    """

    def __init__(self, price: Callable[[SimRequest, int], float]) -> None:
        self.tokens = 0
        self._price = price
        self._seconds = 0.0
        self._requests: dict[SimRequest, None] = {}
        self._after: list[tuple[SimRequest, int, float]] = []  # left when the step is over
        self._begun = 0.0
        self._relief = 0.0  # seconds by which the step shortens the backlog

    def __contains__(self, request: SimRequest) -> bool:
        return request in self._requests

    @property
    def num_blocks(self) -> int:
        """KV blocks that its requests hold."""
        return sum(len(request.block_table) for request in self._requests)

    @property
    def shrinks(self) -> bool:
        """Does the step that runs work on any of it?"""
        return bool(self._after)

    def put(self, request: SimRequest, tokens: int, seconds: float) -> None:
        """So much is left of a request; 0 tokens: it is done here."""
        self.tokens += tokens - request.prefill_tokens
        self._seconds += seconds - request.prefill_seconds
        request.prefill_tokens, request.prefill_seconds = tokens, seconds
        if tokens:
            self._requests[request] = None
            return
        self._requests.pop(request, None)
        if not self._requests:
            self._seconds = 0.0  # exact, whatever the rounding of the sums

    def begin(self, entries: Sequence[ScheduledRequest], now: float) -> None:
        """A step begins; what it works on for the first time has been admitted."""
        self._after, self._relief, self._begun = [], 0.0, now
        if not self._requests:
            return
        for entry in entries:
            request = cast(SimRequest, entry.request)
            if request in self._requests:
                if request.record.admitted is None:
                    request.record.admitted = now
                tokens = request.num_tokens - entry.end
                seconds = self._price(request, entry.end) if tokens else 0.0
                self._relief += request.prefill_seconds - seconds
                self._after.append((request, tokens, seconds))

    def end(self) -> None:
        """The step is over."""
        after, self._after, self._relief = self._after, [], 0.0
        for request, tokens, seconds in after:
            self.put(request, tokens, seconds)

    def seconds(self, now: float, end: float) -> float:
        """Seconds of prefill that are left. end: of the step that runs, if one does."""
        seconds = self._seconds
        if self._relief > 0:
            seconds -= self._relief * (now - self._begun) / (end - self._begun)
        return max(seconds, _SOON) if self.tokens else 0.0
