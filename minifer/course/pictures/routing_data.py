"""Replicas at work: real engines behind a real router, and the same traffic in the simulator.

All replicas share one clock, on which a step lasts one unit. Whoever comes at a time is routed
before the steps that end then, as in `minifer.simulation`; so both worlds can be compared to the
token and to the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

from minifer import Engine, EngineConfig, SamplingParams
from minifer.course.example import TRIO, Recorder, tiny
from minifer.routing.index import KVIndex
from minifer.routing.policies import make_policy
from minifer.routing.policy import RoutingRequest
from minifer.routing.publisher import KVEventPublisher, prompt_digests
from minifer.routing.router import Router
from minifer.routing.tracker import Assignment
from minifer.simulation.cluster import Cluster, identical
from minifer.simulation.simulator import simulate
from minifer.simulation.steps.times import FixedSteps
from minifer.simulation.workloads.arrivals import Arrival

BLOCK, BLOCKS, BUDGET, SEATS = 8, 96, 16, 4
FOLLOW_UPS = (" And a list?", " And a tuple?", " And a set?")
SYSTEM = "Answer in a sentence, and be polite. "
_SETTINGS: Mapping[str, Any] = {
    "block_size": BLOCK,
    "num_kv_blocks": BLOCKS,
    "max_num_batched_tokens": BUDGET,
    "max_num_seqs": SEATS,
}
_SEED = 1  # of the router


@dataclass(frozen=True)
class Ask:
    """A request. time: steps after the start. name: chat and turn, "A.0". wanted: answer tokens."""

    time: int
    name: str
    prompt: tuple[int, ...]
    wanted: int

    @property
    def chat(self) -> str:
        return self.name.partition(".")[0]

    @property
    def turn(self) -> int:
        return int(self.name.partition(".")[2])

    @property
    def keys(self) -> tuple[bytes, ...]:
        return prompt_digests(self.prompt, BLOCK)

    def to_route(self) -> RoutingRequest:
        return RoutingRequest(self.name, len(self.prompt), self.keys, BLOCK)


@dataclass(frozen=True)
class Work:
    """One request in one step of a replica. lane: its place among those that are there."""

    replica: str
    name: str
    lane: int
    step: int
    kind: Literal["waiting", "prefill", "decode"]
    num_tokens: int


@dataclass(frozen=True)
class Served:
    """What came of some traffic. computed: prompt tokens that were not found in a cache.

    where, ttft: request → replica, and steps from its coming to its first token. answers and work
    are of real engines only.
    """

    computed: int
    where: Mapping[str, str]
    ttft: Mapping[str, int]
    answers: Mapping[str, list[int]] = field(default_factory=dict)
    work: Sequence[Work] = ()

    @property
    def mean_ttft(self) -> float:
        return sum(self.ttft.values()) / len(self.ttft)

    @property
    def loads(self) -> list[int]:
        """How many requests each replica got, the most first."""
        return sorted(Counter(self.where.values()).values(), reverse=True)

    @property
    def together(self) -> set[frozenset[str]]:
        """Which requests shared a replica, whatever its name."""
        names = set(self.where.values())
        return {frozenset(r for r, name in self.where.items() if name == n) for n in names}


def new_engine(**options: Any) -> Engine:
    """minifer-tiny as one replica; options: fields of `EngineConfig`."""
    return Engine.from_loaded(tiny(), EngineConfig(**{**_SETTINGS, **options}))


def answer(engine: Engine, name: str, prompt: Sequence[int], wanted: int) -> tuple[list[int], int]:
    """Serve one request alone, greedily: its tokens, and how many of its prompt were found."""
    engine.add_request(name, prompt, _greedy(wanted))
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    return list(outputs[-1].outputs[0].token_ids), outputs[-1].num_cached_tokens


def _greedy(wanted: int) -> SamplingParams:
    return SamplingParams(temperature=0, ignore_eos=True, max_tokens=wanted)


# -- traffic


def chats(turns: int = 4, every: int = 24, wanted: int = 8) -> list[Ask]:
    """Three users, whose first questions are those of A, B and C. A later prompt is all that was
    said before, and a follow-up; turn k of the i-th chat comes at `every` · k + 3 · i."""
    engine, asks = new_engine(), []
    for i, (chat, (text, _)) in enumerate(TRIO.items()):
        prompt = list(text.encode())
        for turn in range(turns):
            if turn:
                prompt += FOLLOW_UPS[(turn - 1) % len(FOLLOW_UPS)].encode()
            name = f"{chat}.{turn}"
            asks.append(Ask(every * turn + 3 * i, name, tuple(prompt), wanted))
            prompt += answer(engine, name, prompt, wanted)[0]
    return sorted(asks, key=lambda ask: ask.time)


def rush(count: int = 8, wanted: int = 12) -> list[Ask]:
    """Users with the same system prompt, one a step, who ask one thing each."""
    return [
        Ask(i, f"{i}.0", tuple(f"{SYSTEM}What is {i} + {i}?".encode()), wanted)
        for i in range(count)
    ]


# -- real engines


class _Replica:
    """An engine, what it tells the router, and who is there."""

    def __init__(self, name: str) -> None:
        self.name, self.engine = name, new_engine()
        self.publisher = KVEventPublisher(self.engine.kv, name, epoch=1)
        self.engine.runner = self.recorder = Recorder(self.engine.runner)
        self.lanes: dict[str, int] = {}

    def add(self, ask: Ask) -> None:
        self.engine.add_request(ask.name, ask.prompt, _greedy(ask.wanted))
        taken = self.lanes.values()
        self.lanes[ask.name] = next(lane for lane in count() if lane not in taken)

    def work(self, now: int) -> Iterable[Work]:
        """Of the step that was taken last."""
        step, _ = self.recorder.steps[-1]
        computed = {entry.request.request_id: entry for entry in step.scheduled}
        for name, lane in self.lanes.items():
            entry = computed.get(name)
            if entry is None:
                yield Work(self.name, name, lane, now, "waiting", 0)
                continue
            prefills = entry.start < entry.request.num_prompt_tokens
            kind: Literal["prefill", "decode"] = "prefill" if prefills else "decode"
            yield Work(self.name, name, lane, now, kind, entry.end - entry.start)


def serve_live(asks: Sequence[Ask], policy: str, num_replicas: int = 2) -> Served:
    """Serve `asks` with real engines behind `Router`; each replica reports its KV after a step."""
    now = 0
    router = Router(make_policy(policy, _SEED), KVIndex(clock=lambda: float(now)))
    replicas = {name: _Replica(name) for name in (f"x{i}" for i in range(num_replicas))}
    for name in replicas:
        router.add(name)
    open_: dict[str, Assignment] = {}
    ended: list[str] = []
    cached: dict[str, int] = {}
    first: dict[str, int] = {}
    answers: dict[str, list[int]] = {}
    where: dict[str, str] = {}
    work: list[Work] = []
    coming = {ask.time: [a for a in asks if a.time == ask.time] for ask in asks}
    started = {ask.name: ask.time for ask in asks}
    while len(answers) < len(asks) or ended:
        for ask in coming.get(now, ()):
            open_[ask.name] = router.route(ask.to_route())
            where[ask.name] = open_[ask.name].replica
            replicas[where[ask.name]].add(ask)
        for name in ended:  # by the steps that end now
            router.tracker.finished(open_.pop(name))
            del replicas[where[name]].lanes[name]
        ended = []
        for replica in replicas.values():
            if not replica.engine.has_unfinished_requests:
                continue
            for output in replica.engine.step():
                name, tokens = output.request_id, list(output.outputs[0].token_ids)
                first.setdefault(name, now + 1 - started[name])
                if output.finished:
                    cached[name], answers[name] = output.num_cached_tokens, tokens
                    ended.append(name)
            work += replica.work(now)
            router.index.apply(replica.publisher.take())
        now += 1
    computed = sum(len(ask.prompt) - cached[ask.name] for ask in asks)
    return Served(computed, where, first, answers, work)


# -- the same, simulated


def serve_simulated(asks: Sequence[Ask], policy: str, num_replicas: int = 2) -> Served:
    """Serve the same requests with `minifer.simulation`, where every step takes one unit."""
    names: dict[bytes, int] = {}
    sessions = {chat: i for i, chat in enumerate(dict.fromkeys(ask.chat for ask in asks))}
    arrivals = [
        Arrival(
            ask.name,
            float(ask.time),
            len(ask.prompt),
            ask.wanted,
            tuple(names.setdefault(key, len(names)) for key in ask.keys),
            session=sessions[ask.chat],
            turn=ask.turn,
        )
        for ask in asks
    ]
    nodes = identical(num_replicas, FixedSteps(1.0), EngineConfig(**_SETTINGS), name="x")
    cluster = Cluster(nodes, router=policy, seed=_SEED)
    records = simulate(arrivals, cluster, name_tokens=BLOCK).requests
    return Served(
        sum(record.prompt_len - record.reused_len for record in records),
        {record.request_id: record.path[0] for record in records},
        {record.request_id: round(record.ttft or 0.0) for record in records},
    )
