"""Which blocks are stored, counted on conversations with the statistics of a published trace."""

from __future__ import annotations

import random
from collections import Counter

from minifer.kv.tiers.write_policy import SecondTouch, WriteThrough


def mooncake_like(count: int, seed: int = 0) -> list[list[tuple[int, int]]]:
    """Requests as block names, 512 tokens each, in order of time.

    Fitted to Mooncake's conversation trace (FAST 2025, 12,031 requests): prompts lognormal(8.74,
    1.20), 1.63 requests a conversation at 3.4 requests a second, the next one after lognormal(4.81,
    1.067) seconds (p50 123 s, p90 483 s) with p50 829 new tokens; block 0 is common to all.
    """
    rng, now, turns = random.Random(seed), 0.0, []
    number = 0
    while len(turns) < count:
        number += 1
        now += rng.expovariate(3.40 / 1.63)
        when, tokens = now, rng.lognormvariate(8.74, 1.20)
        chance = 0.22
        while True:
            blocks = [(number, i) if i else (0, 0) for i in range(int(min(tokens, 128e3) // 512))]
            turns.append((when, number, blocks))
            if rng.random() > chance:
                break
            when += rng.lognormvariate(4.81, 1.067)
            tokens += rng.lognormvariate(6.72, 0.8)
            chance = 1 - 0.22 / 0.63
    turns.sort()
    return [blocks for _, _, blocks in turns[:count]]


def written(requests, policy) -> set[tuple[int, int]]:
    stored: set[tuple[int, int]] = set()
    for blocks in requests:
        for block in blocks:
            if block not in stored and policy.admits(repr(block).encode()):
                stored.add(block)
    return stored


def test_k12_waiting_for_the_second_use_writes_a_quarter():
    requests = mooncake_like(6000)
    uses = Counter(block for blocks in requests for block in blocks)
    assert 0.6 < sum(count == 1 for count in uses.values()) / len(uses) < 0.85

    through = written(requests, WriteThrough())
    second = written(requests, SecondTouch(10**6))
    assert through == set(uses)
    assert second == {block for block, count in uses.items() if count > 1}
    assert 3.5 < len(through) / len(second) < 6

    def wasted(stored, first_reuse):
        return sum(uses[block] < first_reuse for block in stored) / len(stored)

    assert wasted(through, 2) > 0.6  # written and never used again
    assert wasted(second, 2) == 0


def test_k12_names_that_were_forgotten_count_as_new():
    requests = mooncake_like(1500)
    few, many = SecondTouch(1000), SecondTouch(10**6)
    assert written(requests, few) < written(requests, many)
    assert len(few) <= 1000


def test_the_second_touch_counts():
    policy = SecondTouch(2)
    assert [policy.admits(name) for name in (b"a", b"b", b"a", b"c", b"b", b"a")] == [
        False, False, True, False, False, False,
    ]  # fmt: skip
