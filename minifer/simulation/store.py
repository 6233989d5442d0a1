"""KV below the device, simulated: what the levels hold, and how long it takes to load it.

`NodeStore` stands where `KVTiers` stands in an engine: the KV manager asks it for what follows the
device's blocks, and the scheduler puts a request aside while the answer is None. What a level
holds, and what it throws out first, is left to the engine's own DRAM tier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from minifer.events import EventBus
from minifer.kv.block_pool import Block
from minifer.kv.prefix_key import PrefixKey
from minifer.kv.tiers.dram import DramTier, StoredBlock, chain
from minifer.kv.tiers.stats import TierStats
from minifer.kv.tiers.tiers import TierHit
from minifer.simulation.cluster import StoreLevel
from minifer.simulation.sim_request import SimRequest

_UNNAMED = StoredBlock(cast(PrefixKey, None), None)  # of KV that is there by assumption


@dataclass
class StoreHit(TierHit):
    """tokens: that are loaded. seconds: how long that takes. tail: key of the last block that a
    level really holds."""

    tokens: int = 0
    seconds: float = 0.0
    tail: PrefixKey | None = None


class LevelState:
    """One level and what it holds; several nodes may have the same one."""

    def __init__(self, spec: StoreLevel, block_size: int) -> None:
        self.spec = spec
        self.block_size = block_size
        self.blocks = DramTier(spec.capacity // block_size, TierStats())

    def seconds(self, num_bytes: float) -> float:
        return self.spec.latency + num_bytes / self.spec.bandwidth


class NodeStore:
    """The levels of one node, the fastest first; and what a prefill node sent to this one.

    kv_bytes: of a token. start: called with a request and seconds when its load begins, in the
    background; whoever owns the clock calls `arrived` at its end. None: loads are part of steps.
    """

    def __init__(
        self,
        levels: Sequence[LevelState],
        block_size: int,
        kv_bytes: float,
        start: Callable[[SimRequest, float], None] | None = None,
    ) -> None:
        self.events = EventBus()  # the KV manager puts the engine's here
        self.step_seconds = 0.0  # of loads, for the requests that this step admits
        self.keeps = any(level.blocks.capacity for level in levels)
        self._levels = levels
        self._block_size = block_size
        self._kv_bytes = kv_bytes
        self._start = start
        self._loading: dict[SimRequest, bool] = {}  # asked for → is it here?

    def find(self, request: SimRequest, keys: Sequence[PrefixKey]) -> StoreHit:
        """What follows the device's blocks; keys: of the blocks after those, as `lookup` has them.

        At least one token is left to compute.
        """
        P, most = self._block_size, request.num_tokens - 1
        first = (most // P - len(keys)) * P if request.prefix_keys else 0
        if request.received:
            return self._known(StoreHit(), min(request.received, most) - first)
        hit = StoreHit()
        for level in self._levels:
            found = level.blocks.match(keys[len(hit.blocks) :])
            if found:
                hit.blocks += found
                hit.seconds += level.seconds(len(found) * P * self._kv_bytes)
                hit.tail = found[-1].key
        hit.tokens = len(hit.blocks) * P
        known = min(request.stored_len, most) - first
        if known > hit.tokens:
            hit.seconds += self._levels[-1].seconds((known - hit.tokens) * self._kv_bytes)
            return self._known(hit, known)
        return hit

    def _known(self, hit: StoreHit, tokens: int) -> StoreHit:
        """The hit, grown to so many tokens; the last block need not be full."""
        if tokens > hit.tokens:
            blocks = -(-tokens // self._block_size)
            hit.blocks = hit.blocks + [_UNNAMED] * (blocks - len(hit.blocks))
            hit.tokens, hit.short = tokens, blocks * self._block_size - tokens
        return hit

    # -- what the KV manager calls

    def lookup(self, request: SimRequest, keys: Sequence[PrefixKey]) -> StoreHit | None:
        """What can be loaded; None while it is on its way."""
        if self.is_waiting(request):
            return None
        hit = self.find(request, keys)
        if hit.seconds and self._start is not None and request not in self._loading:
            self._loading[request] = False
            self._start(request, hit.seconds)
            return None
        return hit

    def admitted(self, request: SimRequest, hit: StoreHit, num_cached: int) -> None:
        """The request runs from this step on, with `num_cached` tokens of the device before it."""
        if self._loading.pop(request, None) is None:
            self.step_seconds += hit.seconds
        if not request.received and not request.num_preemptions:
            request.record.cached_len, request.record.loaded_len = num_cached, hit.tokens
        request.received = 0  # once it is preempted, this KV is gone
        if hit.tail is not None:
            self._keep([block.key for block in hit.blocks if block is not _UNNAMED])

    def is_waiting(self, request: SimRequest) -> bool:
        return self._loading.get(request) is False

    def release(self, request: SimRequest) -> None:
        self._loading.pop(request, None)

    def collect(self) -> None:
        """Nothing comes by itself: see `arrived`."""

    def arrived(self, request: SimRequest) -> None:
        """What the request waited for is here."""
        if request in self._loading:
            self._loading[request] = True

    # -- after a step

    def store(self, blocks: Sequence[Block]) -> None:
        """Keep what a step computed or found, in the order of its prefix, in every level."""
        keys = [block.key for block in blocks if block.key is not None]
        if keys:
            self._keep(keys)

    def _keep(self, keys: Sequence[PrefixKey]) -> None:
        tail = keys[-1]
        keep = {key.digest for key in chain(tail)}
        for level in self._levels:
            for key in keys:
                if level.blocks.put(key, None, keep) is None:
                    break
            level.blocks.touch(tail)
