"""Cache-aware disaggregation: prompts that nobody has seen get replicas of their own.

A cold prompt of 100,000 tokens takes seconds to compute, and every warm one that waits behind it
needs a tenth of one. Kept apart, the warm ones are fast, and the cold ones wait for each other.
(Together AI, https://www.together.ai/blog/cache-aware-disaggregated-inference; no threshold is
given there. The three of this rule are those of https://github.com/smg-project/smg/pull/469.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from minifer.routing.balancing import LeastWork
from minifer.routing.policy import Decision, ReplicaState, Role, RoutingPolicy, RoutingRequest
from minifer.routing.pools import available, cached_tokens, check_least, check_shares


def is_cold(
    num_tokens: int, matched: int, match_threshold: float, unmatched: int, min_tokens: int
) -> bool:
    """Long enough, matched in too small a part, and with enough left to compute: all three.

    In tokens, where SMG counts characters; the thresholds have no units of their own.
    """
    return (
        num_tokens >= min_tokens
        and matched < match_threshold * num_tokens
        and num_tokens - matched >= unmatched
    )


class ColdWarm:
    """Cold prompts to PRE_PREFILL replicas, warm ones to all others.

    A prompt's match is the best that any replica has: what one computed, the others load. Where one
    of the two pools is empty, the other takes all.

    match_threshold: in [0, 1], of the prompt. unmatched, min_tokens: tokens, at least 0; the first
    matters most: set too low, it calls every later turn of a chat cold. soft: a warm prompt that
    would wait may take a PRE_PREFILL replica that has nothing to do. within: the policy inside of
    a pool, `least_work` unless told otherwise.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        match_threshold: float = 0.5,
        unmatched: int = 512,
        min_tokens: int = 512,
        soft: bool = False,
        within: RoutingPolicy | None = None,
    ) -> None:
        check_shares(match_threshold=match_threshold)
        check_least(0, unmatched=unmatched, min_tokens=min_tokens)
        self.match_threshold = match_threshold
        self.unmatched = unmatched
        self.min_tokens = min_tokens
        self.soft = soft
        self.within = within if within is not None else LeastWork(seed=seed)

    def choose(
        self,
        request: RoutingRequest,
        replicas: Sequence[ReplicaState],
        matched: Mapping[str, int],
    ) -> Decision:
        candidates = available(replicas)
        for_cold = [r for r in candidates if r.role is Role.PRE_PREFILL]
        for_warm = [r for r in candidates if r.role is not Role.PRE_PREFILL]
        if self.is_cold(request, matched):
            return self._within(request, for_cold or for_warm, matched, "cold")
        decision = self._within(request, for_warm or for_cold, matched, "warm")
        idle = [r for r in for_cold if r.num_requests == 0 and not _has_prefill(r)]
        if self.soft and idle:
            chosen = next(r for r in candidates if r.name == decision.replica)
            if _has_prefill(chosen):
                return self._within(request, idle, matched, "helped")
        return decision

    def is_cold(self, request: RoutingRequest, matched: Mapping[str, int]) -> bool:
        best = max((cached_tokens(name, request, matched) for name in matched), default=0)
        return is_cold(
            request.num_tokens, best, self.match_threshold, self.unmatched, self.min_tokens
        )

    def _within(
        self,
        request: RoutingRequest,
        replicas: Sequence[ReplicaState],
        matched: Mapping[str, int],
        reason: str,
    ) -> Decision:
        return replace(self.within.choose(request, replicas, matched), reason=reason)


def _has_prefill(replica: ReplicaState) -> bool:
    return replica.prefill_tokens > 0 or replica.prefill_seconds > 0
