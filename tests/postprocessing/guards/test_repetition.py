"""The repetition guard and the request's own limits, against a detector that rescans the tail."""

from __future__ import annotations

import copy
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minifer.postprocessing.guards import requested_guards
from minifer.postprocessing.guards.alarm import Alarm
from minifer.postprocessing.guards.repetition import (
    PeriodRuns,
    RepetitionGuard,
    repeats_legitimately,
)
from minifer.postprocessing.hooks import HookVerdict
from minifer.sampling_params import RepetitionDetection, SamplingParams

MANY = settings(max_examples=100, deadline=None)
tokens = st.lists(st.integers(0, 2), max_size=60)


def pieces_of(text: str) -> list[str]:
    """Words with the space before them, and single other characters: a tokenizer of a kind."""
    return re.findall(r" ?[^\W\d_]+|.", text, re.DOTALL)


def tripped_after(pieces: list[str], action: str = "stop", **limits: int) -> int | None:
    """Tokens until the guard ends the reply, or tells its report."""
    reasons: list[str] = []
    alarm = Alarm("repetition", "repetition", action, lambda guard, reason: reasons.append(reason))
    guard, ids = RepetitionGuard(alarm, **limits), {}
    for count, piece in enumerate(pieces, start=1):
        verdict = guard.on_token(ids.setdefault(piece, len(ids)), piece)
        assert verdict.text == piece  # never holds text back
        assert (verdict.finish_reason is not None) == (bool(reasons) and action == "stop")
        if reasons:
            return count
    assert guard.on_finish("end") == "end"
    return None


def test_f10_a_word_again_and_again_is_flagged() -> None:
    assert tripped_after(["hi", " "] * 64) == 64
    assert tripped_after([" hi"] * 64) == 64
    assert tripped_after(pieces_of("Of course." + " hi hi hi" * 64)) == 3 + 64


@pytest.mark.parametrize(
    "text",
    [
        "| --- " * 8 + "|\n",
        "| --- | --- | --- |\n" + "|  |  |  |\n" * 30,
        "=" * 200,
        "-" * 80 + "\n" + "#" * 100,
        "[" + "0, " * 200 + "0]",
        "[" + "0.0, " * 100 + "0.0]",
        "0x00, " * 100,
        "| 121    " * 40 + "|",
        "        " * 40,
        "\n" * 100,
        "data:image/png;base64," + "A" * 400,
        "AAAA/" * 60,
    ],
)
def test_f10_layout_and_data_may_repeat(text: str) -> None:
    assert tripped_after(pieces_of(text)) is None


@pytest.mark.parametrize("piece", ["| --- ", "=", "0, ", "    ", "AAAA"])
def test_f10_but_nothing_may_repeat_for_ever(piece: str) -> None:
    assert tripped_after([piece] * 2000) == 1024


@pytest.mark.parametrize(
    "passage",
    ["!", "?", " the", " I'm sorry.", " ha", "\n- item", "<br>", " 1a b c d", "的", "é", "🙂"],
)
def test_what_is_neither_layout_nor_data_is_a_loop(passage: str) -> None:
    assert not repeats_legitimately(passage)
    assert tripped_after([passage] * 2000) == 64


def test_a_passage_must_be_there_four_times_and_fill_64_tokens() -> None:
    sentence = pieces_of(" All work and no play makes Jack a dull boy.")
    assert len(sentence) == 11
    assert tripped_after(sentence * 5 + sentence[:8]) is None
    assert tripped_after(sentence * 6) == 64
    long = pieces_of(" " + " ".join(f"w{chr(97 + i)}" for i in range(26)) * 2)
    assert tripped_after(long * 4) == 4 * len(long)
    assert tripped_after(long * 3 + long[:-1]) is None


def test_a_loop_that_starts_late_is_found_and_text_before_it_does_not_count() -> None:
    before = pieces_of("".join(f" word{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(300)))
    assert tripped_after([*before, *[" no"] * 100]) == len(before) + 64


def test_a_period_beyond_the_limit_is_not_looked_for() -> None:
    passage = [f" {chr(0x4E00 + i)}" for i in range(129)]
    assert tripped_after(passage * 8) is None
    assert tripped_after(passage[:128] * 8) == 4 * 128


def test_without_text_only_tokens_count() -> None:
    assert tripped_after([""] * 64) == 64


def test_text_that_lags_behind_its_tokens_is_still_judged_by_itself() -> None:
    guard = RepetitionGuard(Alarm("repetition", "repetition", "stop", lambda *_: None))
    text = "| --- " * 200
    for i in range(200):  # three tokens a cell; the text comes two tokens late
        for token in range(3):
            place = 6 * i + 2 * token - 4
            assert (
                guard.on_token(token, text[max(0, place) : max(0, place + 2)]).finish_reason is None
            )


def test_an_alarm_rings_once_and_report_ends_nothing() -> None:
    reasons: list[str] = []
    alarm = Alarm("repetition", "repetition", "report", lambda _, reason: reasons.append(reason))
    guard = RepetitionGuard(alarm)
    verdicts = [guard.on_token(7, " hi") for _ in range(500)]
    assert verdicts == [HookVerdict(" hi")] * 500
    assert reasons == ["' hi' (1 tokens) 64 times in a row"]


def brute_force_runs(ids: list[int], max_period: int) -> dict[int, int]:
    runs = {}
    for period in range(1, max_period + 1):
        run = 0
        while run + period < len(ids) and ids[-1 - run] == ids[-1 - run - period]:
            run += 1
        if run:
            runs[period] = run
    return runs


@MANY
@given(tokens, st.integers(1, 12))
def test_runs_of_all_periods_equal_those_of_a_rescan(ids: list[int], max_period: int) -> None:
    runs = PeriodRuns(max_period)
    for end, token in enumerate(ids, start=1):
        assert runs.push(token) == brute_force_runs(ids[:end], max_period)


@MANY
@given(tokens, tokens, tokens)
def test_a_deep_copy_goes_its_own_way(common: list[int], left: list[int], right: list[int]) -> None:
    first = PeriodRuns(8)
    for token in common:
        first.push(token)
    second = copy.deepcopy(first)
    for runs, ids in ((first, left), (second, right)):
        for end, token in enumerate(ids, start=1):
            assert runs.push(token) == brute_force_runs(common + ids[:end], 8)


# -- SamplingParams.repetition_detection


def vllm_check(ids: list[int], largest: int, smallest: int, count: int) -> bool:
    """vLLM's rule: does the output end with `count` equal patterns of an allowed size?"""
    return any(
        len(ids) >= n * count and ids[-n * count :] == ids[-n:] * count
        for n in range(max(1, smallest), largest + 1)
    )


def requested(params: SamplingParams, ids: list[int]) -> int | None:
    (guard,) = requested_guards(params, lambda *_: None)
    for end, token in enumerate(ids, start=1):
        verdict = guard.on_token(token, "x")
        if verdict.finish_reason is not None:
            assert verdict == HookVerdict("x", "repetition", "repetition_detected")
            return end
    return None


@MANY
@given(tokens, st.integers(1, 6), st.integers(0, 6), st.integers(2, 4), st.integers(0, 20))
def test_a_request_is_ended_where_vllm_ends_it(
    ids: list[int], largest: int, smallest: int, count: int, min_tokens: int
) -> None:
    smallest = min(smallest, largest)
    detection = RepetitionDetection(largest, count, smallest)
    params = SamplingParams(repetition_detection=detection, max_tokens=99, min_tokens=min_tokens)
    ends = (
        end
        for end in range(min_tokens + 1, len(ids) + 1)
        if vllm_check(ids[:end], largest, smallest, count)
    )
    assert requested(params, ids) == next(ends, None)


def test_the_callers_limits_know_no_exceptions() -> None:
    detection = {"max_pattern_size": 2, "min_count": 3}
    assert requested(SamplingParams(repetition_detection=detection), [1, 2, 1, 2, 1, 2]) == 6


def test_nothing_is_watched_that_was_not_asked_for() -> None:
    assert requested_guards(SamplingParams(), lambda *_: None) == []


def test_memory_does_not_grow_with_the_reply():
    """A long reply of many different words: only the last ones are kept."""
    runs = PeriodRuns(16)
    for token in range(5000):
        runs.push(token)
    assert len(runs._places) == len(runs._last) == 17
