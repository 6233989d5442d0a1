"""Tiers seen from the scheduler: who loads, who waits, what an abort leaves behind.

No model and no threads: a block's content is the prefix it belongs to, and the disk answers when
the test says so. The driver checks that every position a step reads holds the right prefix.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import ScheduleDriver
from tier_helpers import MemoryDisk, check_tiers, make_chain, manual_tiers

from minifer.kv.prefix_key import PrefixKey
from minifer.kv.tiers.dram import chain
from minifer.request import RequestStatus


def driver(num_blocks=8, dram=32, disk=None, instant=True, **config) -> ScheduleDriver:
    config = {"kv_dram_bytes": 1 << 20, "kv_load_policy": "always", **config}
    return ScheduleDriver(num_blocks, make_tiers=manual_tiers(dram, disk, instant), **config)


def prompt(length: int, first: int = 0) -> list[int]:
    return [first, *range(1, length)]


def push_out(d: ScheduleDriver) -> None:
    """Fill the device with another request: nothing else is cached on it afterwards."""
    length = d.kv.capacity
    d.add(f"filler-{len(d.requests)}", [1000 + len(d.requests)] * length, max_tokens=1)
    d.run()


def loaded(d: ScheduleDriver) -> dict[str, int]:
    """Request → tokens that a tier gave it."""
    hits: dict[str, int] = {}
    for event in d.sink.events:
        if event.name == "kv.tier_hit":
            start, end = event.token_range
            hits[event.request_id] = hits.get(event.request_id, 0) + end - start
    return hits


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_case_146_stored_blocks_are_found_after_an_eviction(index):
    """vllm-project/vllm#53498: every look-up missed, because nothing was ever registered."""
    d = driver(prefix_index=index)
    d.add("a", prompt(13), max_tokens=1)
    d.run()
    push_out(d)
    d.add("b", prompt(13), max_tokens=1)
    assert d.tokens() == {"b": 1}
    d.run()
    assert loaded(d) == {"b": 12}
    assert d.kv.tiers.stats.hits == {"dram": 12, "disk": 0}


@pytest.mark.parametrize("length", [11, 12, 13])
def test_case_147_one_token_is_always_left_to_compute(length):
    """vllm-project/vllm#52617: a prompt found in full has no logits to sample from."""
    d = driver()
    d.add("a", prompt(length), max_tokens=2)
    d.run()
    push_out(d)
    d.add("b", prompt(length), max_tokens=2)
    expected = (length - 1) // 4 * 4
    assert d.tokens() == {"b": length - expected}
    assert loaded(d) == {"b": expected}
    assert d.requests[-1].group.num_cached_tokens == expected


@pytest.mark.parametrize("length", [3, 4, 5, 15, 16, 17])
def test_case_149_only_full_blocks_are_stored_and_looked_for(length):
    """LMCache/LMCache#2206: the last, partial chunk was expected and never there."""
    d = driver(disk=MemoryDisk())
    d.add("a", prompt(length), max_tokens=1)
    d.run()
    d.kv.collect()
    assert len(d.kv.tiers.dram) == length // 4 == len(d.kv.tiers.disk.blocks)
    push_out(d)
    d.add("b", [*prompt(length), 5, 6, 7, 8], max_tokens=1)
    d.run()
    assert loaded(d).get("b", 0) == length // 4 * 4


def test_case_145_a_block_that_was_not_computed_cannot_be_stored():
    """vllm-project/vllm#45704: the copy to memory ran before the kernel that writes the block."""
    d = driver()
    d.add("a", prompt(13), max_tokens=1)
    plan = d.scheduler.schedule()
    step = d.kv.prepare(plan)
    with pytest.raises(RuntimeError, match="has not run"):
        d.kv.store(plan, step)
    assert len(d.kv.tiers.dram) == 0
    d.compute(plan)
    d.scheduler.advance(plan)
    d.kv.store(plan, step)
    assert len(d.kv.tiers.dram) == 3


def test_case_021_a_tier_is_asked_only_for_what_the_device_does_not_have():
    """vllm-project/vllm#30522: all tokens of a prompt counted as asked of the tier."""
    d = driver(num_blocks=64)
    d.add("a", prompt(61), max_tokens=1)
    d.run()
    assert d.kv.tiers.stats.num_queries == 61
    d.add("b", [*prompt(60), *[9] * 40], max_tokens=1)
    d.run()
    assert d.kv.tiers.stats.num_queries == 61 + 40


def test_what_a_failed_step_was_to_compute_is_not_stored():
    d = driver()
    d.add("a", prompt(13), max_tokens=4)
    plan = d.scheduler.schedule()
    d.scheduler.take_back(plan)
    d.scheduler.finish(d.requests[0])
    assert d.kv.pool.num_free == 8 and len(d.kv.tiers.dram) == 0
    d.add("b", prompt(13), max_tokens=1)
    d.run()
    assert loaded(d) == {}


def test_a_withdrawn_block_is_not_stored_although_its_step_ran():
    d = driver()
    d.add("a", prompt(13), max_tokens=4)
    plan = d.scheduler.schedule()
    step = d.compute(plan)
    d.scheduler.advance(plan)
    d.kv.withdraw(d.requests[0])
    d.scheduler.finish(d.requests[0])
    d.kv.store(plan, step)
    assert len(d.kv.tiers.dram) == 0


def test_nothing_is_stored_behind_a_block_that_holds_nan():
    d = driver()
    real, calls = d.kv.tiers._read_block, []

    def read_block(block_id):
        calls.append(block_id)
        return real(block_id) if len(calls) != 2 else None

    d.kv.tiers._read_block = read_block
    d.add("a", prompt(17), max_tokens=1)
    d.run()
    assert len(d.kv.tiers.dram) == 1 and d.kv.tiers.stats.rejected == 1 and len(calls) == 2


def test_case_151_counters_are_true_after_offload_drop_and_reload():
    """NVIDIA/TensorRT-LLM#12834: free blocks were counted in two places, and differently."""
    d = driver(num_blocks=6, dram=4, disk=MemoryDisk())
    for i in range(20):
        d.add(str(i), prompt(9, first=i % 5), max_tokens=3)
        d.run()
        check_tiers(d.kv.tiers)
        assert d.kv.pool.num_free == 6 == d.kv.pool.num_blocks
        assert d.kv.usage == 0
        assert len(d.kv.tiers.dram) == len(list(d.kv.tiers.dram)) <= 4
    stats = d.kv.tiers.stats
    assert stats.loads["dram"].blocks > 0 and stats.loads["disk"].blocks > 0
    assert stats.evicted["dram"] > 0


def test_two_requests_load_a_common_prefix_once():
    d = driver(num_blocks=12)
    d.add("a", prompt(13), max_tokens=1)
    d.run()
    push_out(d)
    d.add("b", [*prompt(12), 50], max_tokens=1)
    d.add("c", [*prompt(12), 60], max_tokens=1)
    assert d.tokens() == {"b": 1, "c": 1}
    assert d.requests[-1].group.num_cached_tokens == 12
    assert d.kv.tiers.stats.loads["dram"].blocks == 3


def test_device_then_dram_then_disk_then_computed():
    """Four homes of one prefix: 2 blocks on the device, 1 in DRAM, 2 on disk, the rest nowhere."""
    disk = MemoryDisk()
    d = driver(num_blocks=12, dram=12, disk=disk)
    d.add("a", prompt(21), max_tokens=1)
    d.run()
    d.kv.collect()
    request = d.requests[0]
    for block in list(d.kv.tiers.dram)[:2]:  # the tail
        del d.kv.tiers.dram._blocks[block.key.digest]
    for block in d.kv.pool.blocks:
        if block.key in request.prefix_keys[2:]:
            d.kv.pool.unpublish(block.block_id)
    d.add("b", [*prompt(21), *[9] * 8], max_tokens=1)
    d.run()
    stats = d.kv.tiers.stats
    assert (stats.hits["dram"], stats.hits["disk"]) == (4, 8)
    assert d.requests[-1].group.num_cached_tokens == 20
    hit = next(e for e in d.sink.events if e.name == "kv.tier_hit")
    assert hit.token_range == (8, 20) and hit.data == {"dram": 4, "disk": 8}


def test_prompt_logprobs_are_computed_not_loaded():
    d = driver(disk=MemoryDisk())
    d.add("a", prompt(13), max_tokens=1)
    d.run()
    push_out(d)
    d.add("b", prompt(13), max_tokens=1, prompt_logprobs=0)
    d.requests[-1].group.prompt_logprobs = [None]
    assert d.tokens() == {"b": 13}


def test_a_preempted_request_loads_what_it_had_computed():
    d = driver(num_blocks=5, max_num_batched_tokens=64)
    d.add("a", prompt(8, first=100), max_tokens=6)
    d.add("b", prompt(8, first=200), max_tokens=6)
    d.run()
    assert d.scheduler.num_preemptions > 0
    assert d.kv.tiers.stats.loads["dram"].blocks > 0
    assert d.kv.tiers.stats.hits == {"dram": 0, "disk": 0}  # nobody's first admission


def test_a_load_counts_no_token_of_the_budget():
    d = driver(num_blocks=16, max_num_batched_tokens=4)
    d.add("a", prompt(33), max_tokens=1)
    d.run()
    push_out(d)
    d.add("b", prompt(33), max_tokens=1)
    assert d.tokens() == {"b": 1}


def test_a_load_that_does_not_fit_waits_for_room():
    d = driver(num_blocks=8)
    d.add("a", prompt(25), max_tokens=1)
    d.run()
    push_out(d)
    d.add("long", [7] * 12, max_tokens=6)
    d.step()
    d.add("b", prompt(25), max_tokens=1)
    while d.scheduler.running:
        assert d.requests[-1].status is RequestStatus.WAITING
        d.step()
    d.run()
    assert loaded(d)["b"] == 24


def test_a_prefix_that_is_used_becomes_recent_on_the_disk_however_it_was_found():
    """On the device, in DRAM, on disk or computed again: its files are touched, tail to head."""
    disk = MemoryDisk()
    d = driver(num_blocks=12, dram=12, disk=disk)
    for tokens, touched in (([], 0), ([5], 4), ([6] * 5, 4), ([6] * 9, 5)):
        disk.touched.clear()
        d.add(f"r{len(d.requests)}", [*prompt(17), *tokens], max_tokens=1)
        d.run()
        assert sum(map(len, disk.touched)) == (1 if touched else 0)
        if touched:
            assert len(list(chain(disk.touched[0][0]))) == touched
    d.kv.tiers._config = replace(d.config, kv_load_policy="auto")
    d.kv.tiers.break_even.prefill.observe(1e12, 1.0)  # loading never pays
    push_out(d)
    disk.touched.clear()
    d.add("again", prompt(17), max_tokens=1)
    assert d.tokens() == {"again": 17}
    assert [len(list(chain(key))) for (key,) in disk.touched] == [4]


def test_second_touch_stores_what_is_used_again():
    d = driver(num_blocks=16, kv_write_policy="second_touch")
    d.add("a", prompt(9), max_tokens=1)
    d.run()
    assert len(d.kv.tiers.dram) == 0
    d.add("b", [*prompt(8), 7, 7, 7, 7, 7], max_tokens=1)  # a hit on the device
    d.run()
    assert len(d.kv.tiers.dram) == 2
    push_out(d)
    d.add("c", [*prompt(8), 7, 7, 7, 7, 7], max_tokens=1)
    d.run()
    assert loaded(d) == {"c": 8}
    assert len(d.kv.tiers.dram) == 3  # computed for the second time


# -- waiting for the disk


def on_disk(length: int, num_blocks=8, dram=8, **config) -> ScheduleDriver:
    """Another process has left the prompt on a disk that takes its time."""
    disk, tokens = MemoryDisk(), prompt(length)
    for key in prompt_keys(length):
        end = 4 * len(list(chain(key)))
        disk.blocks[key.digest] = tuple(tuple(tokens[: p + 1]) for p in range(end - 4, end))
    return driver(num_blocks, dram, disk, instant=False, **config)


def prompt_keys(length: int) -> list[PrefixKey]:
    tokens = prompt(length)
    return make_chain(*[tokens[i : i + 4] for i in range(0, length - 3, 4)])


def forget(d: ScheduleDriver) -> None:
    """Push the prompt out of the device and out of DRAM."""
    for _ in range(10):
        push_out(d)
        d.kv.tiers._transfers.finish_writes()
    assert not d.kv.tiers.dram.match(prompt_keys(17))


def test_others_pass_a_request_that_waits():
    d = on_disk(17)
    d.add("b", prompt(17), max_tokens=1)
    d.add("c", [9] * 5, max_tokens=2)
    assert d.tokens() == {"c": 5}
    assert [r.request_id for r in d.scheduler.loading] == ["b"]
    assert d.tokens() == {"c": 1}
    (read,) = d.kv.tiers._transfers.reads
    d.kv.tiers._transfers.finish_read(read)
    assert d.tokens() == {"b": 1}
    assert d.kv.tiers.stats.hits["disk"] == 16


def test_a_step_with_nothing_but_waiting_requests_sleeps():
    d = on_disk(17)
    d.add("b", prompt(17), max_tokens=1)
    for i in range(3):
        assert d.tokens() == {} and d.scheduler.loading
        d.kv.wait_for_loads()
        assert d.kv.tiers._transfers.slept == i + 1


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm"])
def test_after_the_wait_it_stands_where_it_stood(policy):
    d = on_disk(17, max_num_seqs=1, scheduling_policy=policy)
    d.add("b", prompt(17), max_tokens=1)
    d.add("c", prompt(17), max_tokens=1)
    d.add("d", [9] * 5, max_tokens=3)
    d.add("e", [8] * 5, max_tokens=1)
    assert d.tokens() == {"d": 5}
    d.kv.tiers._transfers.finish_read(d.kv.tiers._transfers.reads[0])
    order = [next(iter(tokens)) for tokens in d.run()]
    assert order == ["d", "d", "b", "c", "e"]


def test_waiting_takes_no_seat_and_no_block():
    d = on_disk(17, max_num_seqs=1)
    d.add("b", prompt(17), max_tokens=1)
    d.add("c", [9] * 5, max_tokens=1)
    assert d.tokens() == {"c": 5}
    assert d.scheduler.seats_taken == 0 and d.kv.pool.num_free == 8
    assert d.scheduler.loading


def test_requests_with_the_same_prefix_wait_for_one_read():
    d = on_disk(17)
    for name in "bcd":
        d.add(name, [*prompt(16), ord(name)], max_tokens=1)
    d.step()
    (read,) = d.kv.tiers._transfers.reads
    assert len(d.scheduler.loading) == 3
    d.scheduler.finish(d.requests[-3])  # b, who asked first, leaves
    assert not read.cancelled
    d.kv.tiers._transfers.finish_read(read)
    assert d.tokens() == {"c": 1, "d": 1}


def test_it_takes_what_came_and_computes_the_rest():
    d = on_disk(17)
    d.kv.tiers.disk.broken.add(prompt_keys(17)[2].digest)
    d.add("b", prompt(17), max_tokens=1)
    d.step()
    d.kv.tiers._transfers.finish_read(d.kv.tiers._transfers.reads[0])
    assert d.tokens() == {"b": 9}
    assert d.kv.tiers.stats.hits["disk"] == 8


def test_a_disk_that_brings_nothing_is_asked_once():
    d = on_disk(17)
    d.kv.tiers.disk.broken.add(prompt_keys(17)[0].digest)
    d.kv.tiers.disk.read = lambda key: None  # and does not admit it
    d.add("b", prompt(17), max_tokens=1)
    d.step()
    d.kv.tiers._transfers.finish_read(d.kv.tiers._transfers.reads[0])
    assert d.tokens() == {"b": 17}


def test_a_read_larger_than_memory_comes_in_parts():
    """8 blocks on disk, 4 fit into DRAM: the request takes 4 and computes the others."""
    d = on_disk(33, num_blocks=16, dram=4)
    d.add("b", prompt(33), max_tokens=1)
    d.step()
    d.kv.tiers._transfers.finish_read(d.kv.tiers._transfers.reads[0])
    assert d.tokens() == {"b": 17}
    check_tiers(d.kv.tiers)


def settle(d: ScheduleDriver) -> None:
    """Nobody is left, the reader lets go: nothing may be held any more."""
    for read in list(d.kv.tiers._transfers.reads):
        d.kv.tiers._transfers.finish_read(read)
    d.kv.tiers._transfers.finish_writes()
    d.kv.collect()
    check_tiers(d.kv.tiers)
    assert d.kv.tiers.dram.reserved == 0
    assert not any(block.pinned for block in d.kv.tiers.dram)
    assert d.kv.tiers._prefetcher._waits == {}
    assert d.kv.pool.num_free == d.kv.pool.num_blocks


@pytest.mark.parametrize("moment", ["asked", "some came", "all came", "collected", "queued again"])
def test_case_049_an_abort_between_look_up_and_load_leaves_nothing(moment):
    """vllm-project/vllm#44100: the look-up's state in the tier was never released."""
    d = on_disk(17, max_num_seqs=1)
    d.add("b", prompt(17), max_tokens=1)
    d.add("hog", [9] * 5, max_tokens=50)  # keeps the only seat
    d.step()
    transfers = d.kv.tiers._transfers
    (read,) = transfers.reads
    if moment != "asked":
        transfers.read_one(read)
    if moment in ("all came", "collected", "queued again"):
        transfers.finish_read(read)
    if moment == "collected":
        d.kv.collect()
    if moment == "queued again":
        d.step()
        assert d.requests[-2] in list(d.scheduler.waiting)
        assert any(block.pins for block in d.kv.tiers.dram)
    d.scheduler.finish(d.requests[-2])
    d.scheduler.finish(d.requests[-2])  # twice is once
    assert not any(block.pins for block in d.kv.tiers.dram)
    d.scheduler.finish(d.requests[-1])
    settle(d)
    d.add("c", prompt(17), max_tokens=1)
    transfers.instant = True
    d.run()
    assert loaded(d)["c"] == 16


def test_case_050_a_loader_that_never_answers_costs_its_timeout_once():
    """vllm-project/vllm#46283: an abort freed blocks the loader still wrote, or waited for ever."""
    d = on_disk(17, kv_load_timeout=5.0)
    d.add("b", prompt(17), max_tokens=1)
    d.add("c", prompt(17), max_tokens=1)
    assert d.tokens() == {}
    (read,) = d.kv.tiers._transfers.reads
    d.kv.tiers._transfers.read_one(read)  # one block comes, then silence
    d.now = 4.9
    assert d.tokens() == {}
    d.scheduler.finish(d.requests[-1])
    d.now = 5.0
    assert d.tokens() == {"b": 13}
    assert d.kv.tiers.stats.timeouts == 1 and read.cancelled
    assert d.kv.tiers.dram.reserved == 0  # what the reader may still bring is one block
    forget(d)
    d.add("d", prompt(17), max_tokens=1)
    assert d.tokens() == {"d": 17}  # nobody waits for a disk that hangs
    d.kv.tiers._transfers.finish_read(read, give_up=True)
    forget(d)
    d.add("e", prompt(17), max_tokens=1)
    assert d.tokens() == {}  # it answers again
    settle_later = d.kv.tiers._transfers.reads[0]
    d.kv.tiers._transfers.finish_read(settle_later)
    d.run()
    settle(d)


def test_a_timeout_of_zero_never_waits():
    d = on_disk(17, kv_load_timeout=0)
    d.add("b", prompt(17), max_tokens=1)
    assert d.tokens() == {"b": 17}


def test_k10_what_a_writer_has_yet_to_read_is_not_evicted():
    """sgl-project/sglang#24527: pages were reused while a transfer still read them."""
    d = driver(num_blocks=8, dram=4, disk=MemoryDisk(), instant=False)
    d.add("a", prompt(9), max_tokens=1)
    d.run()
    queued = [block for job in d.kv.tiers._transfers.writes for block in job.blocks]
    payloads = [block.payload for block in queued]
    assert len(queued) == 2 and all(block.writing for block in queued)
    for _ in range(3):
        push_out(d)
    assert [d.kv.tiers.dram.get(block.key) for block in queued] == queued
    assert [block.payload for block in queued] == payloads
    assert d.kv.tiers.stats.dropped > 0  # the queue holds half of DRAM and takes no more
    d.kv.tiers._transfers.finish_writes()
    d.kv.collect()
    assert d.kv.tiers.disk.read(queued[0].key) == payloads[0]
    push_out(d)
    assert d.kv.tiers.dram.get(queued[0].key) is None


def test_k10_what_came_for_a_waiting_request_is_not_evicted():
    d = on_disk(17, num_blocks=8, dram=6, max_num_seqs=2)
    d.add("b", prompt(17), max_tokens=1)
    d.add("hog", [9] * 20, max_tokens=10)  # leaves three blocks
    d.step()
    d.kv.tiers._transfers.finish_read(d.kv.tiers._transfers.reads[0])
    while not d.requests[-1].finished:
        d.step()
        if not d.requests[-2].finished:
            assert sum(block.pins for block in d.kv.tiers.dram) in (0, 4)
        check_tiers(d.kv.tiers)
    d.run()
    assert loaded(d)["b"] == 16


def test_a_more_important_request_preempts_when_its_blocks_are_here():
    d = on_disk(17, num_blocks=8, max_num_seqs=1, scheduling_policy="priority")
    d.add("low", [9] * 5, max_tokens=20, priority=5)
    d.step()
    d.add("high", prompt(17), max_tokens=1, priority=0)
    assert d.tokens() == {"low": 1}  # the seat is not taken from it before
    (read,) = d.kv.tiers._transfers.reads
    d.kv.tiers._transfers.finish_read(read)
    assert d.tokens() == {"high": 1}
    assert d.scheduler.num_preemptions == 1
    d.run()
    settle(d)


def test_break_even_refuses_and_says_so():
    d = driver(kv_load_policy="auto", num_blocks=8)
    d.add("a", prompt(13), max_tokens=1)
    d.run()
    push_out(d)
    tiers = d.kv.tiers
    tiers.break_even.prefill.observe(1e9, 1.0)
    tiers.break_even.bandwidth["dram"].observe(1.0, 1.0)
    d.add("b", prompt(13), max_tokens=1)
    assert d.tokens() == {"b": 13}
    assert tiers.stats.refused == {"dram": 12, "disk": 0} and tiers.stats.hits["dram"] == 0


def test_measured_rates_come_from_the_steps():
    d = driver(kv_load_policy="auto")
    d.add("a", prompt(13), max_tokens=2)
    plan = d.scheduler.schedule()
    step = d.compute(plan)
    d.now += 2.0
    d.scheduler.advance(plan)
    d.kv.store(plan, step)
    assert d.kv.tiers.break_even.prefill.value == 6.5
    assert d.kv.tiers.break_even.min_bandwidth == pytest.approx(64 / 4 * 6.5)
