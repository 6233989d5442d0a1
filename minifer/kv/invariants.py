"""What must hold between any two steps. Property tests and debug mode call it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from minifer.debug import DebugError
from minifer.kv.manager import KVCacheManager
from minifer.kv.prefix_index import HashChainIndex
from minifer.kv.prefix_key import make_key
from minifer.kv.radix_index import RadixIndex
from minifer.kv.tiers.dram import DramTier
from minifer.request import Request


def check_invariants(kv: KVCacheManager, requests: Iterable[Request]) -> None:
    """Raise `DebugError` with the first broken invariant.

    requests: every request that may hold blocks.
    """
    requests, pool = list(requests), kv.pool
    held = Counter(block for request in requests for block in request.block_table)
    for block in pool.blocks:
        count, free = block.ref_count, block.block_id in pool.free_queue
        _require(count == held[block.block_id], "{} is in {} tables", block, held[block.block_id])
        _require(free == (count == 0), "{} is free: {}", block, free)
    for request in requests:
        _check_request(kv, request)
    published = {block.block_id for block in pool.blocks if block.key is not None}
    if isinstance(pool.index, HashChainIndex):
        entries = {block for _, block in pool.index._entries.values()}
        _require(entries == published, "index holds {}, blocks say {}", entries, published)
        for digest, (key, block_id) in pool.index._entries.items():
            _require(key.digest == digest, "entry of block {} has another digest", block_id)
            _require(pool.blocks[block_id].key is key, "block {} carries another key", block_id)
    if isinstance(pool.index, RadixIndex):
        _check_radix(kv, pool.index, published)
    if kv.tiers is not None:
        _check_dram(kv.tiers.dram)


def _check_request(kv: KVCacheManager, request: Request) -> None:
    if request.finished:
        _require(not request.block_table, "{} still holds {}", request, request.block_table)
        return
    computed, total = request.num_computed_tokens, request.num_tokens
    _require(0 <= computed <= total, "{} computed more than it has", request)
    needed = -(-(computed + request.num_suspended_tokens) // kv.block_size)
    _require(len(request.block_table) == needed, "{} holds {}", request, request.block_table)
    full = request.num_published_blocks
    _require(full * kv.block_size <= computed, "{} published what is not computed", request)
    parent = None
    for i, block_id in enumerate(request.block_table[:full]):
        tokens = request.token_ids[i * kv.block_size : (i + 1) * kv.block_size]
        _require(
            request.prefix_keys[i].token_ids == tuple(tokens), "{} key {} is stale", request, i
        )
        key = kv.pool.blocks[block_id].key
        if key is not None:
            _require(
                key.token_ids == tuple(tokens), "{} shares a foreign block {}", request, block_id
            )
        parent = make_key(parent, tokens, request.prefix_keys[i].extra, kv._hash)
        _require(
            request.prefix_keys[i].digest == parent.digest, "{} digest {} is stale", request, i
        )


def _check_radix(kv: KVCacheManager, index: RadixIndex, published: set[int]) -> None:
    seen: list[int] = []
    for extra, root in index.roots.items():
        for node in root.subtree():
            seen += node.blocks
            lengths = {len(tokens) for tokens in node.tokens}
            _require(lengths <= {kv.block_size}, "a node holds a part of a block")
            _require(bool(node.blocks) == (node is not root), "an empty node below the root")
            counts = [kv.pool.blocks[b].ref_count for b in node.blocks]
            for first, child in node.children.items():
                _require(child.tokens[0] == first, "a child is filed under another key")
                _require(child.parent is node, "a child has another parent")
                counts_below = kv.pool.blocks[child.blocks[0]].ref_count
                lock = counts[-1] if counts else counts_below
                _require(counts_below <= lock, "a child is in more tables than its parent")
            _require(counts == sorted(counts, reverse=True), "counts rise along a path")
            for block in node.blocks:
                key = kv.pool.blocks[block].key
                _require(key is not None and key.extra == extra, "block {}: wrong tree", block)
                _require(index._node_of.get(block) is node, "block {} is filed elsewhere", block)
    _require(sorted(seen) == sorted(published), "tokens in the tree ≠ evictable + protected")


def _check_dram(dram: DramTier) -> None:
    _require(dram.reserved >= 0, f"{dram.reserved} blocks of DRAM are reserved")
    used = len(dram) + dram.reserved
    _require(used <= dram.capacity, f"{used} blocks of DRAM in use, {dram.capacity} allowed")
    seen: set[bytes] = set()  # from the least recently used on
    for block in dram:
        parent = block.key.parent
        _require(block.pins >= 0, f"{block.key.digest.hex()} is pinned {block.pins} times")
        _require(parent is None or parent.digest not in seen, "a block would outlive its prefix")
        seen.add(block.key.digest)


def _require(holds: bool, message: str, *values: object) -> None:
    """Thousands of these hold in every step, so the message is put together when one does not."""
    if not holds:
        raise DebugError(message.format(*values))
