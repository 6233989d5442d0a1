"""NVIDIA Dynamo's cost: what a replica would have to compute, and what it is carrying already."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from minifer.routing.policy import Decision, ReplicaState, RoutingRequest
from minifer.routing.pools import available, cached_tokens, decide, least, require


def dynamo_cost(prefill_blocks: float, decode_blocks: float, overlap_weight: float = 1.0) -> float:
    """overlap_weight · prefill_blocks + decode_blocks, in blocks; the lowest wins.

    The documentation's example, at weight 1: workers of (8, 10), (5, 5) and (2, 9) cost 18, 10
    and 11. The third has most of the prompt, the second takes it.
    """
    return overlap_weight * prefill_blocks + decode_blocks


class DynamoCost:
    """The lowest cost by `dynamo_cost` (https://docs.nvidia.com/dynamo, "Routing Concepts").

    prefill_blocks: of prompt tokens that wait on the replica, and of those of this prompt that it
    does not hold. decode_blocks: of its requests that generate. (The blocks that this request will
    take cost the same everywhere and are left out.)

    overlap_weight: at least 0; 0 ignores prefixes. temperature: at least 0; above 0 a replica is
    drawn with probability ∝ exp(−cost / (range of the costs · temperature)), so that routers with
    the same old view do not all choose the same one; at 0 only equals are drawn among.
    busy_threshold: in (0, 1]; replicas with a larger share of their KV blocks in use are left out
    while there are others (ai-dynamo/dynamo#9688), and 1 leaves out none.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        overlap_weight: float = 1.0,
        temperature: float = 0.0,
        busy_threshold: float = 0.9,
    ) -> None:
        require(0 <= overlap_weight < math.inf, "overlap_weight", overlap_weight, "at least 0")
        require(0 <= temperature < math.inf, "temperature", temperature, "at least 0")
        require(0 < busy_threshold <= 1, "busy_threshold", busy_threshold, "in (0, 1]")
        self.overlap_weight = overlap_weight
        self.temperature = temperature
        self.busy_threshold = busy_threshold
        self._rng = random.Random(f"{seed}/dynamo")

    def choose(
        self,
        request: RoutingRequest,
        replicas: Sequence[ReplicaState],
        matched: Mapping[str, int],
    ) -> Decision:
        candidates = available(replicas)
        free = [replica for replica in candidates if replica.kv_usage <= self.busy_threshold]
        reason = "cost" if free else "busy"

        def cost(replica: ReplicaState) -> float:
            new = request.num_tokens - cached_tokens(replica.name, request, matched)
            prefill_blocks = (replica.prefill_tokens + new) / request.block_size
            return dynamo_cost(prefill_blocks, replica.decode_blocks, self.overlap_weight)

        pool = free or candidates
        if self.temperature == 0:
            return decide(least(pool, cost, self._rng), request, matched, reason)
        weights = softmin([cost(replica) for replica in pool], self.temperature)
        (replica,) = self._rng.choices(pool, weights)
        return decide(replica, request, matched, reason)


def softmin(costs: Sequence[float], temperature: float) -> list[float]:
    """Probabilities ∝ exp(−cost / (range · temperature)): between the best and the worst there is
    a factor of exp(1 / temperature), however far they are apart."""
    lowest, spread = min(costs), max(costs) - min(costs)
    if spread == 0:
        return [1 / len(costs)] * len(costs)
    weights = [math.exp(-(cost - lowest) / spread / temperature) for cost in costs]
    total = sum(weights)
    return [weight / total for weight in weights]
