"""The random life of the scheduler again, with requests that a step leaves in their loops.

Which of a step's requests are through is drawn: any, at least one. `ShadowKV` follows every write
and read with tags that cover depth, so that nobody reads another depth's block, nor one that is
half-way.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fakes import ScheduleDriver, make_request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from test_state_machine import CHECKS, TOKENS, SchedulerMachine

from minifer.kv.shadow import ShadowKV
from minifer.outputs import RequestGroup

DEPTHS = st.sampled_from([1, 1, 2])


class LoopDriver(ScheduleDriver):
    """`through`: its bits say who of the next step is through."""

    through = 0

    def compute(self, plan):
        step = super().compute(plan)
        if not hasattr(self, "shadow"):
            self.shadow = ShadowKV(self.kv.block_size)
        self.shadow.follow(plan, step)
        chosen = self.through % max(1, len(plan.scheduled))
        for i, entry in enumerate(plan.scheduled):
            before = entry.request.suspended
            assert before is None or before.num_tokens == entry.num_new
            entry.completed = i == chosen or bool(self.through >> i & 1)
            tokens = SimpleNamespace(num_tokens=entry.num_new)
            entry.request.suspended = None if entry.completed else tokens
        return step


class LoopMachine(SchedulerMachine):
    driver = LoopDriver

    def make(self, tokens, outputs, depth, exits):
        request = make_request(self.name(), tokens, outputs, exit_threshold=0.5 if exits else None)
        request.num_loops = depth
        self.d.requests.append(request)
        self.d.scheduler.add(request)

    @precondition(lambda self: len(self.open()) < 5)
    @rule(data=st.data(), outputs=st.integers(1, 6), depth=DEPTHS, exits=st.booleans())
    def add(self, data, outputs, depth, exits):
        capacity = self.d.kv.capacity
        prompt = data.draw(st.lists(TOKENS, min_size=1, max_size=capacity))
        self.make(prompt, min(outputs, capacity + 1 - len(prompt)), depth, exits)

    @precondition(lambda self: self.open())
    @rule(data=st.data(), depth=DEPTHS, exits=st.booleans())
    def repeat_a_prompt(self, data, depth, exits):
        if len(self.open()) < 5:
            tokens = data.draw(st.sampled_from(self.d.requests)).token_ids[: self.d.kv.capacity]
            self.make(tokens, min(3, self.d.kv.capacity + 1 - len(tokens)), depth, exits)

    @rule(token=TOKENS, through=st.integers(0, 31))
    def step(self, token, through):
        suspended = [r for r in self.d.scheduler.running if r.suspended is not None]
        self.d.through = through
        plan = self.d.step(lambda request: (token + int(request.request_id)) % 2)
        scheduled = {id(entry.request) for entry in plan.scheduled}
        for request in suspended:  # they have their blocks: nobody is passed over
            assert id(request) in scheduled or request in plan.preempted
        for request in self.d.requests:
            assert request.num_published_blocks * self.d.kv.block_size <= (
                request.num_shareable_tokens
            )

    def teardown(self):
        if hasattr(self, "d"):
            self.d.through = -1  # everybody
            super().teardown()


def test_a_branch_gets_what_those_in_their_loops_leave_of_the_budget():
    """It stands before one of them, and its prompt begins again."""
    d = LoopDriver(16, max_num_batched_tokens=6)
    for name, length, outputs in (("short", 1, 1), ("parent", 3, 4), ("last", 2, 4)):
        d.add(name, range(length), outputs).num_loops = 2
    assert d.tokens() == {"short": 1, "parent": 3, "last": 2}  # the first is through
    parent = d.requests[1]
    child = parent.fork("child", RequestGroup("child", None, 1))
    d.requests.append(child)
    d.scheduler.fork(parent, child)
    assert d.tokens() == {"parent": 3, "last": 2, "child": 1}
    d.through = -1
    d.run()


def test_nobody_overtakes_those_in_their_loops():
    """They have their share of the budget already; a lower level gets what is left of it."""
    options = {"max_num_batched_tokens": 3, "max_num_seqs": 2}
    levels = {"scheduling_policy": "mlfq", "mlfq_quantum": 2, "mlfq_starvation_steps": 2}
    d = LoopDriver(4, 2, **options, **levels)
    for name, prompt in (("1", [0, 0, 0, 0]), ("2", [0, 0, 0]), ("3", [0, 1, 0])):
        d.add(name, prompt, 1).num_loops = 1
    d.step()
    d.step()
    d.through = -1
    d.run()  # which checks the budget of every step


LoopMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=CHECKS
)
TestLoops = LoopMachine.TestCase


@pytest.mark.slow
class TestLoopsLong(LoopMachine.TestCase):
    settings = settings(
        max_examples=2000, stateful_step_count=60, deadline=None, suppress_health_check=CHECKS
    )


del SchedulerMachine  # or its tests would run here again
