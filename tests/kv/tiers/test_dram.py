"""The tier in memory: what it finds, what it evicts, what it must not."""

from __future__ import annotations

import random

import pytest
from tier_helpers import content, make_chain, numbered

from minifer.kv.prefix_key import make_key
from minifer.kv.tiers.dram import DramTier, chain
from minifer.kv.tiers.stats import TierStats


def dram(capacity: int) -> DramTier:
    return DramTier(capacity, TierStats())


def touch(tier: DramTier, keys, tail_first: bool = True) -> None:
    """A request uses a prefix."""
    keep = {key.digest for key in keys}
    tier.touch(keys[-1])
    for key in keys:
        if tier.put(key, content(key), keep) is None:
            break
    if tail_first:
        tier.touch(keys[-1])


def test_case_146_what_was_stored_is_found():
    """vllm-project/vllm#53498: blocks were stored and never registered."""
    tier, keys = dram(8), numbered(3)
    touch(tier, keys)
    assert [block.payload for block in tier.match(keys)] == [content(key) for key in keys]
    other_objects = numbered(3)
    assert len(tier.match(other_objects)) == 3
    assert tier.match(numbered(3, start=1)) == []


def test_a_run_ends_at_the_first_gap():
    tier, keys = dram(8), numbered(4)
    for key in (keys[0], keys[2], keys[3]):
        tier.put(key, b"")
    assert len(tier.match(keys)) == 1
    assert len(tier.match(keys[2:])) == 2  # after blocks that the device has


def prefix_of(key) -> list[tuple[int, ...]]:
    return [link.token_ids for link in chain(key)]


def test_k07_a_collision_is_found_out_by_comparing_tokens():
    def one_byte(data: bytes) -> bytes:
        return bytes([sum(data) % 16])

    tier, by_digest = dram(1000), {}
    hits = 0
    for a in range(40):
        for b in range(40):
            keys = make_chain((a,), (b,), (a, b), hash_function=one_byte)
            for start in range(3):  # what comes before may be on the device
                for block, key in zip(tier.match(keys[start:]), keys[start:], strict=False):
                    assert block.payload == prefix_of(key)
            for key in keys:
                wanted = prefix_of(key)
                held = tier.put(key, wanted)
                if held is not None:
                    hits += held.payload is not wanted
                    assert held.payload == wanted
                by_digest.setdefault(key.digest, set()).add((a, b))
    assert len(by_digest) <= 16 and hits > 0


def test_k09_an_adapter_is_not_a_salt_of_the_same_name():
    tier = dram(8)
    (salted,) = make_chain((1, 2), extra=(("salt", "x"),))
    (adapted,) = make_chain((1, 2), extra=(("adapter", "x"),))
    (plain,) = make_chain((1, 2))
    tier.put(salted, b"salted")
    assert tier.match([adapted]) == tier.match([plain]) == []
    assert len(tier.match([salted])) == 1


def test_the_least_recently_used_goes_first():
    tier = dram(3)
    a, b, c, d = (make_key(None, (i,)) for i in range(4))
    for key in (a, b, c):
        tier.put(key, b"")
    tier.touch(a)
    tier.put(d, b"")
    assert tier.get(b) is None and tier.get(a) is not None
    assert tier._stats.evicted["dram"] == 1


def test_a_pinned_block_stays_and_a_full_tier_refuses():
    tier = dram(2)
    a, b, c = (make_key(None, (i,)) for i in range(3))
    first, second = tier.put(a, b""), tier.put(b, b"")
    first.pins, second.writing = 1, True
    assert tier.room == 0
    assert tier.put(c, b"") is None
    assert len(tier) == 2
    second.writing = False
    assert tier.put(c, b"") is not None
    assert tier.get(b) is None and tier.get(a) is first


def test_reserved_room_is_not_given_away():
    tier = dram(4)
    tier.reserved = 3
    a, b = (make_key(None, (i,)) for i in range(2))
    assert tier.put(a, b"") is not None
    assert tier.put(b, b"") is not None
    assert len(tier) == 1 and tier.get(b) is not None


def test_a_prefix_longer_than_the_tier_keeps_its_front():
    tier, keys = dram(4), numbered(10)
    touch(tier, keys)
    assert len(tier.match(keys)) == 4
    more = [*keys, *[make_key(keys[-1], (99,))]]
    touch(tier, more)
    assert len(tier.match(more)) == 4


class BlockLRU:
    """Sleator and Tarjan's LRU, block by block: the twin of a `DramTier` of single blocks."""

    def __init__(self, size: int) -> None:
        self.size, self.blocks = size, []

    def use(self, block: int) -> bool:
        hit = block in self.blocks
        if hit:
            self.blocks.remove(block)
        self.blocks = [*self.blocks, block][-self.size :]
        return hit


def optimal_misses(string: list[int], size: int) -> int:
    """Belady 1966: evict what is used furthest in the future."""
    held: set[int] = set()
    misses = 0
    for when, block in enumerate(string):
        if block not in held:
            misses += 1
            if len(held) == size:
                rest = string[when + 1 :]
                held.remove(max(held, key=lambda b: rest.index(b) if b in rest else len(rest)))
            held.add(block)
    return misses


def test_k03_lru_is_competitive():
    """Sleator and Tarjan 1985: misses of LRU(k) <= k / (k - h + 1) · OPT(h) + h."""
    rng, k = random.Random(0), 8
    strings = [[rng.randrange(12) for _ in range(150)] for _ in range(200)]
    cyclic = [i % (k + 1) for i in range(300)]  # one block more than fits
    keys = [make_key(None, (i,)) for i in range(12)]
    for string in [*strings, cyclic]:
        tier, twin, misses = dram(k), BlockLRU(k), 0
        for block in string:
            hit = tier.get(keys[block]) is not None
            assert hit == twin.use(block)
            misses += not hit
            touch(tier, [keys[block]])
        for h in (2, 5, k):
            assert misses <= k / (k - h + 1) * optimal_misses(string, h) + h
    assert misses == 300


def conversations(count: int, seed: int = 0) -> list[list[int]]:
    """Requests as block ids, head first: 12 shared system prompts, turns that grow."""
    rng, requests, fresh = random.Random(seed), [], iter(range(1000, 10**9))
    open_chats: list[list[int]] = []
    for _ in range(count):
        if open_chats and rng.random() < 0.4:
            chat = open_chats.pop(rng.randrange(len(open_chats)))
        else:
            chat = [rng.randrange(12)]
        chat = [*chat, *[next(fresh) for _ in range(1 + int(rng.expovariate(0.3)))]]
        requests.append(chat)
        if rng.random() < 0.6:
            open_chats.append(chat)
    return requests


def replay(requests, capacity: int, tail_first: bool) -> tuple[float, int]:
    """Hit rate in blocks, and blocks left whose front is gone."""
    tier, hits, total = dram(capacity), 0, 0
    for blocks in requests:
        keys = make_chain(*[(block,) for block in blocks])
        hits += len(tier.match(keys))
        total += len(blocks)
        if tail_first:
            touch(tier, keys)
        else:  # what a plain LRU does: in the order of use
            for key in keys:
                if key.digest in tier._blocks:
                    tier._blocks.move_to_end(key.digest)
                tier.put(key, b"")
    stranded = 0
    for block in tier:
        above = block.key.parent
        while above is not None and tier.get(above) is not None:
            above = above.parent
        stranded += above is not None
    return hits / total, stranded


@pytest.mark.parametrize("capacity", [20, 60, 200])
def test_k04_no_block_outlives_what_is_in_front_of_it(capacity):
    requests = conversations(1500)
    good, stranded = replay(requests, capacity, tail_first=True)
    plain, plainly_stranded = replay(requests, capacity, tail_first=False)
    assert stranded == 0 < plainly_stranded
    assert good >= plain
