"""Schedules of vLLM 0.32.0's real scheduler and block manager, as expected values.

Block size 4; every request that has caught up gets one token. vLLM keeps block 0 for itself, so
its ids are one higher than ours.
"""

from __future__ import annotations

import pytest
from fakes import ScheduleDriver

PROMPT_A = list(range(100, 112))
PROMPT_B = [200, 201]


@pytest.fixture(params=["hash", "radix"])
def index(request):
    return request.param


def test_a1_two_prompts_in_one_step(index):
    d = ScheduleDriver(16, max_num_batched_tokens=64, prefix_index=index)
    d.add("0", PROMPT_A, 3)
    d.add("1", PROMPT_B, 3)
    assert d.tokens() == {"0": 12, "1": 2}
    assert d.tables() == [[0, 1, 2], [3]]
    assert d.tokens() == {"0": 1, "1": 1}
    assert d.tables() == [[0, 1, 2, 4], [3]]
    assert d.tokens() == {"0": 1, "1": 1}
    assert d.kv.pool.num_free == 16


def test_a2_a_small_budget_cuts_the_prompt_into_chunks(index):
    d = ScheduleDriver(16, max_num_batched_tokens=5, max_num_seqs=4, prefix_index=index)
    d.add("0", PROMPT_A, 3)
    d.add("1", PROMPT_B, 3)
    assert d.tokens() == {"0": 5}
    assert d.tables() == [[0, 1], []]
    assert d.tokens() == {"0": 5}
    assert d.tables() == [[0, 1, 2], []]
    assert d.tokens() == {"0": 2, "1": 2}
    assert d.tables() == [[0, 1, 2], [3]]
    assert d.tokens() == {"0": 1, "1": 1}
    assert d.tables() == [[0, 1, 2, 4], [3]]
    assert d.tokens() == {"0": 1, "1": 1}
    assert d.kv.pool.num_free == 16


def test_a3_and_case_042_prefill_and_decode_share_a_step(index):
    d = ScheduleDriver(16, max_num_batched_tokens=6, prefix_index=index)
    for i in range(3):
        d.add(str(i), range(10 * i + 10, 10 * i + 15), 3)
    assert d.tokens() == {"0": 5, "1": 1}
    assert d.tokens() == {"0": 1, "1": 4, "2": 1}
    assert d.tables() == [[0, 1], [2, 3], [4]]
    assert d.tokens() == {"0": 1, "1": 1, "2": 4}
    assert d.tables() == [[], [2, 3], [4, 5]]
    assert d.tokens() == {"1": 1, "2": 1}
    assert d.tokens() == {"2": 1}


def test_a4_and_case_001_a_full_hit_computes_the_last_block_again(index):
    d = ScheduleDriver(8, prefix_index=index)
    prompt = list(range(8))
    d.add("first", prompt, 1)
    assert d.tokens() == {"first": 8}
    assert d.free_order == [2, 3, 4, 5, 6, 7, 1, 0]
    again = d.add("again", prompt, 2)
    assert d.tokens() == {"again": 4}
    assert again.block_table == [0, 2]
    d.scheduler.finish(again)
    assert d.free_order == [3, 4, 5, 6, 7, 1, 2, 0]
    longer = d.add("longer", [*prompt, 8], 2)
    assert d.tokens() == {"longer": 1}
    assert longer.block_table == [0, 1, 3], "of two equal blocks the oldest stays"


def test_a4_chunked_prompt_sent_twice(index):
    d = ScheduleDriver(8, max_num_batched_tokens=5, prefix_index=index)
    prompt = list(range(16))
    d.add("first", prompt, 1)
    assert [step["first"] for step in d.run()] == [5, 5, 5, 1]
    d.add("again", prompt, 1)
    assert [step["again"] for step in d.run()] == [4]


def test_a7_preemption_and_resume(index):
    d = ScheduleDriver(4, prefix_index=index)
    d.add("0", [10, 11, 12], 8)
    d.add("1", [20, 21, 22], 8)
    assert d.tokens() == {"0": 3, "1": 3}
    assert d.tokens() == {"0": 1, "1": 1}
    assert d.tokens() == {"0": 1, "1": 1}
    assert d.tables() == [[0, 2], [1, 3]]
    for _ in range(3):
        assert d.tokens() == {"0": 1, "1": 1}
    assert d.tokens() == {"0": 1}  # step 7
    assert d.requests[1].num_preemptions == 1
    assert d.tables() == [[0, 2, 3], []]
    assert d.tokens() == {"0": 1}
    assert d.tokens() == {"1": 5}, "four of its nine tokens are still cached"
    assert d.tables() == [[], [1, 3, 2]]
    assert d.tokens() == {"1": 1}
    assert d.kv.pool.num_free == 4


def test_abort_frees_everything_and_the_prompt_hits_later(index):
    d = ScheduleDriver(16, prefix_index=index)
    request = d.add("0", PROMPT_A, 3)
    d.step()
    d.scheduler.finish(request)
    d.check()
    again = d.add("1", PROMPT_A, 3)
    assert d.tokens() == {"1": 4}
    assert again.block_table == [0, 1, 3]


def test_a_second_turn_hits_what_the_first_computed(index):
    d = ScheduleDriver(16, prefix_index=index)
    first = d.add("0", range(6), 6)
    d.run()
    d.add("1", [*first.token_ids, 90, 91], 1)
    # 12 tokens are known, but the KV of the last was never computed: two full blocks.
    assert d.tokens() == {"1": 6}


def test_max_num_seqs_caps_residency(index):
    d = ScheduleDriver(16, max_num_seqs=2, prefix_index=index)
    for i in range(3):
        d.add(str(i), [i, i, i], 2)
    assert [set(step) for step in d.run()] == [{"0", "1"}, {"0", "1"}, {"2"}, {"2"}]


def test_the_least_recently_used_blocks_go_first(index):
    d = ScheduleDriver(5, prefix_index=index)
    prompt = list(range(8))
    d.add("0", prompt, 1)
    d.run()
    other = d.add("1", range(50, 62), 2)
    d.step()
    assert other.block_table == [2, 3, 4]
    d.scheduler.finish(other)
    d.add("2", [*prompt, 8], 1)
    assert d.tokens() == {"2": 1}
