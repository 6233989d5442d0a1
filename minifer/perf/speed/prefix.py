"""What a prefix-cache hit is worth: the first token of a prompt whose beginning is known."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from minifer.perf.bench import BenchmarkResult, run_benchmark
from minifer.perf.speed.cells import Ask
from minifer.perf.speed.session import Session
from minifer.perf.speed.stamps import first_tokens

HIT, MISS = "with hit", "without hit"
TAIL = 32  # tokens of its own that each prompt ends with


def measure_prefix(
    session: Session,
    shared: int,
    vocab_size: int,
    *,
    seed: int,
    runs: int,
    settings: Mapping[str, Any],
) -> BenchmarkResult:
    """Prompts of `shared` + `TAIL` tokens, in turns: one whose first `shared` tokens an earlier
    prompt had, one that shares nothing. `ratios[MISS]["first_token_seconds"]`: how many times
    sooner the hit gets its first token, a round each.

    details: tokens found in the cache, at most, of each arm. Raises `ValueError` for shared < 1.
    """
    if shared < 1:
        raise ValueError(f"--shared-prefix must be at least 1, got {shared}")
    rng = random.Random(f"{seed}/prefix")

    def draw(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab_size) for _ in range(count))

    known = draw(shared)
    cached = {HIT: 0, MISS: 0}

    def first(arm: str, prefix: tuple[int, ...]) -> dict[str, float]:
        run = session.run([Ask(prefix + draw(TAIL), 1)])
        cached[arm] = max(cached[arm], *run.cached)
        return {"first_token_seconds": first_tokens(run.started, run.stamps)[0]}

    first(HIT, known)  # the request that leaves the prefix behind
    cached[HIT] = 0
    result = run_benchmark(
        "prefix",
        {HIT: lambda: first(HIT, known), MISS: lambda: first(MISS, draw(shared))},
        runs=runs,
        units={"first_token_seconds": "s"},
        settings={**settings, "shared_prefix": shared, "tail": TAIL},
    )
    return replace(result, details={"cached_tokens": dict(cached)})


def prefix_lines(result: BenchmarkResult) -> list[str]:
    """For people."""
    sooner = result.ratios[MISS]["first_token_seconds"]
    lines = []
    for arm in (MISS, HIT):
        seconds = result.arms[arm]["first_token_seconds"]
        lines.append(
            f"{arm:12} first token after {seconds.median * 1e3:.1f} ms (IQR "
            f"{seconds.iqr * 1e3:.1f}), {result.details['cached_tokens'][arm]} tokens cached"
        )
    lines.append(
        f"a hit on {result.settings['shared_prefix']} tokens gets its first token "
        f"{sooner.median:.1f} times sooner ({sooner.min:.1f} to {sooner.max:.1f} over "
        f"{result.runs} rounds)"
    )
    return lines
