"""Random adds, steps, aborts and forks against every invariant, after every step.

Hypothesis drives scheduler and KV manager with tiny caches, so that hits, evictions, copies and
preemptions collide in all orders.
"""

from __future__ import annotations

import pytest
from fakes import ScheduleDriver, make_request
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minifer.config import POLICIES
from minifer.outputs import RequestGroup
from minifer.request import RequestStatus

TOKENS = st.integers(0, 1)  # two tokens: prefixes are shared all the time


class SchedulerMachine(RuleBasedStateMachine):
    """2 to 5 requests at a time on 3 to 8 blocks of 1 to 4 tokens."""

    driver = ScheduleDriver

    def __init__(self) -> None:
        super().__init__()
        self.names = 0

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(3, 8),
        budget=st.integers(1, 12),
        chunk=st.sampled_from([None, 1, 3]),
        seats=st.integers(2, 5),
        index=st.sampled_from(["hash", "radix"]),
        caching=st.sampled_from([True, True, True, False]),
        policy=st.sampled_from(POLICIES),
        ageing=st.sampled_from([None, 2]),
        whole=st.sampled_from([False, False, False, True]),
    )
    def begin(
        self, block_size, num_blocks, budget, chunk, seats, index, caching, policy, ageing, whole
    ):
        self.d = self.driver(
            num_blocks,
            block_size,
            max_num_batched_tokens=budget,
            enable_chunked_prefill=not whole,
            max_prefill_chunk=None if whole else chunk,
            max_num_seqs=seats,
            prefix_index=index,
            enable_prefix_caching=caching,
            scheduling_policy=policy,
            priority_ageing_steps=ageing,
            prefill_ageing=0.0 if ageing is None else 0.5,
            mlfq_quantum=2,
            mlfq_starvation_steps=ageing,
        )

    def open(self) -> list:
        return [r for r in self.d.requests if not r.finished]

    def name(self) -> str:
        self.names += 1
        return str(self.names)

    @precondition(lambda self: len(self.open()) < 5)
    @rule(
        data=st.data(),
        outputs=st.integers(1, 6),
        priority=st.integers(0, 2),
        tenant=st.sampled_from(["", "a", "b"]),
    )
    def add(self, data, outputs, priority, tenant):
        capacity = self.d.kv.capacity
        prompt = data.draw(st.lists(TOKENS, min_size=1, max_size=capacity))
        outputs = min(outputs, capacity + 1 - len(prompt))  # as admission and length would
        request = make_request(self.name(), prompt, outputs, priority=priority, tenant=tenant)
        self.d.requests.append(request)
        self.d.scheduler.add(request)

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def repeat_a_prompt(self, data):
        """The same text again, and a continuation of it: what prefix caches are for."""
        if len(self.open()) >= 5:
            return
        old = data.draw(st.sampled_from(self.d.requests))
        tokens = old.token_ids[: self.d.kv.capacity]
        request = make_request(self.name(), tokens, min(3, self.d.kv.capacity + 1 - len(tokens)))
        self.d.requests.append(request)
        self.d.scheduler.add(request)

    @rule(token=TOKENS)
    def step(self, token):
        self.d.step(lambda request: (token + int(request.request_id)) % 2)  # forks part ways

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(self.open()))
        self.d.scheduler.finish(request)
        self.d.scheduler.finish(request)  # twice is once

    @precondition(lambda self: len(self.d.scheduler.running) < self.d.config.max_num_seqs)
    @rule(data=st.data())
    def fork(self, data):
        running = self.d.scheduler.running
        if not running or len(self.open()) >= 5:
            return
        parent = data.draw(st.sampled_from(running))
        child = parent.fork(self.name(), RequestGroup("fork", None))
        self.d.scheduler.fork(parent, child)
        self.d.requests.append(child)

    @invariant()
    def nothing_is_lost(self):
        if not hasattr(self, "d"):
            return
        self.d.check()
        waiting = list(self.d.scheduler.waiting)
        running = self.d.scheduler.running
        assert {id(r) for r in waiting + running} == {id(r) for r in self.open()}
        assert all(r.status is RequestStatus.RUNNING for r in running)
        assert all(not r.block_table and r.num_computed_tokens == 0 for r in waiting)

    def teardown(self):
        """Everybody comes to an end, and every block comes back."""
        if hasattr(self, "d"):
            self.d.run(limit=2000)
            assert self.d.kv.pool.num_free == self.d.kv.pool.num_blocks


CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much]
SchedulerMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=CHECKS
)
TestScheduler = SchedulerMachine.TestCase


@pytest.mark.slow
class TestSchedulerLong(SchedulerMachine.TestCase):
    settings = settings(
        max_examples=2000, stateful_step_count=60, deadline=None, suppress_health_check=CHECKS
    )
