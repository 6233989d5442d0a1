"""Our routing policies as Ray Serve's request router.

Ray makes one router for each deployment handle, in the handle's process, and asks it for every
request: which replicas, in which order? Ray then sends the request to the first that has room.

::

    handle.remote(call) ─▶ choose_replicas ─▶ minifer.routing.Router.decide ─▶ [[best], [others]]
                           on_request_routed, on_request_completed ─▶ its LoadTracker and KVIndex

What replicas hold is known from what was sent there: Ray carries a replica's reports
(`record_routing_stats`) as a value that is replaced, not as a stream, so events would get lost.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from minifer.routing.policies import make_policy
from minifer.routing.policy import Decision, NoReplicaError
from minifer.routing.router import Router
from minifer.routing.tracker import Assignment
from minifer.serving.ray_serve.call import Call


class PolicyRouter(RequestRouter):
    """Chooses by one of `minifer.routing`'s policies. All of it runs on Ray's routing loop."""

    # Seconds a replica may take to say how long its queue is, before the request goes to the next:
    # Ray's tenth of a second would send it away from its prefix while a node is busy.
    queue_len_response_deadline_s = 1.0
    max_queue_len_response_deadline_s = 5.0

    def initialize_state(self, router: str = "prefix_affinity", seed: int = 0) -> None:
        """Called by Ray with `request_router_kwargs`."""
        self._router = Router(make_policy(router, seed))
        self._assigned: dict[str, Assignment] = {}  # by Ray's id of the request

    # -- who is there

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._note_replicas()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._note_replicas()

    def _note_replicas(self) -> None:
        """Follow the replicas that are there, and take over their last reports."""
        tracker, here = self._router.tracker, self._by_name()
        for state in tracker.replicas():
            if state.name not in here:
                self._router.remove(state.name)
        for name in sorted(here):
            if name not in tracker:
                self._router.add(name)
            tracker.report(name, kv_usage=here[name].routing_stats.get("kv_usage"))

    def _by_name(self) -> dict[str, RunningReplica]:
        return {replica_name(key): replica for key, replica in self.curr_replicas.items()}

    # -- a request

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The policy's choice, then the others, then those the request should avoid.

        Never nothing while there are replicas: one of Ray's few routing tasks would ask again for
        ever, even for a request that was cancelled, and others could not be routed.
        """
        call = _call_of(pending_request)
        if call is None or pending_request is None or pending_request.future.done():
            return [candidate_replicas]
        here = self._by_name()
        call.replicas = tuple(sorted(here))
        if call.only is not None:
            call.decision = Decision(call.only, 0, "asked for")
            meant = [here[name] for name in call.replicas if name == call.only]
            others = [here[name] for name in call.replicas if name != call.only]
            return [meant, others]  # whoever else gets it says that it is another
        self._note_replicas()
        call.decision = self._decide(call)
        if call.decision is None:
            return [candidate_replicas]
        best = call.decision.replica
        self._assign(pending_request, call, best)
        others = [here[name] for name in call.replicas if name != best and name not in call.avoid]
        avoided = [here[name] for name in call.replicas if name != best and name in call.avoid]
        return [[here[best]], others, avoided]

    def _decide(self, call: Call) -> Decision | None:
        """A replica that has failed on the request is better than none."""
        for exclude in (call.avoid, ()):
            try:
                return self._router.decide(call.request, exclude=exclude)
            except NoReplicaError:
                continue
        return None

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """A replica has taken the request: perhaps another one than was chosen."""
        call = _call_of(pending_request)
        if call is None or call.only is not None:
            return
        name = replica_name(replica_id)
        self._assign(pending_request, call, name)
        self._router.index.record(name, call.request.prefix_keys)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """It has ended there: answered, failed, refused or left."""
        self._finish(internal_request_id, replica_name(replica_id))

    # -- what is counted

    def _assign(self, pending: PendingRequest, call: Call, name: str) -> None:
        """The request is the load of this replica, from now on and of no other."""
        key, tracker = pending.metadata.internal_request_id, self._router.tracker
        if (earlier := self._assigned.get(key)) is not None:
            if earlier.replica == name and not earlier.finished:
                return
            tracker.finished(earlier)
        if name not in tracker:
            return  # it has gone meanwhile
        expected = call.decision is not None and call.decision.replica == name
        cached = call.decision.cached_tokens if expected and call.decision else 0
        assignment = tracker.sent(call.request, name, cached)
        self._assigned[key] = assignment
        loop = asyncio.get_running_loop()
        call.on_first_token = partial(loop.call_soon_threadsafe, tracker.first_token, assignment)
        call.on_left = partial(loop.call_soon_threadsafe, self._finish, key, name)
        if not pending.future.done():  # cancelled while it waits for a replica, it goes nowhere
            pending.future.add_done_callback(partial(self._if_cancelled, key, name))

    def _if_cancelled(self, key: str, name: str, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            self._finish(key, name)

    def _finish(self, key: str, name: str) -> None:
        assignment = self._assigned.get(key)
        if assignment is not None and assignment.replica == name:
            self._router.tracker.finished(assignment)
            del self._assigned[key]


def replica_name(replica_id: ReplicaID) -> str:
    """As replicas call themselves, too."""
    return str(replica_id.unique_id)


def _call_of(pending: PendingRequest | None) -> Call | None:
    first = pending.args[0] if pending is not None and pending.args else None
    return first if isinstance(first, Call) else None
