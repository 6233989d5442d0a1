"""When which request comes, and what its blocks are called: a workload, made ready to be served."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from minifer.routing.policy import Role
from minifer.simulation.cluster import Cluster
from minifer.simulation.workloads.arrivals import Arrival, Conversation, Workload


@dataclass(frozen=True, slots=True)
class Coming:
    """A request and the second at which it comes.

    names: of its blocks, those that its answer will fill included where the next turn tells them.
    rest: turns of the same conversation that follow. follows: it came after another's end.
    """

    time: float
    arrival: Arrival
    names: tuple[int, ...]
    rest: tuple[Arrival, ...] = ()
    follows: bool = False

    def next_turn(self, end: float) -> Coming | None:
        """What the user asks next, when the answer is over at `end`."""
        return _turn(end + self.rest[0].time, self.rest, follows=True) if self.rest else None


def comings(workload: Workload) -> Iterator[Coming]:
    """Requests that wait for no answer, by time; of equal times in the workload's order."""
    sessions = {
        (item.session, item.turn): item
        for item in workload
        if isinstance(item, Arrival) and item.block_names
    }
    first: list[Coming] = []
    for item in workload:
        if isinstance(item, Conversation):
            first.append(_turn(item.turns[0].time, item.turns))
        else:
            following = sessions.get((item.session, item.turn + 1))
            first.append(Coming(item.time, item, _names(item, following)))
    first.sort(key=lambda coming: coming.time)
    return iter(first)


def _turn(time: float, turns: tuple[Arrival, ...], follows: bool = False) -> Coming:
    following = turns[1] if len(turns) > 1 else None
    return Coming(time, turns[0], _names(turns[0], following), turns[1:], follows)


def _names(arrival: Arrival, following: Arrival | None) -> tuple[int, ...]:
    """The next prompt begins with this one and its answer, so it tells the names of both."""
    names = arrival.block_names
    if following is None or following.prompt_len < arrival.prompt_len + arrival.output_len:
        return names
    goes_on = following.block_names[: len(names)] == names
    return following.block_names if goes_on else names


def check(workload: Workload, cluster: Cluster) -> None:
    """Raise `ValueError` for a request that no node could serve, and for two with one id."""
    seen: set[str] = set()
    longest = {Role.MIXED: 0, Role.PREFILL: 0}
    for item in workload:
        if isinstance(item, Conversation) and not item.turns:
            raise ValueError("a conversation must have at least 1 turn, got 0")
        for arrival in item.turns if isinstance(item, Conversation) else (item,):
            name = arrival.request_id
            if name in seen:
                raise ValueError(f"request_id must be new, {name!r} is there twice")
            seen.add(name)
            if not 0 <= arrival.time < math.inf:
                raise ValueError(f"{name}: time must be at least 0 seconds, got {arrival.time}")
            if arrival.prompt_len < 1 or arrival.output_len < 1:
                raise ValueError(
                    f"{name}: prompt_len and output_len must be at least 1 token, got "
                    f"{arrival.prompt_len} and {arrival.output_len}"
                )
            if arrival.stored_len and not all(
                n.store or n.role is Role.DECODE for n in cluster.nodes
            ):
                raise ValueError(
                    f"{name} has stored_len={arrival.stored_len}, which needs nodes with a store"
                )
            longest[Role.PREFILL] = max(longest[Role.PREFILL], arrival.prompt_len)
            total = arrival.prompt_len + arrival.output_len - 1  # the last token needs no KV
            longest[Role.MIXED] = max(longest[Role.MIXED], total)
    for node in cluster.nodes:
        decodes = node.role in (Role.MIXED, Role.DECODE)
        needed = longest[Role.MIXED if decodes else Role.PREFILL]
        if needed > node.kv_capacity:
            raise ValueError(
                f"the longest request needs {needed} tokens of KV, node {node.name} has "
                f"{node.kv_capacity}: raise num_kv_blocks"
            )
