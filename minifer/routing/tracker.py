"""How loaded each replica is: counted from what was sent there, and from what it reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minifer.routing.policy import ReplicaState, Role, RoutingRequest
from minifer.routing.pools import pool


@dataclass(eq=False, slots=True)
class Assignment:
    """A request, or one stage of it, on a replica: what it adds to the load there."""

    replica: str
    request: RoutingRequest
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_blocks: int = 0
    finished: bool = False


class LoadTracker:
    """A `ReplicaState` for each replica, kept up to date by the router that sends to it.

    A request counts from the moment it is sent, before its replica knows of it: two that come at
    once see each other. `first_token` ends its prefill, `finished` ends it, answered or not. With
    several routers each counts its own; what a replica reports (`report`) is everybody's.

    prefill_seconds: (tokens to compute, tokens cached) → seconds, if somebody can say.
    One thread's.
    """

    def __init__(self, prefill_seconds: Callable[[int, int], float] | None = None) -> None:
        self._prefill_seconds = prefill_seconds
        self._states: dict[str, ReplicaState] = {}
        self._assigned: dict[Assignment, ReplicaState] = {}

    def add(self, name: str, role: Role = Role.MIXED) -> ReplicaState:
        """A replica to send to. Raises `ValueError` for a name that is taken."""
        if name in self._states:
            raise ValueError(f"replica names must differ, got {name!r} twice")
        state = self._states[name] = ReplicaState(name, role)
        return state

    def remove(self, name: str) -> None:
        """The replica is gone; what it had is nobody's load until it is sent elsewhere."""
        state = self._states.pop(name, None)
        self._assigned = {a: s for a, s in self._assigned.items() if s is not state}

    def __contains__(self, name: str) -> bool:
        return name in self._states

    def __getitem__(self, name: str) -> ReplicaState:
        return self._states[name]

    def replicas(self, role: Role | None = None) -> list[ReplicaState]:
        """Those that can do the work of a role, or all; in the order in which they were added."""
        states = list(self._states.values())
        return states if role is None else pool(states, role)

    def report(
        self, name: str, *, healthy: bool | None = None, kv_usage: float | None = None
    ) -> None:
        """What a replica, or a health check, says of it. Names that are gone are ignored.

        kv_usage: in [0, 1], or `ValueError` is raised.
        """
        if kv_usage is not None and not 0 <= kv_usage <= 1:
            raise ValueError(f"kv_usage must be in [0, 1], got {kv_usage}")
        state = self._states.get(name)
        if state is None:
            return
        if healthy is not None:
            state.healthy = healthy
        if kv_usage is not None:
            state.kv_usage = kv_usage

    def sent(self, request: RoutingRequest, replica: str, cached_tokens: int = 0) -> Assignment:
        """A request was sent to a replica that has these tokens of its prompt already.

        One that goes to a decode replica with all of its KV has `cached_tokens` of its length, and
        generates at once: call `first_token`.
        """
        state = self._states[replica]
        new = max(0, request.num_tokens - cached_tokens)
        seconds = 0.0
        if self._prefill_seconds is not None and new:
            seconds = self._prefill_seconds(new, request.num_tokens - new)
        assignment = Assignment(replica, request, new, seconds)
        self._assigned[assignment] = state
        state.num_requests += 1
        state.prefill_tokens += new
        state.prefill_seconds += seconds
        return assignment

    def first_token(self, assignment: Assignment) -> None:
        """Its prompt is computed; from now on it decodes."""
        self.generated(assignment, 1)

    def generated(self, assignment: Assignment, num_tokens: int) -> None:
        """It has generated so many tokens: its KV has grown."""
        state = self._assigned.get(assignment)
        if state is None:
            return
        self._end_prefill(assignment, state)
        request = assignment.request
        blocks = -(-(request.num_tokens + num_tokens) // request.block_size)
        state.decode_blocks += blocks - assignment.decode_blocks
        assignment.decode_blocks = blocks

    def finished(self, assignment: Assignment) -> None:
        """It is over there: answered, failed, or passed on. A second time changes nothing."""
        assignment.finished = True
        state = self._assigned.pop(assignment, None)
        if state is None:
            return
        self._end_prefill(assignment, state)
        state.num_requests -= 1
        state.decode_blocks -= assignment.decode_blocks
        assignment.decode_blocks = 0

    def _end_prefill(self, assignment: Assignment, state: ReplicaState) -> None:
        state.prefill_tokens -= assignment.prefill_tokens
        state.prefill_seconds -= assignment.prefill_seconds
        if state.prefill_tokens == 0:
            state.prefill_seconds = 0.0  # exact, whatever the float error of the sums
        assignment.prefill_tokens, assignment.prefill_seconds = 0, 0.0
