"""The index of what replicas hold: against a plain dictionary, and when events go missing."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_helpers import Clock, make_request

from minifer.routing.index import KVIndex
from minifer.routing.kv_events import (
    MEDIA,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
)


class Publisher:
    """Numbers the batches of one replica, and hands them to an index."""

    def __init__(self, index: KVIndex, name: str, epoch: int = 1) -> None:
        self.index, self.name, self.epoch, self.sequence = index, name, epoch, 0
        index.add(name)

    def batch(self, *events: KVEvent) -> KVEventBatch:
        self.sequence += 1
        return KVEventBatch(self.name, self.epoch, self.sequence, events)

    def say(self, *events: KVEvent) -> None:
        self.index.apply(self.batch(*events))

    def store(
        self, *keys: Hashable, parent: Hashable | None = None, medium: str = "device"
    ) -> None:
        self.say(BlockStored(keys, parent, medium))

    def snapshot(self, *events: KVEvent) -> KVEventBatch:
        return KVEventBatch(self.name, self.epoch, self.sequence, events, snapshot=True)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def index(clock: Clock) -> KVIndex:
    return KVIndex(ttl=100, silence=10, snapshot_retry=5, clock=clock)


# -- exact


def test_leading_blocks_of_each_replica(index):
    a, b = Publisher(index, "A"), Publisher(index, "B")
    a.store(1, 2, 3)
    b.store(1)
    b.store(3, parent=2)  # of no use without 2
    assert index.match([1, 2, 3, 4]) == {"A": 3, "B": 1}
    assert index.match([2, 3]) == {"A": 2} and index.match([4]) == {} and index.match([]) == {}
    assert index.matched_tokens(make_request(60, [1, 2, 3], block_size=20)) == {"A": 60, "B": 20}
    assert (index.num_blocks("A"), index.num_blocks("B"), len(index)) == (3, 2, 5)


def test_a_block_that_left_the_device_is_held_as_long_as_it_is_in_dram(index):
    a = Publisher(index, "A")
    a.store(1, 2)
    a.store(1, 2, medium="dram")
    a.say(BlockRemoved((1, 2), "device"))
    assert index.match([1, 2]) == {"A": 2}
    a.say(BlockRemoved((2,), "dram"))
    assert index.match([1, 2]) == {"A": 1}
    a.store(5)
    a.say(AllBlocksCleared("device"))
    assert index.match([1]) == {"A": 1} and index.match([5]) == {}
    a.say(AllBlocksCleared())
    assert len(index) == 0


def test_a_replica_that_is_gone_holds_nothing_and_is_not_listened_to(index):
    a, b = Publisher(index, "A"), Publisher(index, "B")
    a.store(1, 2)
    b.store(1)
    index.remove("A")
    a.store(1, 2)
    index.record("A", [1, 2])
    assert index.match([1, 2]) == {"B": 1} and index.replicas == ("B",)
    index.remove("A")


_KEYS = st.integers(0, 6)
_OPERATIONS = st.one_of(
    st.tuples(st.just("store"), st.sampled_from("ABC"), st.lists(_KEYS), st.sampled_from(MEDIA)),
    st.tuples(st.just("remove"), st.sampled_from("ABC"), st.lists(_KEYS), st.sampled_from(MEDIA)),
    st.tuples(st.just("clear"), st.sampled_from("ABC"), st.just([]), st.sampled_from(MEDIA)),
    st.tuples(st.just("match"), st.just("A"), st.lists(_KEYS, unique=True), st.just("")),
    st.tuples(st.just("gone"), st.sampled_from("ABC"), st.just([]), st.just("")),
    st.tuples(st.just("new"), st.sampled_from("ABC"), st.just([]), st.just("")),
)


def naive_match(held: dict[str, set[tuple[Hashable, str]]], keys: Sequence) -> dict[str, int]:
    found = {}
    for name, blocks in held.items():
        present = {key for key, _ in blocks}
        count = next((i for i, key in enumerate(keys) if key not in present), len(keys))
        if count:
            found[name] = count
    return found


@given(st.lists(_OPERATIONS, max_size=60), st.sampled_from([2, 5, 10_000]))
def test_it_is_a_dictionary_within_its_bound(operations, max_blocks):
    """What it finds is true; without a bound it finds all. Every answer of a bounded one is a part
    of the truth."""
    index = KVIndex(max_blocks, clock=Clock())
    publishers = {name: Publisher(index, name) for name in "ABC"}
    held: dict[str, set[tuple[Hashable, str]]] = {name: set() for name in "ABC"}
    for kind, name, keys, medium in operations:
        publisher, blocks = publishers[name], held[name]
        if kind == "store":
            publisher.store(*keys, medium=medium)
            blocks |= {(key, medium) for key in keys}
        elif kind == "remove":
            publisher.say(BlockRemoved(tuple(keys), medium))
            blocks -= {(key, medium) for key in keys}
        elif kind == "clear":
            publisher.say(AllBlocksCleared(medium))
            held[name] = {(key, where) for key, where in blocks if where != medium}
        elif kind == "gone":
            index.remove(name)
            publishers[name] = Publisher(index, name)
            held[name] = set()
        elif kind == "new":  # its process died and was started again, unseen
            publisher.epoch, publisher.sequence = publisher.epoch + 1, 0
            publisher.say()
            held[name] = set()
        truth, found = naive_match(held, keys), index.match(keys)
        assert len(index) <= max_blocks
        assert len(index) == sum(index.num_blocks(n) for n in "ABC")
        if max_blocks == 10_000:
            assert found == truth
            assert index.num_blocks(name) == len({key for key, _ in held[name]})
        else:
            assert all(count <= truth[n] for n, count in found.items())


def test_the_least_recently_matched_prefix_is_dropped_first_and_its_tail_before_its_head(clock):
    index = KVIndex(max_blocks=6, clock=clock)
    a = Publisher(index, "A")
    a.store(1, 2, 3)
    a.store(11, 12, 13)
    index.match([1, 2, 3])
    a.store(21)
    assert index.match([11, 12, 13]) == {"A": 2}
    a.store(31, 32)
    assert index.match([1, 2, 3]) == {"A": 1} and index.match([11, 12]) == {"A": 2}
    # 21 was older than what has been matched since; 3 and 2 than the rest
    assert len(index) == 6


# -- events that are missing


def test_case_158_a_block_of_an_unknown_parent_is_kept_and_a_snapshot_asked_for(index, clock):
    """vllm-project/vllm#58119."""
    a = Publisher(index, "A")
    a.store(1)
    a.store(3, 4, parent=2)
    assert index.match([1, 2, 3, 4]) == {"A": 1}
    assert index.snapshots_wanted() == ["A"] and index.snapshots_wanted() == []
    clock.now += 5
    assert index.snapshots_wanted() == ["A"], "the first one was lost"
    a.store(2, parent=1)
    assert index.match([1, 2, 3, 4]) == {"A": 4}, "what was buffered is found"
    index.apply(a.snapshot(BlockStored((1, 2, 3, 4, 5), None)))
    clock.now += 5
    assert index.match([1, 2, 3, 4, 5]) == {"A": 5} and index.snapshots_wanted() == []


def test_a_snapshot_in_any_order_asks_for_no_other(index):
    a = Publisher(index, "A")
    a.store(2, parent=1)  # nor does the first batch of all
    assert index.snapshots_wanted() == []
    a.store(9, parent=8)
    assert index.snapshots_wanted() == ["A"]
    index.apply(a.snapshot(BlockStored((2,), 1), BlockStored((1,), None), BlockStored((9,), 8)))
    assert index.snapshots_wanted() == [] and index.match([1, 2]) == {"A": 2}


def test_a_parent_that_was_dropped_for_want_of_room_is_not_asked_for(clock):
    index = KVIndex(max_blocks=2, clock=clock)
    a = Publisher(index, "A")
    a.store(1, 2)
    a.store(11)
    a.store(3, parent=2)
    assert index.snapshots_wanted() == []


def test_after_a_gap_a_snapshot_is_asked_for_and_ends_it(index, clock):
    a = Publisher(index, "A")
    a.store(1, 2)
    assert not index.is_approximate("A")
    a.batch(BlockRemoved((2,)))  # lost
    a.store(5)
    assert index.is_approximate("A") and index.snapshots_wanted() == ["A"]
    assert index.match([5]) == {"A": 1} and index.match([1, 2]) == {"A": 2}, "believed for a while"
    late = a.snapshot()
    a.store(6)
    index.apply(late)
    assert index.match([6]) == {"A": 1}, "a snapshot that is older than what we know is not taken"
    clock.now += 5
    assert index.snapshots_wanted() == ["A"]
    index.apply(a.snapshot(BlockStored((1,), None), BlockStored((5,), None), BlockStored((6,), 5)))
    assert index.match([1, 2]) == {"A": 1} and index.match([5, 6]) == {"A": 2}
    assert not index.is_approximate("A")
    a.store(7)
    assert index.match([7]) == {"A": 1} and index.snapshots_wanted() == []


def test_what_was_reported_before_a_gap_is_not_believed_for_ever(index, clock):
    a = Publisher(index, "A")
    a.store(1, 2)
    for _ in range(3):
        a.batch()
        a.store(1)
        clock.now += 40
    assert index.match([1, 2]) == {"A": 1}, "1 was reported again; more gaps do not help 2"


def test_batches_that_come_twice_or_late_change_nothing(index):
    a = Publisher(index, "A")
    first, second = a.batch(BlockStored((1,), None)), a.batch(BlockRemoved((1,)))
    for batch in (first, second, first, second, first):
        index.apply(batch)
    assert index.match([1]) == {} and index.snapshots_wanted() == []


def test_a_new_process_begins_with_nothing_and_the_old_one_is_not_heard(index):
    old = Publisher(index, "A", epoch=1)
    old.store(1)
    new = Publisher(index, "A", epoch=2)
    new.store(2)
    old.store(3)
    assert (index.match([1]), index.match([2]), index.match([3])) == ({}, {"A": 1}, {})
    assert not index.is_approximate("A")


def test_a_router_that_comes_late_asks_for_a_snapshot(index):
    a = Publisher(index, "A")
    a.sequence = 40
    a.store(7)
    assert index.is_approximate("A") and index.snapshots_wanted() == ["A"]


# -- no events at all


def test_case_159_without_events_the_router_believes_its_own_decisions(index, clock):
    """ai-dynamo/dynamo#11473: the cache of workers that do not publish looked empty."""
    index.add("A")
    assert index.is_approximate("A")
    index.record("A", [1, 2])
    assert index.match([1, 2, 3]) == {"A": 2}
    clock.now += 60
    index.record("A", [1])
    clock.now += 60
    assert index.match([1, 2]) == {"A": 1}, "each is believed for 100 s after it was last sent"
    clock.now += 60
    assert index.match([1]) == {} and len(index) == 0


def test_case_159_a_replica_that_falls_silent_is_followed_approximately_and_back(index, clock):
    a = Publisher(index, "A")
    a.store(1)
    index.record("A", [1, 2])
    assert not index.is_approximate("A")
    clock.now += 10
    assert index.is_approximate("A")
    index.record("A", [1, 2, 3])
    assert index.match([1, 2, 3]) == {"A": 3}
    a.store(2, parent=1)
    assert index.snapshots_wanted() == ["A"], "who knows what happened in between"
    index.apply(a.snapshot(BlockStored((1, 2), None)))
    assert not index.is_approximate("A") and index.match([1, 2, 3]) == {"A": 2}


@pytest.mark.parametrize("busy", [True, False])
def test_a_silence_is_noticed_by_whatever_comes_next(index, clock, busy):
    a = Publisher(index, "A")
    a.store(1)
    index.record("A", [1, 2])
    clock.now += 10
    if busy:  # one more request, and then nothing for long
        index.record("A", [3])
        clock.now += 100
        assert index.num_blocks("A") == 0
    a.store(4)
    assert index.snapshots_wanted() == ["A"]


def test_what_was_sent_counts_at_once_until_the_replica_reports_about_it(index, clock):
    """Two users with one new prefix at the same time: the second need not compute it, too."""
    a = Publisher(index, "A")
    a.store(1)
    index.record("A", [1, 2, 3, 4])
    assert index.match([1, 2, 3, 4]) == {"A": 4} and not index.is_approximate("A")
    a.store(2, 3, parent=1)
    a.say(BlockRemoved((3,)))
    clock.now += 99
    assert index.match([1, 2, 3, 4]) == {"A": 2} and index.num_blocks("A") == 3
    clock.now += 1
    assert index.num_blocks("A") == 2, "4 was never computed"


def test_a_replica_that_has_nothing_to_say_is_not_silent(index, clock):
    a = Publisher(index, "A")
    a.store(1)
    clock.now += 1000
    assert not index.is_approximate("A") and index.match([1]) == {"A": 1}
    index.record("A", [1])  # which it holds already
    clock.now += 1000
    assert not index.is_approximate("A")
    index.record("A", [1, 2])
    clock.now += 9
    a.say()  # nothing new, but it is there
    clock.now += 9
    assert not index.is_approximate("A")


def test_decisions_stay_within_the_bound(clock):
    index = KVIndex(max_blocks=10, clock=clock)
    index.add("A")
    for start in range(0, 1000, 5):
        index.record("A", range(start, start + 5))
        assert len(index) <= 10
    assert index.match(range(995, 1000)) == {"A": 5}


@pytest.mark.parametrize("bounds", [{"max_blocks": 0}, {"ttl": 0}, {"silence": -1}])
def test_bounds_are_checked(bounds):
    with pytest.raises(ValueError, match=f"{next(iter(bounds))} must be"):
        KVIndex(**bounds)
