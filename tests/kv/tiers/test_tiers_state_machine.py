"""Random adds, steps, aborts, arrivals, failures and timeouts against every invariant.

Hypothesis drives scheduler, KV manager and tiers with tiny caches and a disk that delivers block
by block, late, in part or never. The driver checks that every position holds the right prefix.
"""

from __future__ import annotations

import pytest
from fakes import ScheduleDriver, make_request
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tier_helpers import MemoryDisk, check_tiers, manual_tiers

from minifer.kv.prefix_key import make_key
from minifer.outputs import RequestGroup
from minifer.request import RequestStatus

TOKENS = st.integers(0, 1)  # two tokens: prefixes are shared all the time


class TiersMachine(RuleBasedStateMachine):
    """Up to 5 requests at a time on 3 to 8 blocks, 1 to 10 blocks of DRAM and a disk."""

    def __init__(self) -> None:
        super().__init__()
        self.names = 0

    @initialize(
        block_size=st.integers(1, 3),
        num_blocks=st.integers(3, 8),
        dram=st.integers(1, 10),
        has_disk=st.sampled_from([True, True, True, False]),
        budget=st.integers(1, 12),
        seats=st.integers(1, 4),
        index=st.sampled_from(["hash", "radix"]),
        policy=st.sampled_from(["fcfs", "priority", "lpm"]),
        write_policy=st.sampled_from(["through", "through", "second_touch"]),
        load_policy=st.sampled_from(["always", "always", "auto"]),
    )
    def begin(
        self, block_size, num_blocks, dram, has_disk, budget, seats, index, policy, write_policy,
        load_policy,
    ):  # fmt: skip
        disk = MemoryDisk() if has_disk else None
        self.d = ScheduleDriver(
            num_blocks,
            block_size,
            make_tiers=manual_tiers(dram, disk),
            max_num_batched_tokens=budget,
            max_num_seqs=seats,
            prefix_index=index,
            scheduling_policy=policy,
            priority_ageing_steps=2,
            kv_dram_bytes=1 << 20,
            kv_write_policy=write_policy,
            kv_load_policy=load_policy,
            kv_load_timeout=5.0,
        )

    @property
    def transfers(self):
        return self.d.kv.tiers._transfers if hasattr(self, "d") else None

    def reads(self) -> list:
        return self.transfers.reads if self.transfers is not None else []

    def open(self) -> list:
        return [r for r in self.d.requests if not r.finished]

    def submit(self, tokens, outputs, priority=0) -> None:
        self.names += 1
        outputs = min(outputs, self.d.kv.capacity + 1 - len(tokens))
        request = make_request(str(self.names), tokens, outputs, priority=priority)
        self.d.requests.append(request)
        self.d.scheduler.add(request)

    @precondition(lambda self: len(self.open()) < 5)
    @rule(data=st.data(), outputs=st.integers(1, 6), priority=st.integers(0, 2))
    def add(self, data, outputs, priority):
        most = self.d.kv.capacity
        self.submit(data.draw(st.lists(TOKENS, min_size=1, max_size=most)), outputs, priority)

    @precondition(lambda self: self.d.requests and len(self.open()) < 5)
    @rule(data=st.data())
    def repeat_a_prompt(self, data):
        old = data.draw(st.sampled_from(self.d.requests))
        self.submit(old.token_ids[: self.d.kv.capacity], 3)

    @rule(token=TOKENS)
    def step(self, token):
        self.d.step(lambda request: (token + int(request.request_id)) % 2)

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(self.open()))
        self.d.scheduler.finish(request)
        self.d.scheduler.finish(request)

    @precondition(lambda self: self.open())
    @rule()
    def a_step_is_undone(self):
        """Ctrl-C in the middle of a step: its requests go on, from the queue."""
        self.d.scheduler.schedule()
        self.d.scheduler.restart([r for r in self.d.requests if not r.finished])

    @precondition(lambda self: self.open())
    @rule()
    def a_step_fails(self):
        plan = self.d.scheduler.schedule()
        self.d.scheduler.take_back(plan)
        for entry in plan.scheduled:
            self.d.scheduler.finish(entry.request)

    @precondition(lambda self: len(self.d.scheduler.running) < self.d.config.max_num_seqs)
    @rule(data=st.data())
    def fork(self, data):
        running = self.d.scheduler.running
        if not running or len(self.open()) >= 5:
            return
        parent = data.draw(st.sampled_from(running))
        self.names += 1
        child = parent.fork(str(self.names), RequestGroup("fork", None))
        self.d.scheduler.fork(parent, child)
        self.d.requests.append(child)

    @precondition(lambda self: self.reads())
    @rule()
    def a_block_arrives(self):
        self.transfers.read_one(self.reads()[0])

    @precondition(lambda self: self.reads())
    @rule(give_up=st.booleans())
    def a_read_ends(self, give_up):
        self.transfers.finish_read(self.reads()[0], give_up)

    @precondition(lambda self: self.transfers is not None)
    @rule()
    def the_writer_catches_up(self):
        self.transfers.finish_writes()

    @precondition(lambda self: self.transfers is not None and self.transfers.store.blocks)
    @rule(data=st.data(), damaged=st.booleans())
    def a_file_is_lost(self, data, damaged):
        blocks = self.transfers.store.blocks
        digest = data.draw(st.sampled_from(sorted(blocks)))
        if damaged:
            self.transfers.store.broken.add(digest)
        else:
            del blocks[digest]

    @precondition(lambda self: self.transfers is not None and self.d.requests)
    @rule(data=st.data())
    def another_process_writes(self, data):
        """All of an old request's blocks are on the disk."""
        request, P = data.draw(st.sampled_from(self.d.requests)), self.d.kv.block_size
        tokens, key = request.token_ids, None
        for end in range(P, len(tokens) + 1, P):
            key = make_key(key, tokens[end - P : end])
            prefixes = tuple(tuple(tokens[: p + 1]) for p in range(end - P, end))
            self.transfers.store.blocks.setdefault(key.digest, prefixes)
            self.transfers.store.broken.discard(key.digest)

    @rule()
    def others_need_the_memory(self):
        """What nobody holds is forgotten, on the device and in DRAM."""
        for block in self.d.kv.pool.blocks:
            if block.ref_count == 0:
                self.d.kv.pool.unpublish(block.block_id)
        for block in list(self.d.kv.tiers.dram):
            if not block.pinned:
                del self.d.kv.tiers.dram._blocks[block.key.digest]

    @rule(seconds=st.sampled_from([1.0, 3.0]))
    def time_passes(self, seconds):
        self.d.now += seconds

    @invariant()
    def nothing_is_lost(self):
        if not hasattr(self, "d"):
            return
        self.d.check()
        check_tiers(self.d.kv.tiers)
        scheduler = self.d.scheduler
        waiting = [*scheduler.waiting, *scheduler.loading]
        everyone = waiting + scheduler.running
        if self.transfers is not None:
            assert set(self.d.kv.tiers._prefetcher._waits) <= set(waiting)
        assert len(everyone) == len({id(r) for r in everyone})
        assert {id(r) for r in everyone} == {id(r) for r in self.open()}
        assert all(not r.block_table and r.num_computed_tokens == 0 for r in waiting)
        assert all(r.status is RequestStatus.WAITING for r in waiting)

    def teardown(self):
        """The disk never answers again: everybody comes to an end, and everything is let go."""
        if not hasattr(self, "d"):
            return
        for _ in range(500):
            if not self.open():
                break
            self.d.now += 1.0
            self.d.step()
        assert not self.open() and not self.d.scheduler.loading
        assert self.d.kv.pool.num_free == self.d.kv.pool.num_blocks
        for read in list(self.reads()):
            self.transfers.finish_read(read, give_up=True)
        if self.transfers is not None:
            self.transfers.finish_writes()
        self.d.kv.collect()
        check_tiers(self.d.kv.tiers)
        assert not any(block.pinned for block in self.d.kv.tiers.dram)
        assert self.d.kv.tiers.dram.reserved == 0


CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much]
TiersMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=CHECKS
)
TestTiers = TiersMachine.TestCase


@pytest.mark.slow
class TestTiersLong(TiersMachine.TestCase):
    settings = settings(
        max_examples=2000, stateful_step_count=60, deadline=None, suppress_health_check=CHECKS
    )
