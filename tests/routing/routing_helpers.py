"""Requests, replicas and clocks for tests of the routing."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from minifer.routing.policy import ReplicaState, RoutingRequest
from minifer.routing.tracker import LoadTracker

BLOCK = 16


def make_request(
    num_tokens: int = 160, keys: Sequence[Hashable] = (), name: str = "r", block_size: int = BLOCK
) -> RoutingRequest:
    return RoutingRequest(name, num_tokens, tuple(keys), block_size)


def loaded(*loads: int) -> list[ReplicaState]:
    """Replicas a, b, c … with so many requests."""
    return [ReplicaState("abcdefghij"[i], num_requests=load) for i, load in enumerate(loads)]


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def send(policy, tracker: LoadTracker, request: RoutingRequest, matched=None) -> str:
    """Let the policy choose, and count the request there; it computes at once and never ends."""
    decision = policy.choose(request, tracker.replicas(), matched or {})
    tracker.first_token(tracker.sent(request, decision.replica, decision.cached_tokens))
    return decision.replica
