"""Equal prefixes to the same replica, as long as it has no more than its share of the load."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Mapping, Sequence

from minifer.routing.policy import Decision, ReplicaState, RoutingRequest
from minifer.routing.pools import available, cached_tokens, check_least, check_shares, decide


class PrefixAffinity:
    """The longest match, or the replica that the prefix hashes to, within a bounded load.

    All replicas are put in an order of preference: those that hold at least `match_threshold` of
    the prompt come first, the longest match before the others; the rest follows by the rendezvous
    hash (Thaler and Ravishankar, 1998) of the first `hash_blocks` blocks, so that a prefix nobody
    holds yet has a home that all routers agree on, and only 1/n of the homes move when one of n
    replicas goes. The first in this order that stays within ⌈load_factor · m / n⌉ of the m requests
    takes it: consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam,
    arXiv 1608.01350). One replica is always below that bound.

    load_factor: at least 1; 1 only balances, infinity only follows prefixes. match_threshold: in
    [0, 1], of the prompt's tokens: the few tokens of a chat template that all prompts share are no
    reason to send them all to one place. hash_blocks: at least 1.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        load_factor: float = 1.25,
        match_threshold: float = 0.3,
        hash_blocks: int = 4,
    ) -> None:
        check_shares(match_threshold=match_threshold)
        check_least(1, load_factor=load_factor, hash_blocks=hash_blocks)
        self.load_factor = load_factor
        self.match_threshold = match_threshold
        self.hash_blocks = hash_blocks
        self._seed = seed

    def choose(
        self,
        request: RoutingRequest,
        replicas: Sequence[ReplicaState],
        matched: Mapping[str, int],
    ) -> Decision:
        candidates = available(replicas)
        home = self._home(request)
        enough = max(1, self.match_threshold * request.num_tokens)

        def counted_match(replica: ReplicaState) -> int:
            held = cached_tokens(replica.name, request, matched)
            return held if held >= enough else 0

        def preference(replica: ReplicaState) -> tuple[int, int]:
            return (counted_match(replica), _weight(home, replica.name))

        ordered = sorted(candidates, key=preference, reverse=True)
        limit = self.load_limit(candidates)
        chosen = next(replica for replica in ordered if replica.num_requests < limit)
        if counted_match(chosen):
            reason = "prefix"
        else:
            reason = "hash" if chosen is ordered[0] else "balance"
        return decide(chosen, request, matched, reason)

    def load_limit(self, replicas: Sequence[ReplicaState]) -> float:
        """Requests that each of these may have, the one to be placed counted in."""
        share = (sum(replica.num_requests for replica in replicas) + 1) / len(replicas)
        if math.isinf(self.load_factor):
            return math.inf
        return math.ceil(self.load_factor * share - 1e-9)  # 1.1 · 10 / 11 is 1, not a little more

    def _home(self, request: RoutingRequest) -> bytes:
        """What is hashed: the key of the last of the first blocks names all before it, too."""
        keys = request.prefix_keys
        if not keys:  # shorter than a block: it has no prefix, and any place will do
            return f"{self._seed}/{request.request_id}".encode()
        return stable_bytes(keys[min(len(keys), self.hash_blocks) - 1])


def _weight(home: bytes, replica: str) -> int:
    digest = hashlib.blake2b(home + b"\0" + replica.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def stable_bytes(key: Hashable) -> bytes:
    """The same bytes in every process, which `hash` does not promise."""
    return key if isinstance(key, bytes) else repr(key).encode()
