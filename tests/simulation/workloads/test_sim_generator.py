"""D-02: generated traffic has the statistics it is asked for, and is the same for a seed."""

from __future__ import annotations

import hashlib
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from minifer.perf.load.arrivals import arrival_times
from minifer.simulation.workloads.arrivals import BLOCK, Arrival
from minifer.simulation.workloads.generator import Sessions, cold_warm, open_loop
from minifer.simulation.workloads.lengths import Lengths, Lognormal
from minifer.simulation.workloads.named import CHATS, WORKLOADS, make_workload
from minifer.simulation.workloads.published import PUBLISHED
from minifer.simulation.workloads.statistics import blocks_found, describe, requests_of
from minifer.simulation.workloads.trace_like import like

WHOLE = ("azure-code", "azure-conversation", "mooncake-conversation")  # no cut in their lengths
LENGTHS = Lengths(Lognormal(6.0, 1.0), Lognormal(4.0, 0.5), correlation=0.5)
TOO_LONG = Lengths(Lognormal(9, 0.1), Lognormal(1, 1), max_total=9)


def ks_distance(values: Sequence[float], cdf: Callable[[float], float]) -> float:
    """Kolmogorov and Smirnov's: the largest distance of two distribution functions, on both sides
    of every step of the one that was drawn."""
    largest, below, total = 0.0, 0, len(values)
    for value, count in sorted(Counter(values).items()):
        upto = below + count
        largest = max(largest, abs(below / total - cdf(value)), abs(upto / total - cdf(value)))
        below = upto
    return largest


@pytest.mark.parametrize("name", WHOLE)
def test_d02_lengths_are_the_published_lognormals(name: str) -> None:
    rows = like(PUBLISHED[name], 12_000, seed=1)
    lengths = PUBLISHED[name].lengths
    assert ks_distance([row.prompt_len for row in rows], lengths.prompt.cdf) <= 0.05
    assert ks_distance([row.output_len for row in rows], lengths.output.cdf) <= 0.05


def test_the_distance_sees_another_distribution() -> None:
    rows = like(PUBLISHED["azure-conversation"], 12_000, seed=1)
    other = Lognormal(6.63, 0.80)
    assert ks_distance([row.prompt_len for row in rows], other.cdf) > 0.05


def test_d02_arrivals_are_as_uneven_as_the_trace() -> None:
    for name, count in (("azure-code", 100_000), ("azure-conversation", 20_000)):
        trace = PUBLISHED[name]
        times = arrival_times(count, trace.rate, 1 / trace.cv**2, seed=5)
        gaps = [after - before for before, after in pairwise(times)]
        assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(trace.cv, rel=0.1)
    poisson = describe(like(PUBLISHED["mooncake-conversation"], 12_031, seed=2))
    assert poisson.cv == pytest.approx(1.0, rel=0.1)
    assert poisson.rate == pytest.approx(3.40, rel=0.05)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_d02_a_cache_without_limit_finds_what_it_finds_in_the_trace(seed: int) -> None:
    trace = PUBLISHED["mooncake-conversation"]
    rows = like(trace, 12_031, seed=seed)
    measured = describe(rows)
    assert trace.reuse is not None
    assert measured.bound == pytest.approx(trace.reuse.bound, abs=0.02)
    assert measured.token_bound == pytest.approx(0.374, abs=0.02)
    assert measured.num_sessions / len(rows) == pytest.approx(7_373 / 12_031, abs=0.02)
    assert {row.block_names[0] for row in rows if row.block_names} == {-(1 << 32)}  # all share it


def test_d02_short_conversations_have_the_means_and_the_correlation_of_the_trace() -> None:
    rows = like(PUBLISHED["azure-short"], 16_528, seed=1)
    measured = describe(rows)
    assert measured.correlation == pytest.approx(0.54, abs=0.03)
    assert measured.prompt.mean == pytest.approx(754, rel=0.03)
    assert measured.output.mean == pytest.approx(232, rel=0.03)
    assert max(row.prompt_len + row.output_len for row in rows) <= 2_048
    held = statistics.fmean((row.prompt_len + row.output_len) * row.output_len for row in rows)
    assert held == pytest.approx(2.9e5, rel=0.05)
    apart = describe(make_workload("azure-short-independent", 16_528, seed=1))
    assert (apart.prompt.mean, apart.output.mean) == pytest.approx((694, 201), rel=0.03)
    assert apart.correlation < 0  # the cut takes the long with the long
    rows = requests_of(make_workload("azure-short-independent", 16_528, seed=1))
    held = statistics.fmean((row.prompt_len + row.output_len) * row.output_len for row in rows)
    assert held == pytest.approx(2.1e5, rel=0.05)


def digest(rows: Sequence[Arrival]) -> str:
    text = "\n".join(
        f"{row.time:.6f} {row.prompt_len} {row.output_len} {row.block_names}" for row in rows
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


GOLDEN = {
    "azure-code": "c34d7979bd2f3d6d",
    "azure-conversation": "0784e3463f6d20ac",
    "azure-short": "5eac94da5e5ec5d2",
    "mooncake-conversation": "90fad605c6450130",
}


@pytest.mark.parametrize("name", list(GOLDEN))
def test_d02_the_first_thousand_rows_of_a_seed_are_known(name: str) -> None:
    rows = like(PUBLISHED[name], 1_000, seed=0)
    assert digest(rows) == GOLDEN[name]
    assert digest(like(PUBLISHED[name], 1_000, seed=1)) != GOLDEN[name]


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_another_rate_brings_the_same_requests_closer_together(name: str) -> None:
    slow, fast = (make_workload(name, 50, rate, seed=3) for rate in (0.5, 1.0))
    assert make_workload(name, 50, 0.5, seed=3) == slow
    assert describe(slow).rate < describe(fast).rate
    if not name.startswith(("chat", "cold")):
        assert [(r.prompt_len, r.output_len) for r in slow] == [
            (r.prompt_len, r.output_len) for r in fast
        ]
        assert [r.time for r in slow] == pytest.approx([2 * r.time for r in fast])


def test_lengths_correlate_as_asked_and_keep_their_distributions() -> None:
    rows = open_loop(LENGTHS, 20_000, 1.0, seed=4)
    measured = describe(rows)
    assert measured.log_correlation == pytest.approx(0.5, abs=0.02)
    assert ks_distance([row.output_len for row in rows], LENGTHS.output.cdf) <= 0.02
    assert measured.bound == 0 and measured.num_sessions == 20_000


def test_a_session_says_again_what_was_said_before() -> None:
    conversations = CHATS.closed_loop(200, 1.0, seed=6)
    assert len({c.turns[0].time for c in conversations}) == 200
    for conversation in conversations:
        for before, after in pairwise(conversation.turns):
            assert after.prompt_len > before.prompt_len + before.output_len
            assert after.prompt_len + after.output_len <= 16_384
            assert after.block_names[: len(before.block_names)] == before.block_names
            assert (after.session, after.turn) == (before.session, before.turn + 1)
            assert after.time > 0
    mean = statistics.fmean(len(c.turns) for c in conversations)
    assert mean == pytest.approx(5, rel=0.2)
    opened = CHATS.open_loop(200, 1.0, seed=6)
    times = [row.time for row in opened]
    assert times == sorted(times)
    assert len({row.request_id for row in opened}) == sum(len(c.turns) for c in conversations)


def test_tenants_share_their_system_prompt_and_nothing_else() -> None:
    one = Lengths(Lognormal.constant(1_500), Lognormal.constant(10))
    chats = Sessions(one, Lognormal.constant(5), turns=1, tenants=3, system_len=1_200, skew=1.0)
    rows = chats.open_loop(300, 1.0, seed=1)
    assert all(row.prompt_len == 2_700 and len(row.block_names) == 5 for row in rows)
    shares = [sum(row.tenant == f"tenant{k}" for row in rows) for k in range(3)]
    assert shares[0] > shares[1] > shares[2] > 0
    by_tenant: dict[str, set[tuple[int, ...]]] = {}
    for row in rows:
        by_tenant.setdefault(row.tenant, set()).add(row.block_names[:2])
    assert all(len(names) == 1 for names in by_tenant.values())
    assert len(set().union(*by_tenant.values())) == 3
    own = [name for row in rows for name in row.block_names[2:]]
    assert len(own) == len(set(own))
    assert sum(blocks_found(rows)) == 2 * (300 - 3)


def test_ten_turns_make_a_tenth_of_the_requests_cold() -> None:
    one = Lengths(Lognormal.constant(5_120), Lognormal.constant(10))
    chats = Sessions(one, Lognormal.constant(512), turns=10, fixed_turns=True)
    measured = describe(chats.open_loop(100, 1.0))
    assert measured.num_requests == 1_000
    assert (measured.cold, measured.warm) == (0.1, 0.9)


def test_the_cold_warm_study_has_its_contexts_and_its_ramp() -> None:
    rows = cold_warm(2.0, 3_000, seed=1)
    cold = [row for row in rows if row.turn == 0]
    warm = [row for row in rows if row.turn == 1]
    assert len(cold) / len(rows) == pytest.approx(0.10, abs=0.01)
    assert {row.stored_len for row in cold} == {8_000}
    contexts = [row.stored_len for row in warm]
    assert 20_000 <= min(contexts) <= max(contexts) <= 200_000
    assert statistics.fmean(contexts) == pytest.approx(86_000, rel=0.02)
    added = [row.prompt_len - row.stored_len for row in warm]
    assert min(added) == 200 and statistics.fmean(added) == pytest.approx(3_000, rel=0.05)
    first = sum(row.time < 15 for row in rows)
    assert first < 0.6 * 15 * 2.0  # half the time at half the rate, on average a quarter
    again = cold_warm(4.0, 3_000, seed=1)
    assert [row.prompt_len for row in again[:100]] == [row.prompt_len for row in rows[:100]]


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: open_loop(LENGTHS, 5, 0.0), "request_rate must be above 0"),
        (lambda: open_loop(LENGTHS, 5, 1.0, cv=-1), "cv and count must be at least 0"),
        (lambda: like(PUBLISHED["mooncake-conversation"], 5, rate=-1), "rate must be above 0"),
        (lambda: TOO_LONG.draw(random.Random(0)), "max_total=9 leaves none of"),
        (lambda: Lengths(Lognormal(1, 1), Lognormal(1, 1), 1.5), "correlation must be in"),
        (lambda: Lognormal(1, -1), "sigma must be at least 0"),
        (lambda: Lognormal(1, 1, 5, 4), "least must be in"),
        (lambda: Sessions(LENGTHS, Lognormal(1, 1), turns=0.5), "turns must be at least 1"),
        (lambda: Sessions(LENGTHS, Lognormal(1, 1), turns=1.5, fixed_turns=True), "whole if fixed"),
        (lambda: Sessions(LENGTHS, Lognormal(1, 1), tenants=2), "belong together"),
        (lambda: cold_warm(0, 5), "rate must be above 0"),
        (lambda: make_workload("poems", 5), "workload must be one of azure-code"),
        (lambda: make_workload("chat", 0), "number of requests must be at least 1"),
        (lambda: describe([]), "at least one request"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Callable[[], object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        call()


def test_blocks_are_names_of_full_blocks() -> None:
    for row in like(PUBLISHED["mooncake-conversation"], 500, seed=1):
        assert len(row.block_names) == row.prompt_len // BLOCK
