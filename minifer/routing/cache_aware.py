"""SGLang's rule: balance when the load is uneven, follow the prefix when it is not."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from minifer.routing.policy import Decision, ReplicaState, RoutingRequest
from minifer.routing.pools import available, cached_tokens, check_least, check_shares, decide, least


def imbalanced(loads: Sequence[int], balance_abs: int = 64, balance_rel: float = 1.5) -> bool:
    """Is the longest queue longer than the shortest by more than a number *and* by a factor?

    (100, 30): 70 > 64 and 100 > 1.5 · 30, so yes. (60, 10): 50 is not above 64.
    """
    most, fewest = max(loads), min(loads)
    return most - fewest > balance_abs and most > balance_rel * fewest


class CacheAware:
    """Imbalanced: the shortest queue. Else the best match, if it is more than `cache_threshold` of
    the prompt. Else the replica with the smallest tree, where the new prefix costs least.

    The rule and its defaults are those of SGLang's router and of its successor SMG
    (https://github.com/smg-project/smg), with two differences. They count the characters of a
    text in a tree of their own; here a match is what an index says, in tokens, and a tree is what
    this policy has sent to a replica that was new there, in tokens, up to `max_tree_tokens`. And
    equals are drawn among, where they take the first.

    cache_threshold: in [0, 1]. balance_abs: requests, at least 0. balance_rel: at least 1.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        cache_threshold: float = 0.3,
        balance_abs: int = 64,
        balance_rel: float = 1.5,
        max_tree_tokens: int = 2**24,
    ) -> None:
        check_shares(cache_threshold=cache_threshold)
        check_least(0, balance_abs=balance_abs)
        check_least(1, balance_rel=balance_rel, max_tree_tokens=max_tree_tokens)
        self.cache_threshold = cache_threshold
        self.balance_abs = balance_abs
        self.balance_rel = balance_rel
        self.max_tree_tokens = max_tree_tokens
        self._tree_tokens: dict[str, int] = {}
        self._rng = random.Random(f"{seed}/cache_aware")

    def choose(
        self,
        request: RoutingRequest,
        replicas: Sequence[ReplicaState],
        matched: Mapping[str, int],
    ) -> Decision:
        candidates = available(replicas)
        self._forget_all_but(replicas)

        def unmatched(replica: ReplicaState) -> int:
            return request.num_tokens - cached_tokens(replica.name, request, matched)

        loads = [replica.num_requests for replica in candidates]
        if imbalanced(loads, self.balance_abs, self.balance_rel):
            chosen, reason = least(candidates, lambda r: r.num_requests, self._rng), "balance"
        else:
            best = least(candidates, lambda r: (unmatched(r), r.num_requests), self._rng)
            held = cached_tokens(best.name, request, matched)
            if held > self.cache_threshold * request.num_tokens:
                chosen, reason = best, "prefix"
            else:
                chosen, reason = least(candidates, self._tree_size, self._rng), "tree"
        size = self._tree_tokens.get(chosen.name, 0) + unmatched(chosen)
        self._tree_tokens[chosen.name] = min(size, self.max_tree_tokens)
        return decide(chosen, request, matched, reason)

    def _tree_size(self, replica: ReplicaState) -> tuple[int, int]:
        return (self._tree_tokens.get(replica.name, 0), replica.num_requests)

    def _forget_all_but(self, replicas: Sequence[ReplicaState]) -> None:
        """A policy that serves two pools sees both in turn: only many strangers are forgotten."""
        if len(self._tree_tokens) > 8 * len(replicas) + 64:
            names = {replica.name for replica in replicas}
            self._tree_tokens = {n: size for n, size in self._tree_tokens.items() if n in names}
