"""Speeds from stamps, on numbers a reader can redo."""

from __future__ import annotations

import pytest

from minifer.perf.speed.stamps import decode_window, first_tokens, same_beginning, whole_run

# The picture of stamps.py: the second request begins when the first has three tokens.
TWO = [[1.0, 2.0, 3.0, 4.0, 5.0], [3.0, 4.0, 5.0, 6.0]]


def test_one_request_is_timed_from_its_first_token_to_its_last() -> None:
    window = decode_window([[2.0, 2.5, 3.0, 4.0]])
    assert (window.start, window.end, window.tokens) == (2.0, 4.0, 3)
    assert window.tokens_per_second == 1.5
    assert window.steps == ((1,), (2,), (3,))


def test_several_are_timed_where_all_of_them_decode() -> None:
    window = decode_window(TWO)
    assert (window.start, window.end, window.tokens) == (3.0, 5.0, 4)
    assert window.tokens_per_second == 2.0
    assert window.steps == ((3, 1), (4, 2))  # tokens each had before the step


def test_tokens_that_arrive_together_are_one_step() -> None:
    window = decode_window([[1.0, 2.0, 2.0, 2.0, 3.0]])
    assert window.tokens == 4 and window.steps == ((1,), (4,))


@pytest.mark.parametrize("stamps", [[[1.0, 2.0], [2.0, 3.0]], [[1.0]], [[1.0, 1.0]]])
def test_a_moment_where_all_decode_must_exist(stamps: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="ask for more tokens"):
        decode_window(stamps)


@pytest.mark.parametrize("stamps", [[], [[]], [[1.0], []]])
def test_a_request_without_tokens_has_no_speed(stamps: list[list[float]]) -> None:
    for call in (decode_window, lambda s: first_tokens(0.0, s)):
        with pytest.raises(ValueError, match="of at least one request, and of each"):
            call(stamps)


def test_first_and_last_tokens_count_from_the_start() -> None:
    assert first_tokens(0.5, TWO) == (0.5, 2.5)
    assert whole_run(0.5, TWO) == 5.5
    with pytest.raises(ValueError, match="at least one token"):
        whole_run(0.0, [[]])


def test_replies_are_compared_up_to_the_first_token_that_differs() -> None:
    assert same_beginning([[1, 2, 3, 4], [7, 8]], [[1, 2, 9, 4], [7, 8]]) == 4 / 6
    assert same_beginning([[1, 2, 3]], [[1, 2]]) == 1.0
    assert same_beginning([], []) == 1.0
