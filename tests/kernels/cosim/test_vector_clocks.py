"""The race detector against the definition: two accesses race when no chain of program order and
of releases that a later acquire saw leads from the first to the second."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minifer.kernels.cosim.vector_clocks import Access, VectorClocks

PROGRAMS, COUNTERS, ELEMENTS = 3, 2, 2
Event = tuple[int, str, int]  # program, what, which counter or element

EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.integers(0, PROGRAMS - 1),
            st.sampled_from(["release", "acquire"]),
            st.integers(0, COUNTERS - 1),
        ),
        st.tuples(
            st.integers(0, PROGRAMS - 1),
            st.sampled_from(["READ", "WRITE", "ATOMIC"]),
            st.integers(0, ELEMENTS - 1),
        ),
    ),
    min_size=10,
    max_size=30,
)


def races_found(events: list[Event]) -> set[tuple[str, int, int, int]]:
    """(kind, element, second program, first program), with every element a buffer of its own."""
    memory = torch.zeros(ELEMENTS)
    tracked = {str(i): memory[i : i + 1] for i in range(ELEMENTS)}
    clocks = VectorClocks(PROGRAMS, tracked, {})
    for program, what, which in events:
        if what in Access.__members__:
            for shadow, elements in clocks.touched(np.array([memory.data_ptr() + 4 * which])):
                clocks.access(program, shadow, elements, Access[what])
        else:
            getattr(clocks, what)(program, which)
    return {(race.kind, int(race.buffer), race.program, race.other) for race in clocks.races}


def races_by_definition(events: list[Event]) -> set[tuple[str, int, int, int]]:
    count = len(events)
    before = np.zeros((count, count), bool)
    for i, j in itertools.combinations(range(count), 2):
        (p, what, which), (q, then, what_for) = events[i], events[j]
        seen = (what, then) == ("release", "acquire") and which == what_for
        before[i, j] = p == q or seen
    for k in range(count):  # Warshall
        before |= before[:, k : k + 1] & before[k]
    letter = {"READ": "R", "WRITE": "W", "ATOMIC": "W"}
    found = set()
    for i, j in itertools.combinations(range(count), 2):
        (p, first, which), (q, second, what_for) = events[i], events[j]
        accesses = {first, second}
        if not accesses <= set(letter) or which != what_for or p == q:
            continue
        if accesses in ({"READ"}, {"ATOMIC"}) or before[i, j]:
            continue
        found.add((f"{letter[second]}A{letter[first]}", which, q, p))
    return found


@settings(max_examples=200)
@given(EVENTS)
def test_the_detector_reports_exactly_the_unordered_conflicts(events: list[Event]) -> None:
    assert races_found(events) == races_by_definition(events)


def test_the_smallest_hand_over() -> None:
    hand_over = [(0, "WRITE", 0), (0, "release", 1), (1, "acquire", 1), (1, "READ", 0)]
    assert races_found(hand_over) == set()
    assert races_found(hand_over[:2] + hand_over[3:]) == {("RAW", 0, 1, 0)}
    late = [(0, "WRITE", 0), (1, "acquire", 1), (0, "release", 1), (1, "READ", 0)]
    assert races_found(late) == {("RAW", 0, 1, 0)}  # the acquire came before the release


def test_what_comes_after_a_release_is_not_released() -> None:
    events = [(0, "release", 0), (0, "WRITE", 0), (1, "acquire", 0), (1, "READ", 0)]
    assert races_found(events) == {("RAW", 0, 1, 0)}


def test_order_is_passed_on_through_a_third_program() -> None:
    chain = [(0, "WRITE", 0), (0, "release", 0), (1, "acquire", 0), (1, "release", 1)]
    chain += [(2, "acquire", 1), (2, "READ", 0)]
    assert races_found(chain) == set()


def test_an_acquire_sees_all_releases_and_not_only_the_last() -> None:
    both = [(0, "WRITE", 0), (0, "release", 0), (1, "release", 0), (2, "acquire", 0)]
    assert races_found([*both, (2, "READ", 0)]) == set()


def test_an_acquire_that_needs_less_sees_less() -> None:
    memory = torch.zeros(4)
    clocks = VectorClocks(4, {"m": memory}, {})
    for program, value in ((0, 0), (1, 1), (2, 2)):  # each adds 1
        clocks.release(program, 9, value, value + 1)
    clocks.acquire(3, 9, needed=2)
    assert clocks.clock[3].tolist() == [1, 1, 0, 1]  # the first two
    clocks.acquire(2, 9, needed=2)
    assert clocks.clock[2].tolist() == [1, 0, 2, 0]  # its own, and one more
    clocks.acquire(2, 9)
    assert clocks.clock[2].tolist() == [1, 1, 2, 0]


def test_a_counter_that_was_there_before_the_run_orders_nothing() -> None:
    clocks = VectorClocks(2, {"m": torch.zeros(1)}, {})
    clocks.release(0, 9, before=5, after=6)
    clocks.acquire(1, 9, needed=5)
    assert clocks.clock[1].tolist() == [0, 1]


def test_counters_may_be_added_to_by_all_but_read_plainly_by_none() -> None:
    assert races_found([(0, "ATOMIC", 0), (1, "ATOMIC", 0)]) == set()
    assert races_found([(0, "ATOMIC", 0), (1, "READ", 0)]) == {("RAW", 0, 1, 0)}
