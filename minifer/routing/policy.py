"""What a router knows when a request comes, and what it has to say.

::

    RoutingRequest ─┐
    ReplicaState …  ├─▶ RoutingPolicy.choose ─▶ Decision: which replica, and why
    matched tokens ─┘

A policy is plain Python without clocks, threads or sockets: the HTTP router, Ray Serve's request
router and the simulator call the same objects.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Role(Enum):
    """What a replica is for. MIXED does everything; PRE_PREFILL computes cold prompts."""

    MIXED = "mixed"
    PREFILL = "prefill"
    PRE_PREFILL = "pre-prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class RoutingRequest:
    """num_tokens: of the prompt. prefix_keys: of its full blocks, first to last (digests of
    `PrefixKey`s, or ids of simulated blocks). block_size: tokens a key stands for."""

    request_id: str
    num_tokens: int
    prefix_keys: Sequence[Hashable] = ()
    block_size: int = 16
    tenant: str = ""


@dataclass
class ReplicaState:
    """A replica as its router sees it.

    num_requests: sent there and not finished. prefill_tokens: prompt tokens that they still have
    to compute there. prefill_seconds: what these will take, where somebody can say; else 0.
    decode_blocks: KV blocks of requests that generate. kv_usage: share of its KV blocks in use,
    in [0, 1]. healthy: may it be chosen?
    """

    name: str
    role: Role = Role.MIXED
    num_requests: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_blocks: int = 0
    kv_usage: float = 0.0
    healthy: bool = True


@dataclass(frozen=True)
class Decision:
    """cached_tokens: what the chosen replica is expected to have. reason: a word for metrics and
    logs, such as "prefix", "balance" or "cold"."""

    replica: str
    cached_tokens: int
    reason: str


class NoReplicaError(RuntimeError):
    """No replica may take the request."""


class RoutingPolicy(Protocol):
    """One way of choosing. Objects may remember what they decided; they are told of no answer."""

    def choose(
        self,
        request: RoutingRequest,
        replicas: Sequence[ReplicaState],
        matched: Mapping[str, int],
    ) -> Decision:
        """One of `replicas`, the healthy ones in a fixed order.

        matched: replica → leading prompt tokens whose KV it holds; a missing name is 0. Raises
        `NoReplicaError` when none will do.
        """
        ...
