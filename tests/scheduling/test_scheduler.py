"""Public bug reports about schedulers as tests; numbers as in the table of tests/README.md."""

from __future__ import annotations

import dataclasses
import random

import pytest
from fakes import ScheduleDriver, make_request

from minifer.outputs import RequestGroup


@pytest.fixture(params=["hash", "radix"])
def index(request):
    return request.param


@pytest.mark.parametrize("length", [4, 8, 12])
def test_case_002_block_aligned_prompts_leave_a_token_to_compute(length, index):
    d = ScheduleDriver(16, prefix_index=index)
    prompt = list(range(length))
    for name in "ab":
        d.add(name, prompt, 2)
        steps = d.run()
        assert steps[0][name] >= 1
    assert d.kv.stats.num_hits == length - 4


def test_case_002_resume_after_three_outputs_is_one_prefill(index):
    d = ScheduleDriver(16, prefix_index=index)
    request = d.add("a", range(8), 8)
    for _ in range(3):
        d.step()
    plan = d.scheduler.schedule()
    d.scheduler._preempt(request, plan)
    d.check()
    assert (request.num_tokens, request.num_output_tokens) == (11, 3)
    assert d.tokens() == {"a": 3}, "two full blocks are still cached"
    d.run()
    assert request.num_output_tokens == 8


@pytest.mark.parametrize("length", [3, 4, 5])
def test_case_003_prompts_of_about_one_block(length, index):
    d = ScheduleDriver(16, prefix_index=index)
    for name in "ab":
        d.add(name, range(length), 1)
        d.run()
    assert d.kv.stats.num_hits == (4 if length == 5 else 0)


def test_case_005_resume_before_the_first_output_appends_once():
    d = ScheduleDriver(16, max_num_batched_tokens=3)
    request = d.add("a", range(5), 2)
    d.step()
    d.scheduler._preempt(request, d.scheduler.schedule())
    d.check()
    d.run()
    assert request.token_ids == [0, 1, 2, 3, 4, 7, 7]


def test_case_006_resume_after_half_the_blocks_were_evicted(index):
    d = ScheduleDriver(6, prefix_index=index)
    request = d.add("a", range(16), 2)
    d.step()
    d.scheduler._preempt(request, d.scheduler.schedule())
    d.check()
    hog = make_request("hog", range(50, 66), 1)  # takes the two free blocks, then tail blocks
    d.requests.append(hog)
    d.scheduler.waiting.put_back(hog)
    assert d.tokens() == {"hog": 16}
    assert d.tokens() == {"a": 17 - 8}, "scheduled is what the real hit leaves"
    d.run()


def test_case_007_context_length_counts_the_chunk_not_the_prompt():
    d = ScheduleDriver(16, max_num_batched_tokens=4)
    d.add("a", range(10), 1)
    lengths = []
    while d.scheduler.running or d.scheduler.waiting:
        plan = d.scheduler.schedule()
        lengths += d.kv.prepare(plan).seq_lens
        d.compute(plan)
        d.scheduler.advance(plan)
        if d.requests[0].num_computed_tokens == 10:
            d.scheduler.finish(d.requests[0])
    assert lengths == [4, 8, 10]


@pytest.mark.parametrize(("outputs", "blocks"), [(1, 1), (2, 2), (5, 2), (6, 3)])
def test_case_009_a_block_is_added_when_its_first_token_is_computed(outputs, blocks):
    d = ScheduleDriver(16)
    request = d.add("a", range(4), 100)
    for _ in range(outputs):
        d.step()
    assert len(request.block_table) == blocks


def test_case_010_equal_prompts_of_one_step_share_their_full_blocks(index):
    d = ScheduleDriver(16, prefix_index=index)
    first, second = d.add("a", range(10), 2), d.add("b", range(10), 2)
    assert d.tokens() == {"a": 10, "b": 2}
    assert first.block_table[:2] == second.block_table[:2]
    assert first.block_table[2] != second.block_table[2]


def test_case_018_caching_switched_off_is_the_same_path():
    d = ScheduleDriver(16, enable_prefix_caching=False)
    for name in "ab":
        d.add(name, range(10), 2)
    assert d.run()[0] == {"a": 10, "b": 10}
    assert (d.kv.stats.num_queries, d.kv.stats.num_hits) == (0, 0)


def test_case_019_recomputation_is_not_a_prefix_hit():
    rng = random.Random(0)
    d = ScheduleDriver(10)
    for i in range(6):
        d.add(str(i), [rng.randrange(1000) for _ in range(9)], 12)
    d.run()
    assert d.scheduler.num_preemptions > 0
    assert d.kv.stats.hit_rate == 0.0
    assert d.kv.stats.num_queries == 6 * 9


def low_and_high(num_blocks: int, **config) -> ScheduleDriver:
    return ScheduleDriver(
        num_blocks, scheduling_policy="priority", priority_ageing_steps=None, **config
    )


def test_case_034_a_victim_that_was_scheduled_this_step_leaves_no_trace(index):
    d = low_and_high(3, prefix_index=index)
    low = d.add("low", [1, 2, 3, 4, 5, 6, 7], 6, priority=5)
    high = d.add("high", [8, 9, 10, 11], 9, priority=0)
    assert d.tokens() == {"high": 4, "low": 7}
    d.scheduler.running.sort(key=lambda r: r.request_id != "low")  # the victim goes first
    # "low" fills its second block and publishes it; then "high" needs a block and none is free.
    plan = d.step()
    assert plan.preempted == [low]
    assert plan.tokens_by_request() == {"high": 1}
    assert (low.block_table, low.num_computed_tokens) == ([], 0)
    assert high.num_preemptions == 0
    # The second block was never computed: nobody may find it.
    probe = make_request("probe", [*low.token_ids, 0])
    assert len(d.kv.find_cached(probe)) <= 1
    d.run()


def test_case_035_nobody_is_skipped_when_the_victim_stood_before():
    d = low_and_high(6)
    for name, priority in (("a", 9), ("b", 1), ("c", 1)):
        d.add(name, [ord(name)] * 8, 20, priority=priority)
    d.step()
    d.scheduler.running.sort(key=lambda r: r.request_id)
    assert d.scheduler.running[0].request_id == "a"
    plan = d.step()
    assert [r.request_id for r in plan.preempted] == ["a"]
    assert plan.tokens_by_request() == {"b": 1, "c": 1}


def test_case_037_high_priority_takes_a_seat_of_the_lowest():
    d = low_and_high(16, max_num_seqs=2)
    d.add("low", [1, 2], 20, priority=3)
    d.add("lowest", [3, 4], 20, priority=4)
    d.step()
    d.add("equal", [9, 9], 20, priority=4)
    assert set(d.tokens()) == {"low", "lowest"}, "an equal one waits"
    d.add("high", [5, 6], 2, priority=0)
    assert d.tokens() == {"low": 1, "high": 2}
    d.run()
    assert d.requests[1].num_preemptions == 1
    assert all(r.num_output_tokens == r.params.max_tokens for r in d.requests)


def test_high_priority_takes_memory_of_the_lowest():
    d = low_and_high(4)
    d.add("low", range(15), 20, priority=3)
    d.step()
    d.add("high", range(20, 28), 2, priority=0)
    assert d.tokens() == {"high": 8}


def test_nobody_is_thrown_out_when_it_would_not_be_enough():
    d = low_and_high(6)
    d.add("boss", range(13), 20, priority=0)
    for i in range(2):
        d.add(f"low{i}", [30 + i], 20, priority=5)
    d.step()
    d.add("big", range(50, 62), 2, priority=1)  # three blocks; the low ones hold two
    for _ in range(3):
        plan = d.step()
        assert plan.preempted == []
        assert set(plan.tokens_by_request()) == {"boss", "low0", "low1"}


def test_blocks_shared_with_others_do_not_come_back_from_a_victim(index):
    d = low_and_high(5, prefix_index=index)
    d.add("boss", range(9), 20, priority=0)
    d.add("low", [*range(8), 99], 20, priority=5)
    assert d.tokens() == {"boss": 9, "low": 1}  # five tables' entries, four blocks
    d.add("big", range(50, 62), 2, priority=1)
    assert d.step().preempted == [], "the low one holds one block of its own, three are needed"


def test_ageing_lets_a_low_priority_overtake_late_high_ones():
    waits = {}
    for ageing in (None, 4):
        d = ScheduleDriver(
            16, max_num_seqs=1, scheduling_policy="priority", priority_ageing_steps=ageing
        )
        low = d.add("low", [1], 1, priority=1)
        for i in range(30):
            d.add(f"high{i}", [2, i], 1, priority=0)
            d.step()
            if low.finished:
                break
        waits[ageing] = i
    assert waits == {None: 29, 4: 4}, "after four steps of waiting it ranks with the newly arrived"


def test_an_aged_request_is_not_thrown_out_by_those_it_overtook():
    d = ScheduleDriver(8, max_num_seqs=1, scheduling_policy="priority", priority_ageing_steps=2)
    old = d.add("old", [1], 9, priority=1)
    for _ in range(5):
        d.step()
    d.add("new", [2], 2, priority=0)
    d.run(limit=10)
    assert old.num_preemptions == 0


def test_case_038_two_that_fit_one_at_a_time_both_finish(index):
    d = ScheduleDriver(4, prefix_index=index)
    for name, start in (("a", 0), ("b", 50)):
        d.add(name, range(start, start + 7), 9)
    steps = d.run(limit=40)
    assert all(step for step in steps)
    assert all(r.num_output_tokens == 9 for r in d.requests)


def test_a_branch_and_its_trunk_do_not_throw_each_other_out_for_ever():
    d = low_and_high(4, block_size=3, max_prefill_chunk=1, enable_prefix_caching=False)
    trunk = d.add("trunk", range(5), 6)
    d.step()
    branch = trunk.fork("branch", RequestGroup("branch", None))
    d.scheduler.fork(trunk, branch)
    d.requests.append(branch)
    d.run(limit=60)  # each needs all four blocks in the end
    assert trunk.num_preemptions == 0 < branch.num_preemptions


def test_case_041_after_a_resume_every_token_stands_once():
    d = ScheduleDriver(4)
    d.add("a", [1, 2, 3], 8)
    d.add("b", [4, 5, 6], 8)
    d.run()
    assert d.requests[1].num_preemptions > 0
    assert d.requests[1].token_ids == [4, 5, 6] + [7] * 8


def test_case_053_a_chunk_is_cut_to_the_budget():
    d = ScheduleDriver(16, max_prefill_chunk=16, max_num_batched_tokens=8)
    d.add("a", range(20), 1)
    assert [step["a"] for step in d.run()] == [8, 8, 4]


def test_case_055_idle_means_every_block_is_free(index):
    rng = random.Random(3)
    d = ScheduleDriver(8, max_num_batched_tokens=6, max_num_seqs=4, prefix_index=index)
    for i in range(40):
        d.add(str(i), [rng.randrange(3) for _ in range(rng.randrange(1, 20))], rng.randrange(1, 9))
        for _ in range(rng.randrange(4)):
            d.step()
        if rng.random() < 0.2:
            d.scheduler.finish(rng.choice(d.requests))
    d.run()
    assert d.kv.pool.num_free == 8


def test_nobody_is_admitted_in_a_step_that_preempted(index):
    d = ScheduleDriver(4, max_num_seqs=2, scheduling_policy="lpm", prefix_index=index)
    a, b = d.add("a", range(7), 9), d.add("b", range(50, 56), 3)
    d.step()
    d.step()
    # It shares both full blocks of "a", so that one free block is all it would need.
    d.add("hit", [*a.token_ids[:8], 99], 1)
    plan = d.step()
    assert plan.preempted == [b] and d.kv.pool.num_free == 1
    assert plan.tokens_by_request() == {"a": 1}
    assert d.tokens() == {"a": 1, "hit": 1}


def test_the_budget_of_a_victim_goes_to_the_others_of_its_step():
    d = low_and_high(4)
    d.add("low", range(7), 20, priority=5)
    d.add("high", range(20, 24), 9, priority=0)
    d.add("third", [30, 31], 9, priority=1)
    d.step()
    d.scheduler.running.sort(key=lambda r: r.request_id != "low")
    d.scheduler.config = dataclasses.replace(d.config, max_num_batched_tokens=2)
    # "low" gets the first token, then gives it back with its blocks.
    assert d.tokens() == {"high": 1, "third": 1}


def test_lpm_prefers_the_longest_cached_prefix():
    d = ScheduleDriver(16, max_num_seqs=1, scheduling_policy="lpm")
    d.add("warm", range(12), 1)
    d.run()
    d.add("cold", range(50, 60), 1)
    d.add("short", [*range(4), 70], 1)
    d.add("long", [*range(8), 71], 1)
    assert [next(iter(step)) for step in d.run()] == ["long", "short", "cold"]


def test_lpm_looks_nobody_up_while_there_is_no_free_seat(monkeypatch):
    d = ScheduleDriver(16, max_num_seqs=1, scheduling_policy="lpm")
    for name in "abc":
        d.add(name, [1, 2, 3, 4, 5], 4)
    d.step()
    monkeypatch.setattr(d.kv, "find_cached", lambda request: pytest.fail("looked up"))
    d.step()


def test_lpm_falls_back_to_arrival_order_when_many_wait():
    d = ScheduleDriver(16, max_num_seqs=1, scheduling_policy="lpm")
    d.add("warm", range(8), 1)
    d.run()
    for i in range(129):
        d.add(f"cold{i}", [100 + i], 1)
    d.add("hit", [*range(8), 1], 1)
    order = [next(iter(step)) for step in d.run()]
    assert order[0] == "cold0" and order[2] == "hit", "130 and 129 wait, then 128"


def test_a_request_with_n_takes_n_seats():
    d = ScheduleDriver(16, max_num_seqs=3)
    d.add("one", [1, 2], 3)
    d.add("three", [3, 4], 3, n=3)
    assert set(d.tokens()) == {"one"}
    d.scheduler.finish(d.requests[0])
    assert set(d.tokens()) == {"three"}


def test_fork_copies_the_shared_block_on_write_but_for_its_last_user(index):
    d = ScheduleDriver(16, prefix_index=index)
    parent = d.add("0", range(6), 9)
    d.step()
    for i in (1, 2):
        child = parent.fork(str(i), RequestGroup(str(i), None))
        d.scheduler.fork(parent, child)
        d.requests.append(child)
    d.check()
    plan = d.step(lambda request: int(request.request_id))
    copies = [copy for entry in plan.scheduled for copy in entry.allocation.copies]
    assert [source for source, _ in copies] == [1, 1], "two copies for three writers"
    tables = d.tables()
    assert {table[0] for table in tables} == {0} and len({table[1] for table in tables}) == 3
    d.run()
