"""Stage 2: whose keys and values lie where, and which can be reused.

The token axis of a request and its blocks (P = 4), when 7 tokens are to be scheduled::

    tokens      0   1   2   3 | 4   5   6   7 | 8   9  10
               |  prefix hit  |     new tokens            |
    blocks     |   shared     |   allocated   | allocated |
    owner       the index and   this request, published as
                other requests  soon as a block is full

Invariants, checked by `check_invariants` after every step of the property tests:
a block's ref_count is the number of tables that hold it; a block is free exactly when that is 0;
the index finds only blocks whose tokens it compared. What no longer fits on the device may be
found in the tiers below it (`kv/tiers`), and is loaded into blocks of the request's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minifer.events import EventBus
from minifer.kv.block_pool import BlockPool
from minifer.kv.prefix_index import HashChainIndex, PrefixIndex
from minifer.kv.prefix_key import (
    ExtraKeys,
    HashFunction,
    PrefixKey,
    extra_keys_of,
    make_key,
    sha256,
)
from minifer.kv.radix_index import RadixIndex
from minifer.kv.step_input import StepInput, prepare
from minifer.kv.tiers.dram import StoredBlock
from minifer.kv.tiers.tiers import KVTiers, TierHit
from minifer.kv.watcher import KVWatcher
from minifer.request import Request

if TYPE_CHECKING:
    from minifer.scheduling.plan import ScheduledRequest, SchedulePlan


@dataclass
class PrefixCacheStats:
    """Tokens looked up and found, at first admissions only (a resumed request counts once)."""

    num_queries: int = 0
    num_hits: int = 0

    @property
    def hit_rate(self) -> float:
        return self.num_hits / self.num_queries if self.num_queries else 0.0


@dataclass
class Allocation:
    """What `allocate` did beside growing the table, so that a step can be taken back.

    computed: the step has run, and every block below holds what its key says.
    """

    copies: list[tuple[int, int]] = field(default_factory=list)  # (source, destination) blocks
    loads: list[tuple[int, StoredBlock]] = field(default_factory=list)  # what goes into blocks
    hits: list[int] = field(default_factory=list)
    published: list[int] = field(default_factory=list)  # the loaded ones too
    computed: bool = False


class KVCacheManager:
    """Block tables, prefix hits and copy-on-write for all requests. No tensors.

    num_blocks: N. block_size: P, tokens a block. index: "hash" or "radix". tiers: None for none.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        index: str = "hash",
        hash_function: HashFunction = sha256,
        events: EventBus | None = None,
        tiers: KVTiers | None = None,
        debug: bool = False,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.stats = PrefixCacheStats()
        self._events = events if events is not None else EventBus()
        self._hash = hash_function
        indexes: dict[str, type[PrefixIndex]] = {"hash": HashChainIndex, "radix": RadixIndex}
        self.pool = BlockPool(num_blocks, indexes[index](), self._events, track_lost=debug)
        self.tiers = tiers
        if tiers is not None:
            tiers.events = self._events
        self._step_started = 0.0

    @property
    def capacity(self) -> int:
        """Tokens the whole pool holds."""
        return self.pool.num_blocks * self.block_size

    @property
    def usage(self) -> float:
        """Share of blocks that a request uses, in [0, 1]."""
        return 1 - self.pool.num_free / self.pool.num_blocks

    def watch(self, watcher: KVWatcher | None) -> None:
        """From now on tell `watcher` which blocks can be found; None: tell nobody."""
        self.pool.watcher = watcher
        if self.tiers is not None:
            self.tiers.dram.watcher = watcher

    def find_cached(self, request: Request) -> list[int]:
        """Blocks of the longest cached prefix of a waiting request; takes nothing.

        At least one token is left to compute, because its logits are needed: a prompt that is
        cached in full recomputes its last block. A request that wants the log-probabilities of
        its prompt computes all of it.
        """
        if not self.enable_prefix_caching or request.wants_prompt_logprobs:
            return []
        most = self._most_cached(request)
        self._extend_keys(request, most)
        return self.pool.index.match(request.prefix_keys[:most])

    def _most_cached(self, request: Request) -> int:
        return min(request.num_tokens - 1, request.num_shareable_tokens) // self.block_size

    def find_stored(self, request: Request, cached: Sequence[int]) -> TierHit | None:
        """Blocks in the tiers that follow `cached`, the device's; the same tokens are left over.

        None while some are on their way from the disk. Who asks says how it went on: `count_lookup`
        when the request is admitted, `forget` when it never will be.
        """
        if self.tiers is None or request.wants_prompt_logprobs:
            return TierHit()
        most = self._most_cached(request)
        return self.tiers.lookup(request, request.prefix_keys[len(cached) : most])

    def loadable_keys(self, request: Request) -> list[PrefixKey]:
        """Of the blocks that a waiting request could take from elsewhere: the full ones, and one
        token is left to compute; none where it computes all of its prompt."""
        if not self.enable_prefix_caching or request.wants_prompt_logprobs:
            return []
        most = self._most_cached(request)
        self._extend_keys(request, most)
        return request.prefix_keys[:most]

    def count_held(self, keys: Sequence[PrefixKey]) -> int:
        """How many blocks of a prefix, from the first on, the device and DRAM hold; takes none."""
        held = len(self.pool.index.match(keys))
        return held if self.tiers is None else held + len(self.tiers.dram.match(keys[held:]))

    def num_found(self, cached: Sequence[int], stored: TierHit) -> int:
        """Tokens in blocks of the device and in what a tier has behind them."""
        return (len(cached) + len(stored)) * self.block_size - stored.short

    def can_allocate(
        self,
        request: Request,
        num_new: int,
        cached: Sequence[int] = (),
        without: Sequence[Request] = (),
    ) -> bool:
        """Would `allocate` with the same arguments find enough free blocks?

        without: requests that would give up their blocks for it first.
        """
        if not cached and not without:  # a request that goes on, which is nearly all
            return self._blocks_needed(request, num_new, ()) <= self.pool.num_free
        held = Counter(block for other in without for block in other.block_table)
        freed = {block for block, tables in held.items() if self._refs(block) == tables}
        free = self.pool.num_free + len(freed)
        hit = sum(self._refs(block) == 0 or block in freed for block in cached)
        return self._blocks_needed(request, num_new, cached) <= free - hit

    def _refs(self, block_id: int) -> int:
        return self.pool.blocks[block_id].ref_count

    def allocate(
        self,
        request: Request,
        num_new: int,
        cached: Sequence[int] = (),
        stored: TierHit | None = None,
    ) -> Allocation:
        """Give the request room for its next `num_new` tokens, after hits.

        cached: blocks of the device, shared. stored: blocks of a tier that follow them; the step
        writes them into new blocks (`can_allocate` wants their tokens counted in).

        Publishes every block that is full after the step, so that a request scheduled later in
        the same step can share it: a step writes all KV of a layer before it reads any. A loop
        model may take several steps over it: see `publish_computed`.
        """
        done = Allocation(hits=list(cached))
        if cached:
            self._take_hit(request, cached)
        if stored:
            loaded = self.pool.allocate(len(stored), request.request_id)
            done.loads = list(zip(loaded, stored.blocks, strict=True))
            request.block_table += loaded
            request.num_computed_tokens = self.num_found(cached, stored)
        table, first = request.block_table, request.num_computed_tokens // self.block_size
        if first < len(table) and self._refs(table[first]) > 1:
            (copy,) = self.pool.allocate(1, request.request_id)
            done.copies.append((table[first], copy))
            self.pool.release([table[first]])
            table[first] = copy
            if self._events:
                self._events.emit("kv", "kv.block_copied", request.request_id, copies=done.copies)
        if needed := self._blocks_needed(request, num_new, ()):
            table += self.pool.allocate(needed, request.request_id)
        if request.num_loops is None:
            done.published = self._publish(request, request.num_computed_tokens + num_new)
        return done

    def allocate_drafts(self, entry: ScheduledRequest, count: int) -> None:
        """Make room behind what `allocate` gave for `count` drafts, and add them to the entry.

        Nothing of them is published. `can_allocate` of all its tokens must hold.
        """
        request = entry.request
        entry.add_drafts(count)
        needed = self._blocks_needed(request, entry.num_new, ())
        request.block_table += self.pool.allocate(needed, request.request_id)

    def roll_back(self, request: Request, allocation: Allocation) -> None:
        """After the drafts have been judged: publish what the accepted ones filled, give back the
        blocks that hold nothing else than rejected ones.

        What those left in the last block is overwritten before it is read, as any slot is. The
        blocks go to the front of the queue: nothing can be found in them, so they are used again
        before anything is evicted.
        """
        allocation.published += self._publish(request, request.num_computed_tokens)
        kept = -(-request.num_computed_tokens // self.block_size)
        empty = request.block_table[kept:]
        del request.block_table[kept:]
        self.pool.release(reversed(empty), request.request_id, reuse_first=True)

    def publish_computed(self, request: Request, allocation: Allocation) -> None:
        """After a step: offer the full blocks of a loop model's request, not before every
        iteration has written them."""
        if request.num_loops is not None:
            allocation.published = self._publish(request, request.num_computed_tokens)

    def prepare(self, plan: SchedulePlan) -> StepInput:
        """Lay a plan out for the model: tokens, positions, slots, block tables, rows wanted."""
        self._step_started = self._events.clock()
        step = prepare(plan, self.block_size)
        if self.pool.lost:
            kept = {target for _, target in step.block_copies}
            step.block_poison = sorted(set(self.pool.lost) - kept)
            self.pool.lost.clear()
        return step

    def store(self, plan: SchedulePlan, step: StepInput) -> None:
        """After a step: keep copies of the blocks it filled in the tiers, and of those it reused.

        What `withdraw` took out of the index in between is not kept. Raises `RuntimeError` for a
        step that has not run: its blocks hold something else yet (vllm-project/vllm#45704).
        """
        if self.tiers is None:
            return
        if not plan.is_decode:  # time counts in every step, a token where it is completed
            seconds = self._events.clock() - self._step_started - step.load_seconds
            self.tiers.observe_step(plan.num_completed_tokens, seconds)
        if step.block_loads:
            self.tiers.observe_loads(len(step.block_loads), step.load_seconds)
        for entry in plan.scheduled:
            allocation = entry.allocation
            if not entry.completed:
                continue
            if not allocation.computed:
                raise RuntimeError(f"the step of {entry.request} has not run, nothing to store")
            blocks = [self.pool.blocks[b] for b in (*allocation.hits, *allocation.published)]
            self.tiers.store(blocks)

    def take_back(self, allocation: Allocation) -> None:
        """The step will not compute what it was to publish: nobody may find it."""
        for block_id in allocation.published:
            self.pool.unpublish(block_id)

    def withdraw(self, request: Request) -> None:
        """What this request computed cannot be trusted (NaN): nobody may find its blocks."""
        for block_id in request.block_table:
            self.pool.unpublish(block_id)

    def free(self, request: Request) -> None:
        """Release all blocks, the tail first: of one prefix the front is worth keeping longer."""
        self.pool.release(reversed(request.block_table), request.request_id)
        request.block_table = []
        request.num_published_blocks = 0

    def fork(self, parent: Request, child: Request) -> None:
        """Let `child` continue from `parent`'s computed tokens on the same blocks.

        Whoever writes first into a block that both hold copies it (copy-on-write). Blocks of tokens
        that are in the middle of their loops stay the parent's: the child begins these again.
        """
        child.block_table = parent.block_table[: -(-parent.num_computed_tokens // self.block_size)]
        self.pool.acquire(child.block_table)
        child.prefix_keys = list(parent.prefix_keys)
        child.num_published_blocks = parent.num_published_blocks

    def count_lookup(self, request: Request, num_cached: int, stored: TierHit) -> None:
        """Record one admission in the statistics; the group keeps its first hit.

        num_cached: tokens found on the device.
        """
        first = not request.num_preemptions
        if self.tiers is not None and not request.wants_prompt_logprobs:
            self.tiers.admitted(request, stored, num_cached)
        if first and self.enable_prefix_caching:
            self.stats.num_queries += request.num_tokens
            self.stats.num_hits += num_cached
            request.group.num_cached_tokens = num_cached + self.num_found((), stored)

    def collect(self) -> None:
        """Take over what has come from the disk since the last step."""
        if self.tiers is not None:
            self.tiers.collect()

    def is_loading(self, request: Request) -> bool:
        """Are blocks of this request on their way from the disk?"""
        return self.tiers is not None and self.tiers.is_waiting(request)

    def wait_for_loads(self) -> None:
        """Sleep for a moment, or until something comes: a step found nothing else to do."""
        if self.tiers is not None:
            self.tiers.wait()

    def close(self) -> None:
        """Let the tiers write what is still queued, within bounds."""
        if self.tiers is not None:
            self.tiers.close()

    def forget(self, request: Request) -> None:
        """A waiting request is gone: what the tiers hold for it is let go."""
        if self.tiers is not None:
            self.tiers.release(request)

    def _blocks_needed(self, request: Request, num_new: int, cached: Sequence[int]) -> int:
        """New blocks for `num_new` tokens, the copy of a shared block included."""
        computed, table = request.num_computed_tokens, request.block_table
        if cached:
            computed, table = len(cached) * self.block_size, list(cached)
        needed = -(-(computed + num_new) // self.block_size) - len(table)
        first = computed // self.block_size
        if first < len(table) and self._refs(table[first]) > 1:
            needed += 1
        return needed

    def _take_hit(self, request: Request, cached: Sequence[int]) -> None:
        self.pool.acquire(cached)
        request.block_table = list(cached)
        request.num_published_blocks = len(cached)
        request.num_computed_tokens = len(cached) * self.block_size
        if self._events:
            span = (0, request.num_computed_tokens)
            self._events.emit("kv", "kv.prefix_hit", request.request_id, span, blocks=list(cached))

    def _publish(self, request: Request, num_tokens: int) -> list[int]:
        """Offer the blocks that are full once `num_tokens` tokens are computed."""
        if not self.enable_prefix_caching:
            return []
        full = min(num_tokens, request.num_shareable_tokens) // self.block_size
        if full <= request.num_published_blocks:
            return []
        self._extend_keys(request, full)
        published, table = [], request.block_table
        for i in range(request.num_published_blocks, full):
            previous = table[i - 1] if i else None
            if self.pool.publish(table[i], request.prefix_keys[i], previous):
                published.append(table[i])
        request.num_published_blocks = full
        if self._events and published:
            self._events.emit("kv", "kv.block_published", request.request_id, blocks=published)
        return published

    def _extend_keys(self, request: Request, num_blocks: int) -> None:
        keys, P = request.prefix_keys, self.block_size
        for i in range(len(keys), num_blocks):
            tokens = request.token_ids[i * P : (i + 1) * P]
            keys.append(
                make_key(keys[-1] if keys else None, tokens, extra_keys(request), self._hash)
            )


def extra_keys(request: Request) -> ExtraKeys:
    """What besides its tokens the KV of a request depends on, each tagged with its kind."""
    return extra_keys_of(request.params.cache_salt, request.num_loops, request.loop_kv_policy)
