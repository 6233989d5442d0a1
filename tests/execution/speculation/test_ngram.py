"""Prompt look-up: which place is found, and what it costs."""

from __future__ import annotations

import pytest
from fakes import make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from minifer.execution.speculation.ngram import NgramIndex, NgramProposer

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def drafts(tokens, most=4, shortest=2, longest=4) -> list[int]:
    request = make_request("r", tokens)
    assert NgramProposer(shortest, longest).num_drafts(request, most) == len(
        request.draft_token_ids
    )
    return request.draft_token_ids


def slow_twin(tokens, shortest, longest) -> int | None:
    for n in range(longest, shortest - 1, -1):
        for place in range(n, len(tokens)):
            if n < len(tokens) and tokens[place - n : place] == tokens[-n:]:
                return place
    return None


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1]),
        ([1, 2, 3, 1, 2, 4, 1, 2], [3, 1, 2, 4]),  # the earliest place
        ([9, 1, 2, 3, 8, 1, 2, 7, 9, 1, 2], [3, 8, 1, 2]),  # the longest match
        ([5, 5, 5], [5]),  # one token is known to follow
        ([1, 2, 3], []),
        ([1, 1], []),
        ([7], []),
    ],
)
def test_what_followed_the_last_tokens_before(tokens, expected):
    assert drafts(tokens) == expected


def test_no_more_than_there_is_room_for():
    assert drafts([1, 2, 3, 4, 5, 1, 2], most=1) == [3]


def test_one_token_in_common_is_enough_where_it_is_asked_for():
    assert drafts([1, 2, 3, 1]) == []
    assert drafts([1, 2, 3, 1], shortest=1) == [2, 3, 1]


@settings(deadline=None)
@given(TOKENS, st.integers(1, 3), st.integers(0, 3), st.data())
def test_an_index_that_grows_finds_what_a_search_from_scratch_finds(tokens, shortest, more, data):
    longest = shortest + more
    index, length = NgramIndex(shortest, longest), 0
    while length < len(tokens):
        length += data.draw(st.integers(1, len(tokens) - length))
        index.extend(tokens[:length])
        assert index.find(tokens[:length]) == slow_twin(tokens[:length], shortest, longest)


def test_each_token_is_looked_at_once():
    """The work of a reply grows with its length, not with its square."""

    class Counted(list):
        reads = 0

        def __getitem__(self, key):
            Counted.reads += 1
            return super().__getitem__(key)

    index, tokens = NgramIndex(2, 4), Counted(range(100))
    index.extend(tokens)
    first, Counted.reads = Counted.reads, 0
    for token in range(100, 200):
        tokens.append(token)
        index.extend(tokens)
    assert first <= Counted.reads <= 300


def test_a_request_that_is_gone_takes_its_index_with_it():
    proposer, request = NgramProposer(2, 4), make_request("r", [1, 2, 3])
    proposer.num_drafts(request, 4)
    assert len(proposer._indexes) == 1
    del request
    assert len(proposer._indexes) == 0
