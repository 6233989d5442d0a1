"""Simulated claims: one run where a run shows it, the whole search in the slow tier.

The golden figures have ranges: a search over few seeds is as good as those seeds.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from claim_helpers import check_complete, found

from minifer.claims import chunked_prefill, disaggregation, heterogeneous, routing, routing_trace
from minifer.claims.one_gpu import APART, TOGETHER, Requests, colocated, engine, split
from minifer.perf.devices import DEVICES
from minifer.simulation.measures.metrics import RunMetrics, measure
from minifer.simulation.measures.search import Study
from minifer.simulation.simulator import simulate
from minifer.simulation.workloads.arrivals import Arrival
from minifer.simulation.workloads.generator import cold_warm

# -- routing


@functools.cache
def chats(name: str, rate: float, seconds: float = 600.0) -> RunMetrics:
    requests = cold_warm(rate, seconds, seed=1, ramp=routing.RAMP)
    run = simulate(requests, routing.DEPLOYMENTS[name])
    return measure(run, routing.LIMITS, warmup=routing.RAMP)


def attained(name: str, rate: float) -> float:
    interval = chats(name, rate).attainment
    assert interval is not None
    return interval.value


def test_s06_a_partition_helps_warm_prompts_and_hurts_cold_ones() -> None:
    base, hard = chats(routing.BASE, 1.2), chats(routing.HARD, 1.2)
    assert attained(routing.HARD, 1.2) > attained(routing.BASE, 1.2)
    assert base.warm_ttft and hard.warm_ttft and hard.warm_ttft.p90 < base.warm_ttft.p90
    assert base.cold_ttft and hard.cold_ttft and hard.cold_ttft.p90 > 1.5 * base.cold_ttft.p90


def test_s07_a_wrong_threshold_is_worse_than_no_partition() -> None:
    assert attained(routing.WRONG, 0.9) < attained(routing.BASE, 0.9) - 0.1


def test_soft_is_at_least_as_good_as_hard() -> None:
    assert attained(routing.SOFT, 1.4) >= attained(routing.HARD, 1.4)


def test_s13_ageing_bounds_how_long_cold_prompts_wait() -> None:
    """Past saturation the shortest first never come to the long ones."""
    plain, aged = chats(routing.SRPT, 3.5, 200.0), chats(routing.AGED, 3.5, 200.0)
    assert plain.saturation.unstable and aged.saturation.unstable
    assert plain.ttft and aged.ttft and plain.ttft.p50 < 1.0  # the median sees nothing
    assert plain.cold_ttft and plain.cold_ttft.p90 > 30
    assert aged.ttft.p50 > plain.ttft.p50


def trace(file: Path, rows: list[tuple[int, int, list[int]]]) -> Path:
    """(milliseconds, prompt length, blocks) → a trace in Mooncake's format."""
    names = ("timestamp", "input_length", "hash_ids")
    lines = [json.dumps(dict(zip(names, row, strict=True)) | {"output_length": 9}) for row in rows]
    file.write_text("\n".join(lines))
    return file


def test_a_recorded_prompt_finds_what_came_before(tmp_path: Path) -> None:
    rows = [(0, 1024, [1, 2]), (1000, 1600, [1, 2, 3, 4]), (3000, 700, [7, 8])]
    requests = routing_trace.recorded(trace(tmp_path / "t.jsonl", rows), seed=0)
    assert [request.stored_len for request in requests] == [0, 1024, 0]
    assert [request.output_len for request in requests] == [1, 1, 1]
    assert requests[-1].time == pytest.approx(2.0)  # one a second


def test_a_prompt_alone_takes_its_own_time() -> None:
    """The yardstick of "in time" is what the simulator says of an idle node."""
    cluster = routing.DEPLOYMENTS[routing.BASE]
    request = Arrival("a", 0.0, 30_000, 1, stored_len=20_000)
    (record,) = simulate([request], cluster).requests
    node = cluster.nodes[0]
    expected = routing_trace.alone(record, node.step_times, node.store[0], cluster.kv_bytes)
    assert record.ttft == pytest.approx(expected)
    assert expected > 0.03 + 10_000 / 40_000 + 20_000 * 70_272 / 50e9


def test_what_a_trace_carries_lies_between_its_bounds(tmp_path: Path) -> None:
    rows = [(1000 * i, 40_000, [100 * i + k for k in range(78)]) for i in range(30)]
    requests = routing_trace.recorded(trace(tmp_path / "t.jsonl", rows), seed=0)
    base = routing.DEPLOYMENTS[routing.BASE]
    rate = routing_trace.carried(base, requests)
    assert routing_trace.in_time(base, requests, rate) >= routing_trace.SHARE
    assert routing_trace.in_time(base, requests, rate * 1.2) < routing_trace.SHARE
    single = 0.03 + 1 + 2e-10 * 40_000**2
    assert 0.5 < rate * single / 2 < 2.5  # near what two nodes can do


@pytest.mark.slow
def test_s06_s07_the_whole_claim() -> None:
    findings = found("routing")
    check_complete("routing", findings)
    values = findings.values
    assert values["baseline"] == pytest.approx(1.03, rel=0.1)
    assert 0.20 <= values["hard_gain"] <= 0.45
    assert values["hard_gain_both"] < -0.1
    assert values["wrong_threshold_gain"] < -0.3
    assert values["soft_gain"] > values["hard_gain"]
    assert values["srpt_ageing_gain"] > values["hard_gain"]
    assert values["srpt_ageing_gain_both"] > max(0.0, values["hard_gain_both"])
    assert values["median_past_saturation"] >= 1  # S-08


# -- chunked prefill


def gap_p99(name: str, rate: float, lengths: object = TOGETHER) -> float:
    cluster = chunked_prefill.DEPLOYMENTS[name]
    run = Study(cluster, Requests(200, lengths)).run(rate, 1)  # type: ignore[arg-type]
    itl = measure(run).itl
    assert itl is not None
    return itl.p99


def test_s09_a_tight_limit_needs_chunks_and_a_loose_one_does_not() -> None:
    tight, loose = chunked_prefill.GOLDEN, chunked_prefill.LOOSE
    assert gap_p99(chunked_prefill.FIRST, 1.5) > tight > gap_p99("chunks of 256", 1.5)
    assert gap_p99(chunked_prefill.FIRST, 2.2) < loose


def test_a_smaller_budget_makes_shorter_gaps_and_later_first_tokens() -> None:
    runs = {
        budget: measure(Study(colocated(engine(budget)), Requests(200)).run(1.5, 1))
        for budget in (128, 512)
    }
    small, large = runs[128], runs[512]
    assert small.itl and large.itl and small.itl.p99 < large.itl.p99
    assert small.ttft and large.ttft and small.ttft.p50 > large.ttft.p50


def test_lengths_drawn_apart_hold_less_memory_for_less_time() -> None:
    """Mean of (prompt + output) · output: 2.9e5 in the trace, 2.1e5 drawn apart."""
    held = {}
    for name, lengths in (("together", TOGETHER), ("apart", APART)):
        rows = Requests(4000, lengths)(1.0, 1)
        held[name] = sum((r.prompt_len + r.output_len) * r.output_len for r in rows) / len(rows)
    assert held["together"] == pytest.approx(2.9e5, rel=0.1)
    assert held["apart"] == pytest.approx(2.1e5, rel=0.1)


def test_recorded_lengths_are_drawn_from() -> None:
    rows = Requests(50, pairs=((3, 4), (5, 6)))(2.0, 7)
    assert {(row.prompt_len, row.output_len) for row in rows} == {(3, 4), (5, 6)}
    assert rows == Requests(50, pairs=((3, 4), (5, 6)))(2.0, 7)


@pytest.mark.slow
def test_s09_the_whole_claim() -> None:
    findings = found("chunked-prefill")
    check_complete("chunked-prefill", findings)
    values = findings.values
    assert values["ratio_100_ms"] >= 2.5
    assert 1.0 <= values["ratio_500_ms"] <= 1.15
    assert values["ratio_100_ms_apart"] > values["ratio_100_ms"]
    assert values["strict_chunked"] > 10 * values["strict_first"]
    assert values["ttft_p50_chunked"] > values["ttft_p50_first"]


# -- disaggregation


def test_s10_a_colocated_gpu_carries_what_a_split_one_cannot() -> None:
    rate = 2.1  # a GPU
    share = {}
    deployments = {**disaggregation.COLOCATED, **disaggregation.SPLITS}
    for name in ("colocated, prompts first", "2P1D"):
        one = deployments[name]
        study = Study(one.cluster, Requests(120 * one.num_gpus), per_node=True)
        run = study.run(rate * one.num_gpus / len(one.cluster.nodes), 1)
        attainment = measure(run, disaggregation.LIMITS).attainment
        assert attainment is not None
        share[name] = attainment.value
    assert share["colocated, prompts first"] > 0.9
    assert share["2P1D"] < 0.9


def test_s11_a_slow_link_delays_the_second_token() -> None:
    gaps = []
    for link in (0.5e9, 3e9, 300e9):
        run = Study(split(1, 1, link=link), Requests(60)).run(0.5, 1)
        gaps.append(measure(run).max_itl)
    slow, middle, fast = (gap.p50 for gap in gaps if gap is not None)
    assert slow > middle > fast
    assert slow - fast > 700 * 819_200 / 0.5e9 * 0.5  # the KV of a prompt, on its way


@pytest.mark.slow
def test_s10_s11_the_whole_claim() -> None:
    findings = found("disaggregation")
    check_complete("disaggregation", findings)
    values = findings.values
    assert 0.6 < values["ratio_1p1d"] < 0.86
    assert 0.75 < values["ratio_best"] < 1.0
    assert values["ratio_2p3d_few_requests"] > values["ratio_2p3d"]
    assert values["ratio_against_2024_tight"] > 1.3 > values["ratio_against_2024"]
    sweep = [values[f"link_{link / 1e9:g}_gb_s"] for link in disaggregation.LINKS]
    assert sweep[0] < sweep[1] < sweep[2]
    assert sweep[2] >= 0.9 * sweep[-1]


# -- heterogeneous pools


def test_a_low_ridge_point_decodes_well_at_small_batches_only() -> None:
    h100, lpu = DEVICES["H100-SXM"], DEVICES["Groq-LPU-v1"]
    assert lpu.ridge_point < 3 < 200 < h100.ridge_point
    small, large = (
        {d.name: heterogeneous.per_joule(d, batch)[1] for d in (h100, lpu)} for batch in (1, 256)
    )
    assert small[lpu.name] > 5 * small[h100.name]
    assert large[lpu.name] < 2 * large[h100.name]
    assert heterogeneous.per_joule(h100, 1)[0] > heterogeneous.per_joule(lpu, 1)[0]


def test_gpus_cannot_keep_the_tightest_limit_and_lpus_can() -> None:
    share = {}
    for name in ("H100 does both", heterogeneous.WITH_LPUS):
        pool = heterogeneous.POOLS[name]
        run = Study(pool.cluster, Requests(30)).run(20.0, 1)
        attainment = measure(run, {"ttft": 0.4, "tpot": 0.001}).attainment
        assert attainment is not None
        share[name] = attainment.value
    assert share == {"H100 does both": 0.0, heterogeneous.WITH_LPUS: 1.0}


def test_the_crossover_is_where_lpus_begin_to_win_for_good() -> None:
    gpu = next(iter(heterogeneous.GPUS))
    others = dict.fromkeys(heterogeneous.GPUS, 0.0)

    def rates(*pairs: tuple[float, float]) -> dict[float, dict[str, float]]:
        return {
            tpot: {**others, gpu: g, heterogeneous.WITH_LPUS: lpus}
            for tpot, (g, lpus) in zip((0.05, 0.01, 0.001), pairs, strict=True)
        }

    assert heterogeneous.crossover(rates((9, 5), (4, 5), (0, 5))) == 0.01
    assert heterogeneous.crossover(rates((4, 5), (4, 5), (0, 5))) == 0.05
    assert heterogeneous.crossover(rates((4, 5), (9, 5), (0, 5))) == 0.001
    assert heterogeneous.crossover(rates((9, 5), (9, 5), (9, 5))) is None


@pytest.mark.slow
def test_the_whole_claim_about_two_kinds_of_chips() -> None:
    findings = found("heterogeneous")
    check_complete("heterogeneous", findings)
    values = findings.values
    assert values["lpus_tight"] > values["gpus_tight"]
    assert values["lpus_loose_with_overhead"] < values["gpus_loose"]
    assert values["crossover_ms"] > 0
