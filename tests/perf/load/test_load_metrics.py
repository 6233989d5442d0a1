"""Every number of the summary, computed by hand or by numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minifer.perf.load import metrics
from minifer.perf.load.client import Record
from minifer.perf.load.generator import LoadRun

FINITE = st.floats(-1e6, 1e6)


@given(st.lists(FINITE, min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], q: float) -> None:
    assert metrics.percentile(values, q) == pytest.approx(np.percentile(values, q), abs=1e-6)


@pytest.mark.parametrize("q", [0, 1, 25, 50, 75, 90, 99, 99.9, 100])
def test_a_percentile_by_hand(q: float) -> None:
    """0, 1, …, 100: the q-th percentile is q."""
    assert metrics.percentile(list(range(100, -1, -1)), q) == pytest.approx(q)


@pytest.mark.parametrize(("values", "q"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_a_percentile_of_nothing_is_refused(values: list[float], q: float) -> None:
    with pytest.raises(ValueError, match="a percentile needs values"):
        metrics.percentile(values, q)


def record(intended: float, times: list[float], *, late: float = 0.0, **fields: object) -> Record:
    made = Record(0, 0, intended, intended + late, [intended + t for t in times])
    made.end = made.chunk_times[-1] if times else intended
    made.finish_reason = "length"
    for name, value in fields.items():
        setattr(made, name, value)
    return made


RUN = LoadRun(
    start=10.0,
    end=20.0,
    records=[
        record(10.0, [1, 2, 3], prompt_tokens=8, output_tokens=3, cached_tokens=4),
        record(11.0, [2, 3, 6], late=0.5, prompt_tokens=8, output_tokens=5, cached_tokens=0),
        record(12.0, [3], prompt_tokens=8, output_tokens=1),
        record(13.0, [], error="HTTP 429", end=14.0),
    ],
)


def test_the_summary_of_four_requests() -> None:
    out = metrics.summarize(RUN, {"ttft": 2.0, "tpot": 1.0})
    assert (out["requests"], out["completed"], out["failed"]) == (4, 3, 1)
    assert (out["prompt_tokens"], out["output_tokens"]) == (24, 9)
    assert out["seconds"] == 10.0
    assert (out["request_throughput"], out["output_throughput"]) == (0.3, 0.9)
    assert out["total_throughput"] == 3.3
    assert out["tokens_per_chunk"] == 9 / 7
    assert out["cached_share"] == 4 / 24
    # ttft 1, 2, 3; tpot (3−1)/2 = 1 and (6−2)/4 = 1; itl 1, 1, 1, 3; e2e 3, 6, 3; late 0, .5, 0, 0
    assert (out["ttft_mean"], out["ttft_p50"], out["ttft_p90"]) == pytest.approx((2, 2, 2.8))
    assert (out["ttft_p99"], out["ttft_max"]) == pytest.approx((2.98, 3))
    assert (out["tpot_mean"], out["tpot_max"]) == (1, 1)
    assert (out["itl_mean"], out["itl_p50"], out["itl_p90"]) == pytest.approx((1.5, 1, 2.4))
    assert (out["e2e_mean"], out["e2e_p50"], out["e2e_max"]) == (4, 3, 6)
    assert (out["late_p50"], out["late_max"]) == (0, 0.5)
    # the third answer meets no ttft of 2, the fourth failed
    assert (out["goodput"], out["slo_attainment"]) == (0.2, 0.5)


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        ({"ttft": 3.0}, 3),
        ({"ttft": 0.5}, 0),
        ({"max_itl": 1.0}, 2),  # one token has no gap
        ({"tpot": 0.5}, 1),  # and no TPOT
        ({"e2e": 3.0}, 2),
        ({"e2e": 3.0, "ttft": 1.0}, 1),
    ],
)
def test_goodput_counts_requests_within_every_limit(slo: dict[str, float], good: int) -> None:
    assert metrics.summarize(RUN, slo)["goodput"] == good / 10


def test_in_flight_counts_from_sent_to_end() -> None:
    steps = metrics.in_flight(RUN.records)
    assert steps == [(10, 1), (11.5, 2), (12, 3), (13, 3), (14, 2), (15, 1), (17, 0)]
    assert metrics.summarize(RUN)["max_in_flight"] == 3


def test_failures_are_counted_by_kind_and_nothing_completed_is_an_error() -> None:
    failed = [record(0, [], error=kind, detail="busy") for kind in ("timeout", "HTTP 429") * 2]
    run = LoadRun(0.0, [*failed, record(0, [], error="HTTP 429")], 1.0)
    assert metrics.failures([run]) == {"HTTP 429": 3, "timeout": 2}
    with pytest.raises(RuntimeError, match=r"none of 5 requests was completed: HTTP 429 \(3\), t"):
        metrics.summarize(run)


def test_slos_are_read_and_refused() -> None:
    assert metrics.parse_slo(["ttft=0.5", "max_itl=2"]) == {"ttft": 0.5, "max_itl": 2.0}
    for bad in ("ttft", "ttft=x", "ttft=0", "ttft=-1", "ttft=nan", "speed=3"):
        with pytest.raises(ValueError, match=r"slo must be NAME=SECONDS"):
            metrics.parse_slo([bad])
