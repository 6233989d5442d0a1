"""Policies that ask who is free, and not who has seen the prompt before.

They are the baselines: what a cache-aware policy gains has to be measured against the best of
these, which is `least_work` where prompts differ in length, and not against `round_robin`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from minifer.routing.policy import Decision, ReplicaState, RoutingRequest
from minifer.routing.pools import available, decide, least


class RandomChoice:
    """Any replica, all equally likely."""

    def __init__(self, *, seed: int = 0) -> None:
        self._rng = random.Random(f"{seed}/random")

    def choose(
        self,
        request: RoutingRequest,
        replicas: Sequence[ReplicaState],
        matched: Mapping[str, int],
    ) -> Decision:
        return decide(self._rng.choice(available(replicas)), request, matched, "random")


class RoundRobin:
    """Whoever was chosen longest ago, the first of the pool at the start.

    Counts per replica and not per call: with one counter, a policy that is asked in turn for a
    prefill and a decode replica would give each pool of two only every other number.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._chosen: dict[str, int] = {}  # replica → number of the call that chose it
        self._calls = 0

    def choose(
        self,
        request: RoutingRequest,
        replicas: Sequence[ReplicaState],
        matched: Mapping[str, int],
    ) -> Decision:
        replica = min(available(replicas), key=lambda r: self._chosen.get(r.name, 0))
        self._calls += 1
        self._chosen.pop(replica.name, None)
        self._chosen[replica.name] = self._calls
        if len(self._chosen) > 8 * len(replicas) + 64:  # names that are long gone
            del self._chosen[next(iter(self._chosen))]
        return decide(replica, request, matched, "turn")


class LeastLoad:
    """The replica with the fewest requests."""

    def __init__(self, *, seed: int = 0) -> None:
        self._rng = random.Random(f"{seed}/least_load")

    def choose(
        self,
        request: RoutingRequest,
        replicas: Sequence[ReplicaState],
        matched: Mapping[str, int],
    ) -> Decision:
        replica = least(available(replicas), lambda r: r.num_requests, self._rng)
        return decide(replica, request, matched, "load")


class LeastWork:
    """The replica with the least prefill before it: in seconds, or in tokens.

    Seconds are compared when every replica with prompts to compute can say how long that takes;
    a second of one replica is a second of another, which is not true of tokens on unequal devices.
    Equal ones differ by their number of requests, which is how a pool that only decodes is
    balanced.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._rng = random.Random(f"{seed}/least_work")

    def choose(
        self,
        request: RoutingRequest,
        replicas: Sequence[ReplicaState],
        matched: Mapping[str, int],
    ) -> Decision:
        candidates = available(replicas)
        timed = all(r.prefill_seconds > 0 for r in candidates if r.prefill_tokens > 0)

        def work(replica: ReplicaState) -> tuple[float, int]:
            backlog = replica.prefill_seconds if timed else replica.prefill_tokens
            return (backlog, replica.num_requests)

        return decide(least(candidates, work, self._rng), request, matched, "work")


class PowerOfTwo:
    """The less loaded of two drawn at random (Mitzenmacher, "The Power of Two Choices", 2001).

    Nearly as even as `least_load`, and safe with a view that is out of date: routers that share
    one do not all run to the same replica (ai-dynamo/dynamo#589).
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._rng = random.Random(f"{seed}/power_of_two")

    def choose(
        self,
        request: RoutingRequest,
        replicas: Sequence[ReplicaState],
        matched: Mapping[str, int],
    ) -> Decision:
        candidates = available(replicas)
        two = self._rng.sample(candidates, min(2, len(candidates)))
        replica = least(two, lambda r: r.num_requests, self._rng)
        return decide(replica, request, matched, "load")
