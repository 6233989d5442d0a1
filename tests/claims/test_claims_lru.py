"""Eviction policies against plain twins, the theorem, and the claim about LRU."""

from __future__ import annotations

import itertools
import json
import random
from collections import OrderedDict
from pathlib import Path

import pytest
from claim_helpers import check_complete, found

from minifer.claims import lru
from minifer.claims.claim import Settings
from minifer.claims.eviction import (
    FIFO,
    LFU,
    S3FIFO,
    Clairvoyant,
    EngineLRU,
    Prompt,
    hit_rate,
    next_uses,
    optimal_misses,
    prompts,
    reuse_bound,
)


class PlainLRU:
    """The twin of the engine's tier: an ordered dictionary, touched from tail to head."""

    def __init__(self, size: int) -> None:
        self.size, self.blocks = size, OrderedDict[int, None]()

    def hits(self, prompt: Prompt) -> int:
        return sum(1 for _ in itertools.takewhile(self.blocks.__contains__, prompt.ids))

    def use(self, prompt: Prompt, when: int) -> None:
        for block in reversed(prompt.ids):
            if block in self.blocks:
                self.blocks.move_to_end(block)
        for block in reversed(prompt.ids):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
            if len(self.blocks) > self.size:
                self.blocks.popitem(last=False)


def chats(count: int, seed: int = 0) -> list[Prompt]:
    """Requests of growing chats with a shared first block; names are not unique to a chat."""
    rng, open_chats, requests = random.Random(seed), [], []
    for _ in range(count):
        if open_chats and rng.random() < 0.5:
            chat = open_chats.pop(rng.randrange(len(open_chats)))
        else:
            chat = [0]
        chat = chat + [rng.randrange(50) for _ in range(rng.randrange(1, 5))]
        requests.append(chat)
        if rng.random() < 0.7:
            open_chats.append(chat)
    return prompts(requests)


def test_equal_names_are_one_block_only_after_equal_names() -> None:
    a, b, c = prompts([(1, 2, 3), (1, 2, 4), (9, 2, 3)])
    assert a.ids[:2] == b.ids[:2] and a.ids[2] != b.ids[2]
    assert set(a.ids).isdisjoint(c.ids)
    assert a.keys[1] is b.keys[1]
    assert prompts([()]) == []


@pytest.mark.parametrize("size", [5, 20, 80])
def test_the_engines_tier_is_lru(size: int) -> None:
    requests = chats(600)
    assert hit_rate(requests, EngineLRU(size)) == hit_rate(requests, PlainLRU(size))


@pytest.mark.parametrize("make", [EngineLRU, FIFO, LFU, S3FIFO])
@pytest.mark.parametrize("size", [5, 20, 80])
def test_nobody_beats_the_clairvoyant_nor_it_the_bound(make, size: int) -> None:
    requests = chats(600)
    best = hit_rate(requests, Clairvoyant(size, next_uses(requests)))
    assert hit_rate(requests, make(size)) <= best <= reuse_bound(requests)


def test_a_cache_without_limit_serves_every_reuse() -> None:
    requests = chats(300)
    bound = reuse_bound(requests)
    for cache in (EngineLRU(10**6), FIFO(10**6), LFU(10**6), S3FIFO(10**6)):
        assert hit_rate(requests, cache) == pytest.approx(bound)


def best_of_all(string: tuple[int, ...], size: int) -> int:
    """Fewest misses over every choice of victims: what Belady's rule is compared with."""
    states = {frozenset(): 0}
    for block in string:
        following: dict[frozenset[int], int] = {}
        for held, misses in states.items():
            if block in held:
                choices, cost = [held], misses
            else:
                cost = misses + 1
                full = len(held) == size
                choices = [held - {v} | {block} for v in held] if full else [held | {block}]
            for choice in choices:
                following[choice] = min(cost, following.get(choice, 10**9))
        states = following
    return min(states.values())


def test_beladys_rule_is_optimal() -> None:
    rng = random.Random(0)
    for _ in range(60):
        string = tuple(rng.randrange(5) for _ in range(14))
        for size in (1, 2, 3):
            assert optimal_misses(string, size) == best_of_all(string, size)


def test_k03_the_bound_holds_and_a_loop_reaches_it() -> None:
    half, same, broken = lru.theorem(seed=0)
    assert broken == 0
    loop = [i % 9 for i in range(300)]
    assert lru.lru_misses(loop, 8) == 300  # never a hit
    assert same == 300 / optimal_misses(loop, 8) > 6
    assert half <= 2.2  # 8 / (8 − 4 + 1) = 1.6, and the first blocks of short strings


def test_within_2_on_misses_and_not_on_hits() -> None:
    """Smaller than the command's own workload, the same statistics."""
    requests = lru.workload(Settings(seed=0))[1][:4000]
    rates = lru.replay(requests, sizes=(300, 1000, 30_000))
    for shares in rates.values():
        assert (1 - shares["LRU"]) / (1 - shares[lru.BEST]) < 2
    assert rates[300][lru.BEST] / rates[300]["LRU"] > 2
    assert rates[30_000]["LRU"] == max(rates[30_000][name] for name in lru.POLICIES)


def test_a_trace_of_ones_own(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000 * i, "input_length": 1024, "output_length": 5, "hash_ids": ids}
        for i, ids in enumerate([[1, 2], [1, 3], [1, 2]])
    ]
    file = tmp_path / "own.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    said, requests = lru.workload(Settings(trace=file))
    assert said == "replay of own.jsonl (mooncake format)"
    assert reuse_bound(requests) == pytest.approx(0.5)
    plain = tmp_path / "plain.jsonl"
    plain.write_text('{"time": 0, "input_len": 3, "output_len": 4}\n')
    with pytest.raises(ValueError, match="trace must hold blocks"):
        lru.workload(Settings(trace=plain))


@pytest.mark.slow
def test_the_whole_claim() -> None:
    findings = found("lru")
    check_complete("lru", findings)
    values = findings.values
    assert values["worst_miss_ratio"] < 2 < values["worst_hit_ratio"]
    assert values["theorem_violations"] == 0
    assert values["loop_miss_ratio"] > 6
