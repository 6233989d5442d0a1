"""What is simulated: nodes, what they store and how they are joined. Frozen values, no state."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from minifer.config import EngineConfig
from minifer.routing.policies import make_policy
from minifer.routing.policy import Role, RoutingPolicy
from minifer.simulation.rejection import Rejection
from minifer.simulation.steps.times import StepTimes
from minifer.simulation.workloads.arrivals import BLOCK

Router = str | Callable[[], RoutingPolicy]  # what `make_policy` reads, or what makes a new one


def _check_speed(bandwidth: float, latency: float) -> None:
    if not bandwidth > 0:
        raise ValueError(f"bandwidth must be above 0 bytes/s, got {bandwidth}")
    if not 0 <= latency < math.inf:
        raise ValueError(f"latency must be at least 0 seconds, got {latency}")


@dataclass(frozen=True)
class StoreLevel:
    """A place below the device that keeps KV: a host's DRAM, a cluster's cache.

    capacity: tokens, least recently used out first. bandwidth: bytes/s at which one request loads
    from it, after `latency` seconds. shared: one for all nodes that name it, else one for each.

    A level of capacity 0 keeps nothing, and still is where `Arrival.stored_len` comes from.
    """

    name: str
    capacity: int
    bandwidth: float
    latency: float = 0.0
    shared: bool = False

    def __post_init__(self) -> None:
        if self.capacity < 0:
            raise ValueError(f"capacity must be at least 0 tokens, got {self.capacity}")
        _check_speed(self.bandwidth, self.latency)


@dataclass(frozen=True)
class Link:
    """How KV gets from a prefill node to a decode node.

    bandwidth: bytes/s that one node can send. latency: seconds. queued: what a node sends goes one
    after the other; False gives each transfer the whole bandwidth.
    """

    bandwidth: float = math.inf
    latency: float = 0.0
    queued: bool = True

    def __post_init__(self) -> None:
        _check_speed(self.bandwidth, self.latency)


@dataclass(frozen=True)
class NodeSpec:
    """One replica: an engine's configuration, and how long its steps take.

    engine: `num_kv_blocks` must be given; `block_size` divides or is a multiple of the tokens that
    a block's name stands for. role: see `Role`. store: levels from the fastest down; what the node
    computes is written to all of them. prefetch: a request waits outside of the queue while its KV
    comes from the store, one request at a time, and others compute meanwhile; without it the load
    is part of the request's first step, which is what a copy from DRAM is. in_tokens: `sjf` and
    `srpt` measure requests as an engine does, in tokens; else in seconds, which here are known.
    """

    name: str
    step_times: StepTimes
    engine: EngineConfig = field(
        default_factory=lambda: EngineConfig(block_size=BLOCK, num_kv_blocks=1024)
    )
    role: Role = Role.MIXED
    store: tuple[StoreLevel, ...] = ()
    prefetch: bool = False
    in_tokens: bool = False

    def __post_init__(self) -> None:
        if self.engine.num_kv_blocks is None:
            raise ValueError(f"node {self.name} needs num_kv_blocks, got None")
        if self.engine.speculative_method != "none":
            raise ValueError(
                f'node {self.name} must have speculative_method="none", a simulated token cannot '
                f"be guessed, got {self.engine.speculative_method!r}"
            )

    @property
    def kv_capacity(self) -> int:
        """Tokens its KV blocks hold."""
        return (self.engine.num_kv_blocks or 0) * self.engine.block_size


@dataclass(frozen=True)
class Cluster:
    """Nodes and the way of a request between them.

    router: chooses among the nodes that prefill, decode_router among those that decode what a
    prefill node computed. seed: of both. link: from prefill to decode nodes. kv_bytes: of one
    token, for links and stores. rejection: turns requests away as they come; None: nobody.

    Where no node decodes, a request ends with its first token.
    """

    nodes: tuple[NodeSpec, ...]
    router: Router = "least_work"
    decode_router: Router = "least_load"
    seed: int = 0
    link: Link = Link()
    kv_bytes: float = 0.0
    rejection: Rejection | None = None

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"nodes must have different names, at least one, got {names}")
        if not 0 <= self.kv_bytes < math.inf:
            raise ValueError(f"kv_bytes must be at least 0 bytes a token, got {self.kv_bytes}")
        if all(node.role is Role.DECODE for node in self.nodes):
            raise ValueError("nodes must have one that prefills, got decode nodes alone")
        roles = {node.role for node in self.nodes}
        if Role.DECODE in roles and not roles & {Role.PREFILL, Role.PRE_PREFILL}:
            raise ValueError(
                "decode nodes need prefill nodes that send to them, and mixed nodes send nothing, "
                f"got nodes {names}"
            )
        for name in ("router", "decode_router"):
            self.make_router(name)

    def make_router(self, name: str) -> RoutingPolicy:
        """A new policy, which remembers nothing, for `router` or `decode_router`."""
        router: Router = getattr(self, name)
        return make_policy(router, self.seed) if isinstance(router, str) else router()


def identical(
    count: int,
    step_times: StepTimes,
    engine: EngineConfig,
    *,
    role: Role = Role.MIXED,
    store: tuple[StoreLevel, ...] = (),
    name: str | None = None,
) -> tuple[NodeSpec, ...]:
    """`count` nodes that differ in their names alone: `mixed0`, `mixed1`, …"""
    stem = role.value if name is None else name
    return tuple(NodeSpec(f"{stem}{i}", step_times, engine, role, store) for i in range(count))
