"""What a router sees: random states to choose from, and beliefs beside the truth."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from minifer import Engine
from minifer.course.pictures.routing_data import Ask, answer, new_engine
from minifer.routing.index import KVIndex
from minifer.routing.policy import ReplicaState, RoutingRequest
from minifer.routing.publisher import KVEventPublisher, held_blocks

REPLICA = "x"


def random_choices(
    count: int, seed: int = 10
) -> Iterator[tuple[RoutingRequest, list[ReplicaState], dict[str, int]]]:
    """A prompt, two replicas in different states, and what they hold of it; no two alike."""
    rng = random.Random(seed)
    for i in range(count):
        states = [
            ReplicaState(name, prefill_tokens=rng.randrange(999), decode_blocks=rng.randrange(99))
            for name in "xy"
        ]
        states[1].decode_blocks += rng.random()  # type: ignore[assignment]  # never a tie
        held = {state.name: rng.randrange(2_000) for state in states}
        yield RoutingRequest(str(i), rng.randrange(1, 2_000)), states, held


@dataclass
class Beliefs:
    """One replica, and two routers: one hears its events, one only remembers what it sent.

    truth, heard, remembered: blocks that it holds, or is said to, after each request.
    """

    engine: Engine
    publisher: KVEventPublisher
    hears: KVIndex
    remembers: KVIndex
    truth: list[int] = field(default_factory=list)
    heard: list[int] = field(default_factory=list)
    remembered: list[int] = field(default_factory=list)

    @property
    def held(self) -> int:
        """Blocks that can be found in the engine now."""
        return sum(map(len, held_blocks(self.engine.kv).values()))


def watch_beliefs(asks: Sequence[Ask], num_blocks: int) -> Beliefs:
    """Serve `asks` one after the other with a cache of `num_blocks`, one token each."""
    engine = new_engine(num_kv_blocks=num_blocks)
    publisher = KVEventPublisher(engine.kv, REPLICA, epoch=1)
    seen = Beliefs(engine, publisher, KVIndex(clock=lambda: 0.0), KVIndex(clock=lambda: 0.0))
    for index in (seen.hears, seen.remembers):
        index.add(REPLICA)
    for ask in asks:
        answer(engine, ask.name, ask.prompt, 1)
        seen.remembers.record(REPLICA, ask.keys)
        seen.hears.apply(publisher.take())
        seen.truth.append(seen.held)
        seen.heard.append(seen.hears.num_blocks(REPLICA))
        seen.remembered.append(seen.remembers.num_blocks(REPLICA))
    return seen
