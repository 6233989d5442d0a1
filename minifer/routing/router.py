"""Policy, index and loads in one: what a front end asks for every request.

::

    router = Router(make_policy("prefix_affinity"))
    router.add("a"); router.add("b")
    assignment = router.route(request)        # send it to assignment.replica
    router.tracker.first_token(assignment)    # its first token came
    router.tracker.finished(assignment)       # its last one, or an error

The HTTP router and Ray's run this on their event loop, the simulator on its virtual clock.
"""

from __future__ import annotations

from collections.abc import Collection

from minifer.routing.index import KVIndex
from minifer.routing.policy import Decision, NoReplicaError, Role, RoutingPolicy, RoutingRequest
from minifer.routing.tracker import Assignment, LoadTracker


class Router:
    """Chooses a replica for each request, and remembers that it did. One thread's.

    index: of what replicas hold; one that knows only what was sent where unless given. tracker:
    of their loads.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        index: KVIndex | None = None,
        tracker: LoadTracker | None = None,
    ) -> None:
        self.policy = policy
        self.index = index if index is not None else KVIndex()
        self.tracker = tracker if tracker is not None else LoadTracker()

    def add(self, name: str, role: Role = Role.MIXED) -> None:
        """A replica to send to. Raises `ValueError` for a name that is taken."""
        self.tracker.add(name, role)
        self.index.add(name)

    def remove(self, name: str) -> None:
        """The replica is gone, with its cache and its requests."""
        self.tracker.remove(name)
        self.index.remove(name)

    def decide(
        self,
        request: RoutingRequest,
        role: Role | None = None,
        exclude: Collection[str] = (),
    ) -> Decision:
        """Which replica would take the request; nothing is remembered but by the policy.

        role: the stage that is asked for, when prefill and decode are apart. exclude: replicas
        that have failed it. Raises `NoReplicaError` when none is left.
        """
        replicas = [
            state
            for state in self.tracker.replicas(role)
            if state.healthy and state.name not in exclude
        ]
        if not replicas:
            wanted = "" if role is None else f" for {role.value}"
            raise NoReplicaError(f"no healthy replica{wanted} is left")
        return self.policy.choose(request, replicas, self.index.matched_tokens(request))

    def route(
        self,
        request: RoutingRequest,
        role: Role | None = None,
        exclude: Collection[str] = (),
    ) -> Assignment:
        """Decide, and count the request to its replica from now on: `decide` and `send`."""
        return self.send(request, self.decide(request, role, exclude))

    def send(self, request: RoutingRequest, decision: Decision) -> Assignment:
        """Count the request to the replica that was decided on."""
        self.index.record(decision.replica, request.prefix_keys)
        return self.tracker.sent(request, decision.replica, decision.cached_tokens)
