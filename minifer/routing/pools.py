"""What every policy needs: who may be chosen, and which of them is the least of something."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minifer.routing.policy import Decision, NoReplicaError, ReplicaState, Role, RoutingRequest

_WORKS_AS = {  # who else does the work of a role
    Role.MIXED: (Role.MIXED,),
    Role.PREFILL: (Role.PREFILL, Role.PRE_PREFILL, Role.MIXED),
    Role.PRE_PREFILL: (Role.PRE_PREFILL,),
    Role.DECODE: (Role.DECODE, Role.MIXED),
}


def pool(replicas: Sequence[ReplicaState], role: Role) -> list[ReplicaState]:
    """Those that can do the work of `role`, in their order: what `choose` is given for one stage.

    Prefill is done by PREFILL, PRE_PREFILL and MIXED replicas, decoding by DECODE and MIXED ones.
    """
    return [replica for replica in replicas if replica.role in _WORKS_AS[role]]


def available(replicas: Sequence[ReplicaState]) -> list[ReplicaState]:
    """The healthy ones. Raises `NoReplicaError` when there is none."""
    healthy = [replica for replica in replicas if replica.healthy]
    if not healthy:
        raise NoReplicaError(f"none of {len(replicas)} replicas is healthy")
    return healthy


def least(
    replicas: Sequence[ReplicaState],
    cost: Callable[[ReplicaState], Any],
    rng: random.Random,
) -> ReplicaState:
    """The replica of the lowest cost, drawn among equals.

    The first among equals would be chosen by every router at once, and always
    (ai-dynamo/dynamo#3581).
    """
    costs = [cost(replica) for replica in replicas]
    lowest = min(costs)
    equals = [r for r, value in zip(replicas, costs, strict=True) if value == lowest]
    return equals[0] if len(equals) == 1 else rng.choice(equals)


def cached_tokens(replica: str, request: RoutingRequest, matched: Mapping[str, int]) -> int:
    """Leading tokens of the prompt that the replica holds, at most all of them."""
    return min(matched.get(replica, 0), request.num_tokens)


def decide(
    replica: ReplicaState, request: RoutingRequest, matched: Mapping[str, int], reason: str
) -> Decision:
    return Decision(replica.name, cached_tokens(replica.name, request, matched), reason)


def check_shares(**options: float) -> None:
    """Each must be in [0, 1]. Raises as `require`."""
    for name, value in options.items():
        require(0 <= value <= 1, name, value, "in [0, 1]")


def check_least(least: float, **options: float) -> None:
    """Each must be at least that. Raises as `require`."""
    for name, value in options.items():
        require(value >= least, name, value, f"at least {least}")


def require(ok: bool, name: str, value: object, limit: str) -> None:
    """Check an option of a policy. Raises `ValueError` naming option, value and limit."""
    if not ok:
        raise ValueError(f"{name} must be {limit}, got {value}")
