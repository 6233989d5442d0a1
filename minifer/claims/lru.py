"""LRU against the policy that knows the future: within 2× on misses, far from it on hits.

The engine's own tier is replayed over a workload, beside small textbook policies and Belady's. The
theorem behind the claim is checked on strings made to break it: with k blocks LRU misses at most
k ÷ (k − h + 1) times as often as the optimum with h, which is 2 when the optimum has half the
memory, and k when it has the same.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from minifer.claims.claim import Claim, Curve, CurvePanel, Findings, Settings, Table
from minifer.claims.eviction import (
    FIFO,
    LFU,
    S3FIFO,
    Cache,
    Clairvoyant,
    EngineLRU,
    Prompt,
    hit_rate,
    next_uses,
    optimal_misses,
    prompts,
    reuse_bound,
)
from minifer.claims.sources import MOONCAKE, S3_FIFO, SLEATOR_TARJAN, TALK
from minifer.perf.load.traces import load_trace
from minifer.simulation.workloads.arrivals import BLOCK
from minifer.simulation.workloads.published import PUBLISHED
from minifer.simulation.workloads.trace_like import like

SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
POLICIES: dict[str, Callable[[int], Cache]] = {
    "FIFO": FIFO,
    "LRU": EngineLRU,
    "LFU": LFU,
    "S3-FIFO": S3FIFO,
}
BEST = "clairvoyant"
LOOP = 8  # blocks of the cache in the strings of the theorem


def workload(settings: Settings) -> tuple[str, list[Prompt]]:
    """What is replayed, in words, and its prompts."""
    if settings.trace is not None:
        trace = load_trace(settings.trace)
        requests = prompts(row.hash_ids for row in trace.rows)
        if not requests:
            raise ValueError(
                f"trace must hold blocks (hash_ids, Mooncake's format), {settings.trace} has none"
            )
        return f"replay of {settings.trace.name} ({trace.format} format)", requests
    statistics = PUBLISHED["mooncake-conversation"]
    rows = like(statistics, statistics.num_requests, seed=settings.seed)
    said = f"replay of generated requests with the statistics of {statistics.about}"
    return f"{said}, seed {settings.seed}", prompts(row.block_names for row in rows)


def replay(requests: Sequence[Prompt], sizes: Sequence[int] = SIZES) -> dict[int, dict[str, float]]:
    """Capacity in blocks → policy → share of blocks served."""
    future = next_uses(requests)
    out = {}
    for size in sizes:
        rates = {name: hit_rate(requests, make(size)) for name, make in POLICIES.items()}
        out[size] = rates | {BEST: hit_rate(requests, Clairvoyant(size, future))}
    return out


def lru_misses(string: Sequence[int], size: int) -> int:
    """Of the engine's tier, on single blocks."""
    requests = prompts([block] for block in string)
    return round(len(string) * (1 - hit_rate(requests, EngineLRU(size))))


def theorem(seed: int, k: int = LOOP) -> tuple[float, float, int]:
    """(worst LRU(k) ÷ OPT(k / 2), worst LRU(k) ÷ OPT(k), strings that exceed the bound), over 200
    random strings and the loop over k + 1 blocks. The first k misses, which anybody pays, are left
    out of the ratios; the bound is held with them, as it is stated (+ h)."""
    rng = random.Random(seed)
    strings = [[rng.randrange(12) for _ in range(300)] for _ in range(200)]
    strings.append([i % (k + 1) for i in range(300)])
    half = same = 0.0
    broken = 0
    for string in strings:
        misses = lru_misses(string, k)
        for h in range(1, k + 1):
            broken += misses > k / (k - h + 1) * optimal_misses(string, h) + h
        half = max(half, misses / optimal_misses(string, k // 2))
        same = max(same, misses / optimal_misses(string, k))
    return half, same, broken


def reproduce(settings: Settings) -> Findings:
    basis, requests = workload(settings)
    rates = replay(requests)
    bound = reuse_bound(requests)
    misses = {size: (1 - r["LRU"]) / (1 - r[BEST]) for size, r in rates.items()}
    hits = {size: r[BEST] / r["LRU"] for size, r in rates.items()}
    worst = max(misses, key=misses.__getitem__)
    small = max(hits, key=hits.__getitem__)
    half, same, broken = theorem(settings.seed)
    uses = Counter(block for prompt in requests for block in prompt.ids)
    once = sum(count == 1 for count in uses.values()) / len(uses)
    best_plain = {size: max(POLICIES, key=r.__getitem__) for size, r in rates.items()}
    leaders = ", ".join(f"{name} at {size:,}" for size, name in best_plain.items())
    return Findings(
        basis=f"{basis}; {len(requests):,} requests, {sum(uses.values()):,} blocks of {BLOCK} "
        "tokens; LRU is the engine's own tier",
        verdict=f"true of misses (at most {misses[worst]:.2f}× here), false of hits (1/"
        f"{hits[small]:.1f} of the best at {small:,} blocks) and false of loops ({same:.1f}×)",
        reproduction=f"LRU has at most {misses[worst]:.2f}× the misses of the clairvoyant policy "
        f"(at {worst:,} blocks). The theorem's bound k ÷ (k − h + 1) is exceeded by {broken} of "
        f"201 strings; against half the memory the worst one has {half:.2f}×.",
        breaking=f"counting hits, which is what a cache is for: at {small:,} blocks LRU serves "
        f"{rates[small]['LRU']:.1%}, the clairvoyant policy {rates[small][BEST]:.1%}, "
        f"{hits[small]:.1f}× as much. And equal memory in the worst case: in a loop over one block "
        f"more than fits LRU never hits, and has {same:.1f}× the misses of the optimum (the "
        f"theorem promises 2× only against half the memory).",
        honest=(
            "LRU's misses are within 2× of the best possible on this traffic. Its hits are not.",
            f"Most blocks ({once:.0%}) are used once, so most misses are nobody's fault; they hide "
            "how many hits a policy gives away.",
            f"No simple policy wins everywhere. Best by capacity: {leaders}.",
            f"A cache without limit would serve {bound:.1%}; beyond that only another workload "
            "helps.",
            "The clairvoyant policy is optimal block by block. With hits that count only in an "
            "unbroken prefix it is a bound nobody has proved.",
        ),
        tables=(
            Table(
                "share of blocks served, by capacity in blocks",
                {
                    "blocks": ",d",
                    **dict.fromkeys((*POLICIES, BEST), ".4f"),
                    "LRU's misses": ".2f",
                    "best hits ÷ LRU's": ".2f",
                },
                tuple((s, *r.values(), misses[s], hits[s]) for s, r in rates.items()),
            ),
        ),
        panels=(
            CurvePanel(
                "What a cache of so many blocks serves",
                f"capacity, blocks of {BLOCK} tokens",
                "share of blocks served",
                tuple(
                    Curve.of(
                        f"{name} (the engine's)" if name == "LRU" else name,
                        {size: r[name] for size, r in rates.items()},
                    )
                    for name in (*POLICIES, BEST)
                ),
                log="x",
                y_marks={"no limit": bound},
            ),
            CurvePanel(
                "LRU against the clairvoyant policy",
                f"capacity, blocks of {BLOCK} tokens",
                "ratio",
                (
                    Curve.of("LRU's misses ÷ best", misses),
                    Curve.of("best hits ÷ LRU's", hits),
                ),
                log="x",
                y_marks={"2×": 2.0},
            ),
        ),
        values={
            "worst_miss_ratio": misses[worst],
            "worst_hit_ratio": hits[small],
            "worst_hit_ratio_blocks": small,
            "loop_miss_ratio": same,
            "half_memory_miss_ratio": half,
            "theorem_violations": broken,
            "reuse_bound": bound,
            "used_once": once,
        },
    )


CLAIM = Claim(
    name="lru",
    statement="evicting the least recently used KV is within 2× of optimal",
    sources=(TALK, SLEATOR_TARJAN, MOONCAKE, S3_FIFO),
    reproduce=reproduce,
    code=(
        ("minifer/kv/tiers/dram.py", "the LRU that is replayed"),
        ("minifer/claims/eviction.py", "the policies beside it, and the clairvoyant one"),
    ),
    trace="JSONL with hash_ids (Mooncake's format)",
)
