"""Drafts take what nobody else wants: blocks and budget that are left, for the time of a step."""

from __future__ import annotations

import pytest
from fakes import ScheduleDriver
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from speculating import Scripted
from test_state_machine import CHECKS, TOKENS, SchedulerMachine

WRONG = [9, 9, 9, 9]


class DraftDriver(ScheduleDriver):
    """Drafts whatever `drafts` holds; all tokens of a reply are 7."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.drafts = WRONG
        self.scheduler.proposer = Scripted(lambda request: self.drafts)

    def add(self, *args, **params):
        request = super().add(*args, **params)
        request.max_total_tokens = self.kv.capacity + 1
        return request


def test_a_request_that_has_caught_up_gets_its_drafts_beside_its_token():
    d = DraftDriver(8)
    d.add("a", [1, 2, 3])
    assert d.tokens() == {"a": 3}  # a prompt has none
    plan = d.step()
    (entry,) = plan.scheduled
    assert (entry.start, entry.num_new, entry.num_draft) == (3, 5, 4)
    assert entry.is_decode and plan.is_decode
    assert plan.counts == {"num_prefill_tokens": 0, "num_decode_tokens": 5}


@pytest.mark.parametrize("accepted", range(5))
def test_what_is_accepted_is_computed_and_the_rest_leaves_no_block_behind(accepted):
    d = DraftDriver(8)
    d.drafts = [7] * accepted + WRONG[accepted:]
    request = d.add("a", [1, 2, 3])
    d.step()
    d.step()
    assert request.token_ids == [1, 2, 3] + [7] * (2 + accepted)
    assert request.num_computed_tokens == 4 + accepted
    assert len(request.block_table) == -(-(4 + accepted) // 4)
    assert d.kv.pool.num_free == 8 - len(request.block_table)


def test_with_one_block_left_the_second_request_drafts_nothing():
    d = DraftDriver(3)
    for name in "ab":
        d.add(name, [1, 2, ord(name)])
    d.step()
    plan = d.step()
    assert [(e.num_new, e.num_draft) for e in plan.scheduled] == [(5, 4), (1, 0)]
    assert not plan.preempted


def test_a_token_comes_before_the_drafts_of_a_request_before_it():
    """b needs the last block for its own token: a's drafts stay within the block that a has."""
    d = DraftDriver(3)
    d.add("a", [1, 2])
    d.add("b", [3, 4, 5, 6])
    d.step()
    plan = d.step()
    assert [(e.num_new, e.num_draft) for e in plan.scheduled] == [(2, 1), (4, 3)]
    assert not plan.preempted and d.scheduler.num_preemptions == 0


def test_drafts_do_not_hasten_a_preemption():
    """The same requests run out of blocks in the same step, with and without drafts."""

    def first_preemption(driver) -> int:
        for name in "abc":
            driver.add(name, [1, 2, ord(name)], 14)
        for step in range(40):
            driver.step()
            if driver.scheduler.num_preemptions:
                return step
        raise AssertionError("this cache was meant to be too small")

    assert first_preemption(DraftDriver(6)) == first_preemption(ScheduleDriver(6))


def test_no_drafts_in_a_step_that_had_to_preempt():
    d = DraftDriver(4, block_size=2)
    d.add("a", [1, 2, 3], 9)
    d.add("b", [4, 5, 6], 9)
    while not d.scheduler.num_preemptions:
        plan = d.step()
    assert plan.preempted
    assert all(entry.num_draft == 0 for entry in plan.scheduled)


def test_the_budget_goes_to_tokens_first_then_to_prompts_then_to_drafts():
    d = DraftDriver(16, max_num_batched_tokens=9)
    d.add("a", [1, 2, 3])
    d.add("b", [4, 5, 6])
    d.step()
    d.add("c", [7, 8, 9, 10])
    plan = d.step()
    assert [(e.num_new, e.num_draft) for e in plan.scheduled] == [(4, 3), (1, 0), (4, 0)]


def test_drafts_stay_within_what_a_request_may_still_get():
    d = DraftDriver(8)
    d.add("a", [1, 2, 3], max_tokens=3)
    d.step()
    (entry,) = d.step().scheduled
    assert entry.num_draft == 1  # two tokens are left: one draft, and the one after it
    assert d.tokens() == {"a": 1}
    assert d.requests[0].finished


def test_n_sequences_of_one_prompt_draft_after_they_have_parted():
    d = DraftDriver(8)
    request = d.add("a", [1], temperature=1.0, n=2)
    (entry,) = d.scheduler.schedule().scheduled
    assert request.forks_pending == 1 and entry.num_draft == 0


def test_blocks_of_rejected_drafts_are_the_next_to_be_used():
    d = DraftDriver(8)
    d.add("a", [1, 2, 3])
    d.step()
    first = d.free_order[0]
    d.step()
    assert d.free_order[0] == first


class DraftMachine(SchedulerMachine):
    """The random life of the scheduler, with drafts: any tokens, some of which come true."""

    driver = DraftDriver

    @rule(token=TOKENS, drafts=st.lists(TOKENS, max_size=4))
    def step(self, token, drafts):
        self.d.drafts = drafts
        for request in self.d.requests:
            request.max_total_tokens = self.d.kv.capacity + 1
        self.d.step(lambda request: (token + int(request.request_id)) % 2)

    @precondition(lambda self: hasattr(self, "d"))
    @rule()
    def a_step_that_fails(self):
        """What it planned is not computed: its requests are ended."""
        if not self.open():
            return
        plan = self.d.scheduler.schedule()
        self.d.kv.prepare(plan)
        self.d.scheduler.take_back(plan)
        for entry in plan.scheduled:
            self.d.scheduler.finish(entry.request)


DraftMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=CHECKS
)
TestDrafts = DraftMachine.TestCase


@pytest.mark.slow
class TestDraftsLong(DraftMachine.TestCase):
    settings = settings(
        max_examples=2000, stateful_step_count=60, deadline=None, suppress_health_check=CHECKS
    )


del SchedulerMachine  # or its tests would run here again
