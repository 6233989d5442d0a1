"""Arrivals and contents: made from the seed alone, and distributed as they say."""

from __future__ import annotations

import math
import random
import statistics
from itertools import pairwise
from typing import Any

import pytest

from minifer.perf.load.arrivals import arrival_times
from minifer.perf.load.workload import WORDS, Distribution, Workload, with_arrivals

IDS = range(1000)


def gaps(**options: Any) -> list[float]:
    times = arrival_times(20_001, **options)
    return [later - earlier for earlier, later in pairwise(times)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_coefficient_of_variation_of_a_gamma(burstiness: float) -> None:
    found = gaps(rate=5.0, burstiness=burstiness)
    mean = statistics.fmean(found)
    assert mean == pytest.approx(0.2, rel=0.05)
    assert statistics.pstdev(found) / mean == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_poisson_gaps_are_exponential() -> None:
    """Kolmogorov–Smirnov distance below its 0.1 % point, 1.95/√n."""
    found = sorted(gaps(rate=5.0))
    n = len(found)
    distance = max(abs((i + 0.5) / n - (1 - math.exp(-5 * gap))) for i, gap in enumerate(found))
    assert distance < 1.95 / math.sqrt(n)


def test_the_ends_of_rate_and_burstiness() -> None:
    assert arrival_times(3, math.inf) == [0, 0, 0]
    assert arrival_times(4, 2.0, math.inf) == [0, 0.5, 1.0, 1.5]
    assert arrival_times(1, 1.0) == [0.0] and arrival_times(0, 1.0) == []
    for rate in (0, -1, math.nan):
        with pytest.raises(ValueError, match="request_rate must be above 0"):
            arrival_times(3, rate)
    with pytest.raises(ValueError, match="burstiness must be above 0, got 0"):
        arrival_times(3, 1.0, 0)


def test_the_seed_decides_and_python_s_own_generator_is_left_alone() -> None:
    random.seed(5)
    state = random.getstate()
    workload = Workload(20, Distribution.parse("uniform:2:9"), Distribution.parse("3"), 2, 4)
    assert workload.sessions(IDS, 7) == workload.sessions(IDS, 7) != workload.sessions(IDS, 8)
    assert arrival_times(9, 1.0, seed=7) == arrival_times(9, 1.0, seed=7)
    assert arrival_times(9, 1.0, seed=7) != arrival_times(9, 1.0, seed=8)
    assert random.getstate() == state


def test_another_rate_sends_the_same_prompts() -> None:
    made = Workload(9, Distribution.parse("5"), Distribution.parse("3")).sessions(IDS, 0)
    slow, fast = with_arrivals(made, 1.0, 1.0, 0), with_arrivals(made, 10.0, 1.0, 0)
    assert [s.turns for s in slow] == [s.turns for s in fast]
    assert [s.arrival for s in slow] == pytest.approx([s.arrival * 10 for s in fast])


def test_lengths_are_exact_in_token_ids() -> None:
    made = Workload(200, Distribution.parse("uniform:5:9"), Distribution.parse("3")).sessions(
        IDS, 0
    )
    lengths = [len(session.turns[0].pieces) for session in made]
    assert set(lengths) == {5, 6, 7, 8, 9}
    assert {session.turns[0].output_len for session in made} == {3}
    assert all(piece in IDS for session in made for piece in session.turns[0].pieces)


def test_a_lognormal_has_its_median_and_its_limit() -> None:
    rng = random.Random(0)
    lengths = Distribution.parse("lognormal:6.63:0.99:4000")
    drawn = [lengths.draw_length(rng) for _ in range(20_000)]
    assert statistics.median(drawn) == pytest.approx(math.exp(6.63), rel=0.05)
    assert max(drawn) == 4000 and min(drawn) >= 1


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "nan", "inf", "uniform:3", "uniform:9:3", "lognormal:1:2", "zipf:1:2"]
)
def test_a_length_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="uniform:MIN:MAX"):
        Distribution.parse(text)


def test_groups_share_their_prefix_and_nothing_else() -> None:
    made = Workload(60, Distribution.parse("8"), Distribution.parse("3"), 3, 32).sessions(IDS, 0)
    prompts = [session.turns[0].pieces for session in made]
    assert {len(prompt) for prompt in prompts} == {40}
    assert len({prompt[:32] for prompt in prompts}) == 3
    assert len({prompt[:33] for prompt in prompts}) > 3
    assert len({prompt[32:] for prompt in prompts}) == 60


def test_a_conversation_has_turns_with_time_to_think_between_them() -> None:
    think = Distribution.parse("uniform:1:2")
    made = Workload(5, Distribution.parse("4"), Distribution.parse("3"), 1, 6, 3, think)
    for session in made.sessions(WORDS, 0):
        assert [len(turn.pieces) for turn in session.turns] == [10, 4, 4]
        first, *later = [turn.think_time for turn in session.turns]
        assert first == 0 and all(1 <= seconds <= 2 for seconds in later)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_prompts": 0}, "num_prompts must be at least 1, got 0"),
        ({"turns": 0}, "turns must be at least 1, got 0"),
        ({"num_groups": 2}, "prefix_groups and prefix_len belong together, got 2 and 0"),
        ({"prefix_len": 2}, "belong together, got 0 and 2"),
    ],
)
def test_numbers_without_sense_are_refused(changes: dict[str, int], message: str) -> None:
    fields: dict[str, Any] = {
        "num_prompts": 1,
        "input_len": Distribution.parse("1"),
        "output_len": Distribution.parse("1"),
    }
    with pytest.raises(ValueError, match=message):
        Workload(**{**fields, **changes})
