"""What a run was worth (by hand), intervals against a simulation of them, and S-08."""

from __future__ import annotations

import json
import math
import random
from array import array
from functools import partial

import numpy as np
import pytest

from minifer.config import EngineConfig
from minifer.routing.policy import Role
from minifer.simulation.cluster import Cluster, StoreLevel, identical
from minifer.simulation.measures.intervals import mean_interval, share_interval
from minifer.simulation.measures.metrics import (
    SERIES,
    Percentiles,
    measure,
    meets,
    parse_limits,
    series,
    statistic,
)
from minifer.simulation.measures.saturation import saturation_of
from minifer.simulation.measures.search import Limit, Study, find_capacities, find_capacity
from minifer.simulation.result import NodeRecord, RequestRecord, SimulationResult
from minifer.simulation.simulator import simulate
from minifer.simulation.steps.published import PUBLISHED_STEPS
from minifer.simulation.steps.times import FixedSteps
from minifer.simulation.workloads.arrivals import BLOCK
from minifer.simulation.workloads.generator import cold_warm, open_loop
from minifer.simulation.workloads.lengths import Lengths, Lognormal


def request(
    name: str, arrived: float, times: list[float], prompt: int = 1_000, cached: int = 0, **more
) -> RequestRecord:
    fields = {
        "admitted": times[0] - 0.5 if times else None,
        "first_token": times[0] if times else None,
        "end": times[-1] if times else None,
        "token_times": array("d", times),
        "cached_len": cached,
        "output_len": len(times),
        **more,
    }
    return RequestRecord(name, arrived, prompt, **fields)


def run(*records: RequestRecord, busy: float = 1.0, seconds: float = 10.0) -> SimulationResult:
    node = NodeRecord("mixed0", Role.MIXED, busy_seconds=busy)
    return SimulationResult(list(records), [node], seconds)


A = request("a", 0.0, [2.0, 2.5, 3.0])  # cold: TTFT 2, gaps 0.5
B = request("b", 1.0, [1.5, 1.75, 3.5], cached=600)  # warm: TTFT 0.5, longest gap 1.75
C = request("c", 2.0, [4.0], cached=500)  # just warm: half was there; one token
REFUSED = request("d", 3.0, [], rejected="ttft", end=3.0)
WAITING = request("e", 4.0, [], output_len=5)


def test_every_metric_by_hand() -> None:
    result = run(A, B, C, REFUSED, WAITING, busy=5.0)
    metrics = measure(result, {"ttft": 1.0, "tpot": 2.0})
    assert (metrics.num_requests, metrics.num_finished, metrics.num_rejected) == (5, 3, 1)
    assert metrics.seconds == 4.0 and metrics.offered == 1.0
    assert metrics.ttft == Percentiles.of([2.0, 0.5, 2.0])
    assert metrics.cold_ttft == Percentiles.of([2.0])
    assert metrics.warm_ttft == Percentiles.of([0.5, 2.0])
    assert metrics.itl == Percentiles.of([0.5, 0.5, 0.25, 1.75])
    assert metrics.max_itl == Percentiles.of([0.5, 1.75])
    assert metrics.tpot == Percentiles.of([0.5, 1.0])
    assert metrics.e2e == Percentiles.of([3.0, 2.5, 2.0])
    assert metrics.attainment is not None and metrics.attainment.value == pytest.approx(1 / 5)
    assert metrics.goodput is not None and metrics.goodput.value == pytest.approx(1 / 5)
    assert metrics.hit_rate == pytest.approx(1_100 / 5_000)
    assert metrics.starvation_age == 6.0  # e, from 4 until the run ended at 10
    assert metrics.utilisation == {"mixed0": 0.5}
    json.dumps(metrics.to_dict(), allow_nan=False)


def test_one_long_gap_a_request_hides_in_the_percentile_over_tokens() -> None:
    """One gap of 1 s in 250 tokens, in each request: not even the P99 over tokens shows it."""
    times = [0.1 * k for k in range(200)] + [20.9 + 0.1 * k for k in range(50)]
    metrics = measure(run(*(request(f"r{i}", 0.0, times) for i in range(20)), seconds=30))
    assert metrics.itl is not None and metrics.max_itl is not None
    assert metrics.itl.p99 == pytest.approx(0.1)
    assert metrics.max_itl.p50 == pytest.approx(1.0)


def test_limits_hold_each_for_its_own_kind() -> None:
    assert meets(A, {"cold_ttft": 2.0, "warm_ttft": 0.1})
    assert not meets(B, {"cold_ttft": 2.0, "warm_ttft": 0.1})
    assert meets(A, {"ttft": 0.1, "cold_ttft": 2.0})  # which stands for ttft with cold ones
    assert not meets(B, {"ttft": 0.1, "cold_ttft": 2.0})
    assert meets(C, {"tpot": 0.001, "max_itl": 0.001})  # one token has neither
    assert not meets(B, {"max_itl": 1.7}) and meets(B, {"max_itl": 1.8, "e2e": 2.5})
    assert not meets(REFUSED, {}) and not meets(WAITING, {})
    assert measure(run(A, B), {"ttft": 1}, is_cold=lambda record: False).cold_ttft is None


def test_a_warm_up_does_not_count() -> None:
    assert measure(run(A, B, C), warmup=1.0).num_requests == 2
    with pytest.raises(ValueError, match=r"warmup=9.0 s leaves none of 3 requests"):
        measure(run(A, B, C), warmup=9.0)
    with pytest.raises(ValueError, match="must have requests"):
        measure(run())


def test_series_and_statistics_by_name() -> None:
    records = [A, B, C, REFUSED, WAITING]
    assert series(records, "queue") == [1.5, 0.0, 1.5]
    assert statistic(records, "ttft_mean") == 1.5
    assert statistic(records, "cold_ttft_max") == 2.0
    assert math.isnan(statistic([WAITING], "ttft_p50"))
    for name, why in (("ttft", "must end in one of _mean"), ("speed_p50", "metric must be one")):
        with pytest.raises(ValueError, match=why):
            statistic(records, name)
    assert "itl" in SERIES


def test_limits_are_read_from_words() -> None:
    assert parse_limits(["ttft=1", "cold_ttft=10"]) == {"ttft": 1.0, "cold_ttft": 10.0}
    for text in ("ttft", "ttft=fast", "ttft=-1", "speed=1"):
        with pytest.raises(ValueError, match="slo must be NAME=SECONDS"):
            parse_limits([text])


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Neighbours that share their luck, blocks of 10: 95 % intervals of a mean of 0.7."""
    held = 0
    for trial in range(200):
        rng = random.Random(trial)
        values = [float(rng.random() < 0.7) for _ in range(40)]
        spread = [value for value in values for _ in range(10)]
        interval = mean_interval(spread, seed=trial)
        held += interval.low <= 0.7 <= interval.high
    assert 0.88 <= held / 200 <= 0.99
    alone = mean_interval([1.0, 0.0] * 200)
    assert alone.high - alone.low < 0.1


def test_a_share_of_all_or_none_is_not_certain() -> None:
    """The rule of three: with no miss in n, up to 3 / n of them may be."""
    every, none = share_interval([True] * 300), share_interval([False] * 300)
    assert (every.value, every.high) == (1.0, 1.0)
    assert every.low == pytest.approx(1 - 3 / 300, abs=2e-4)
    assert every.low**300 == pytest.approx(0.05)
    assert (none.value, none.low, none.high) == (0.0, 0.0, pytest.approx(1 - every.low))
    some = [i % 3 > 0 for i in range(300)]
    assert share_interval(some, 4) == mean_interval([float(x) for x in some], 4)


def test_an_interval_of_independent_values_is_that_of_the_normal() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(5.0, 2.0, 2_000).tolist()
    interval = mean_interval(values, resamples=4_000)
    half = 1.96 * float(np.std(values)) / math.sqrt(2_000)
    assert interval.value == pytest.approx(float(np.mean(values)))
    assert (interval.high - interval.low) / 2 == pytest.approx(half, rel=0.15)
    assert mean_interval([1.0]).low == 1.0
    with pytest.raises(ValueError, match="at least one value"):
        mean_interval([])


# -- saturation


def steady(load: float, count: int = 600) -> SimulationResult:
    """A queue of unit jobs at a load, by Lindley's recursion."""
    rng, now, free, records = random.Random(7), 0.0, 0.0, []
    for i in range(count):
        now += rng.expovariate(load)
        free = max(free, now) + 1.0
        records.append(request(f"r{i}", now, [free]))
    return run(*records, busy=float(count), seconds=free)


def test_a_queue_is_unstable_from_load_one_on() -> None:
    for load in (0.3, 0.6, 0.8, 0.9):
        saturation = saturation_of(steady(load))
        assert not saturation.unstable, load
        assert saturation.load == pytest.approx(load, rel=0.1)
        assert saturation.reason == ""
    for load in (1.1, 1.3, 2.0):
        saturation = saturation_of(steady(load))
        assert saturation.unstable and saturation.growing, load
        assert "mixed nodes are asked for 1" in saturation.reason or load == 2.0
        assert "the queue grows, " in saturation.reason


def test_a_horizon_does_not_hide_a_queue_that_grows() -> None:
    whole = steady(1.3)
    last = whole.requests[-1].arrived
    early = [
        r if r.end is not None and r.end <= last else request(r.request_id, r.arrived, [])
        for r in whole.requests
    ]
    cut = run(*early, busy=0.99 * last, seconds=last)
    assert saturation_of(cut).load < 1
    assert saturation_of(cut).unstable


def test_nothing_can_be_said_of_one_arrival() -> None:
    assert not saturation_of(run(A)).unstable and saturation_of(run(A)).load == 0.0
    alone = measure(run(A), {"ttft": 100.0})
    assert alone.attainment is not None and alone.goodput is None
    assert json.loads(json.dumps(alone.to_dict(), allow_nan=False))["offered"] is None


# -- searches

ENGINE = EngineConfig(
    block_size=BLOCK,
    num_kv_blocks=4_096,
    max_num_batched_tokens=400_000,
    max_num_seqs=1,
    enable_prefix_caching=False,
)
STORE = (StoreLevel("store", 0, 50e9),)


def one_by_one(policy: str = "fcfs", budget: int = 400_000, ageing: float = 0.0) -> Cluster:
    engine = EngineConfig(
        block_size=BLOCK,
        num_kv_blocks=4_096,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
        scheduling_policy=policy,
        prefill_ageing=ageing,
        max_num_seqs=1 if budget == 400_000 else 256,
    )
    nodes = identical(2, PUBLISHED_STEPS["cold-warm"], engine, store=STORE)
    return Cluster(nodes, router="least_work", kv_bytes=70_272)


CHATS = partial(cold_warm, seconds=200.0)
MEDIAN = (Limit("ttft_p50", most=1.0),)
SLO = {"cold_ttft": 10.0, "warm_ttft": 1.0}
CAPACITY = 2 / 0.755  # of two nodes: 10 % of 4.26 s and 90 % of 0.335 s a request


def test_s08_a_median_that_holds_past_saturation_is_flagged() -> None:
    """Shortest first: the median is fine at a rate that the nodes can never serve."""
    study = Study(one_by_one("sjf"), CHATS)
    found = find_capacity(study, MEDIAN, low=0.5, high=6.0, seeds=(1,), tolerance=0.5)
    assert found.rate > 1.5 * CAPACITY
    assert found.unstable
    fair = find_capacity(Study(one_by_one(), CHATS), MEDIAN, low=0.5, seeds=(1,), tolerance=0.2)
    assert fair.rate < CAPACITY and not fair.unstable


def test_searches_side_by_side_find_what_one_finds() -> None:
    limits = (Limit("attainment", least=0.9),)
    studies = {
        name: Study(one_by_one(name), partial(cold_warm, seconds=60.0), slo=SLO) for name in NAMES
    }
    options = {"seeds": (1, 2), "tolerance": 0.3, "low": 0.2, "high": 4.0}
    alone = find_capacities(studies, limits, processes=1, **options)
    assert find_capacities(studies, limits, processes=2, **options) == alone
    assert list(alone) == list(NAMES)


NAMES = ("fcfs", "sjf")


JOBS = Lengths(Lognormal.constant(10), Lognormal.constant(1))
QUEUE = Cluster(identical(1, FixedSteps(1.0), ENGINE))
MD1 = Study(QUEUE, partial(open_loop, JOBS, 300))


def test_a_search_finds_the_load_of_a_queue_whose_wait_is_known() -> None:
    """M/D/1: mean TTFT 1 + r / (2 (1 - r)) is 2 at r = 2/3."""
    found = find_capacity(
        Study(QUEUE, partial(open_loop, JOBS, 1_500)),
        (Limit("ttft_mean", most=2.0),),
        low=0.5,
        high=0.8,
        seeds=(1, 2),
        tolerance=0.02,
    )
    assert found.rate == pytest.approx(2 / 3, rel=0.05)
    assert found.failed / found.rate <= 1.02 and not found.unstable
    assert (
        found.at(found.rate).measures["ttft_mean"]
        <= 2.0
        < found.at(found.failed).measures["ttft_mean"]
    )


def test_the_ends_of_a_search() -> None:
    none = find_capacity(MD1, (Limit("ttft_mean", most=0.5),), low=0.1, high=0.9, seeds=(1,))
    assert (none.rate, none.failed, len(none.probes)) == (0.0, 0.1, 1)
    every = find_capacity(MD1, (Limit("ttft_mean", most=50.0),), low=0.1, high=0.9, seeds=(1,))
    assert (every.rate, every.failed) == (0.9, math.inf)
    with pytest.raises(ValueError, match="rate must be one that was tried"):
        none.at(0.3)


def test_a_hopeless_run_is_given_up_and_changes_no_result() -> None:
    limits = (Limit("attainment", least=0.9),)
    study = Study(QUEUE, MD1.workload, slo={"ttft": 2.0})
    probe = find_capacity(study, limits, low=0.3, high=1.5, seeds=(1,), tolerance=0.05)
    given_up = [p for p in probe.probes if p.stopped]
    assert given_up and not any(p.holds for p in given_up)
    seen = [p.rate for p in probe.probes if p.holds]
    for rate in seen[:1] + [p.rate for p in given_up][:1]:
        records = simulate(study.requests(rate, 1), QUEUE).requests
        share = sum(meets(record, study.slo) for record in records) / len(records)
        assert (share >= 0.9) == (rate in seen)


def test_every_seed_may_have_to_hold_by_itself() -> None:
    limits = (Limit("ttft_max", most=6.0),)
    options = {"low": 0.05, "high": 0.95, "seeds": (1, 2, 3), "tolerance": 0.2}
    mean = find_capacity(MD1, limits, **options)
    each = find_capacity(MD1, limits, every_seed=True, **options)
    assert 0 < each.rate < mean.rate


def test_named_traffic_grows_with_the_nodes_where_rates_are_of_one() -> None:
    cluster = Cluster(identical(3, PUBLISHED_STEPS["distserve-opt-13b-a100-tp1"], ENGINE))
    study = Study(cluster, "azure-short", count=20, per_node=True)
    assert len(study.requests(1.0, 0)) == 60
    assert Study(cluster, "azure-short", count=20).requests(3.0, 0) == study.requests(1.0, 0)[:20]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"low": 2.0, "high": 1.0}, "low and high must be"),
        ({"seeds": ()}, "a search needs limits, seeds and a tolerance"),
        ({"limits": ()}, "a search needs limits, seeds and a tolerance"),
        ({"tolerance": 0.0}, "a search needs limits, seeds and a tolerance"),
        ({"limits": (Limit("speed_p50"),)}, "a metric must be one of"),
    ],
)
def test_searches_that_make_no_sense_are_refused(options: dict, why: str) -> None:
    given = {"limits": MEDIAN, **options}
    with pytest.raises(ValueError, match=why):
        find_capacity(MD1, given.pop("limits"), **given)
