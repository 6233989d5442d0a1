"""Stage 1: who gets how many tokens this step.

There is no prefill phase and no decode phase. Every request has `num_computed_tokens` and
`num_tokens`, and a step hands out a budget of tokens to let the first catch up with the second.
Decode (one token behind), chunked prefill, resuming after a preemption and a prefix hit are all
answers to one question: how many new tokens for this request?
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from minifer.config import EngineConfig
from minifer.events import EventBus
from minifer.kv.manager import KVCacheManager
from minifer.kv.tiers.tiers import TierHit
from minifer.request import Request, RequestStatus
from minifer.scheduling.disciplines import ShortestFirst, SkipJoinMLFQ, VirtualTokenCounter
from minifer.scheduling.plan import ScheduledRequest, SchedulePlan
from minifer.scheduling.policies import FCFS, LongestPrefixFirst, Measure, Policy, Priority

if TYPE_CHECKING:
    from minifer.execution.speculation.proposer import Proposer


class Scheduler:
    """Waiting and running requests, and the plan of the next step. No tensors.

    A request takes one seat of `max_num_seqs` while it runs, one with n > 1 takes n from its
    admission on. It owns blocks only while it runs: preemption gives up all of them, and the
    request computes its tokens again later (they usually hit the prefix cache).
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KVCacheManager,
        events: EventBus | None = None,
        proposer: Proposer | None = None,
        measure: Measure | None = None,
    ) -> None:
        """measure: how `sjf` and `srpt` measure requests; None: in tokens."""
        self.config = config
        self.kv = kv
        self.proposer = proposer  # None: no speculation
        self.running: list[Request] = []
        tokens = Measure(self._prefill_left, lambda r: r.arrival_work)
        self._measure = tokens if measure is None else measure
        self.waiting: Policy = self._make_policy()
        self.loading: list[Request] = []  # out of the queue until their KV is here from the disk
        self.num_preemptions = 0
        self._events = events if events is not None else EventBus()
        self._step = 0
        self._work = 0  # tokens computed so far
        self._arrivals = 0

    def _make_policy(self) -> Policy:
        config, name = self.config, self.config.scheduling_policy
        if name == "priority":
            return Priority(config.priority_ageing_steps)
        if name == "lpm":
            return LongestPrefixFirst(lambda r: len(self.kv.find_cached(r)))
        if name in ("sjf", "srpt"):
            return ShortestFirst(self._measure, config.prefill_ageing, name == "srpt")
        if name == "mlfq":
            quantum, starving = config.mlfq_quantum, config.mlfq_starvation_steps
            return SkipJoinMLFQ(self._prefill_left, quantum, starving)
        return VirtualTokenCounter() if name == "vtc" else FCFS()

    def _prefill_left(self, request: Request) -> int:
        """Tokens to compute before the request gets its next one."""
        cached = len(self.kv.find_cached(request)) if not request.num_computed_tokens else 0
        return request.num_tokens - (request.num_computed_tokens or cached * self.kv.block_size)

    # -- requests come and go

    def add(self, request: Request) -> None:
        """Put an admitted request into the queue."""
        self._arrivals += 1
        request.arrival = self._arrivals
        request.arrival_step, request.arrival_work = self._step, self._work
        self.waiting.add(request)

    def finish(self, request: Request) -> None:
        """Take a request out, at any moment, and give back its blocks. Twice is once."""
        if request in self.loading:
            self.loading.remove(request)
            self.kv.forget(request)
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
            self.kv.forget(request)
        elif request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.kv.free(request)
        request.status, request.suspended = RequestStatus.FINISHED, None

    def fork(self, parent: Request, child: Request) -> None:
        """Let `child` run on from a running parent's tokens, sharing its blocks.

        Sequences of one group keep its place in line, in the order of their index; a branch of
        its own is a new arrival. No two requests stand in the same place: they would preempt
        each other for ever.
        """
        self.kv.fork(parent, child)
        child.status, child.arrival = RequestStatus.RUNNING, parent.arrival
        if child.group is not parent.group:
            self._arrivals += 1
            child.arrival = self._arrivals
            child.arrival_step, child.arrival_work = self._step, self._work
        child.num_computed_tokens = parent.num_computed_tokens
        self.running.insert(self.running.index(parent) + max(1, child.index), child)

    @property
    def seats_taken(self) -> int:
        return sum(_seats(request) for request in self.running)

    # -- one step

    def schedule(self) -> SchedulePlan:
        """Hand out the token budget: running requests first, then waiting ones.

        Nobody is admitted in a step that had to preempt for memory. Publishes and allocates
        blocks as it goes; `advance` or `take_back` ends what it began. The plan is empty only when
        all requests wait for their KV from the disk.
        """
        self._step += 1
        plan = SchedulePlan(self._step)
        self._resume_loaded()
        if self.waiting:
            self._make_room(plan)
        budget = self.config.max_num_batched_tokens
        if not self.config.enable_chunked_prefill and not any(r.suspended for r in self.running):
            self._schedule_waiting(plan, budget)
            if plan:
                return plan  # nobody decodes while prompts are computed
        left = self._schedule_running(plan, budget)
        if left is not None:
            self._schedule_waiting(plan, left)
            self._schedule_drafts(plan)
        return plan

    def _schedule_running(self, plan: SchedulePlan, budget: int) -> int | None:
        """Returns what is left of the budget, or None when somebody was preempted."""
        preempted, reorders = False, self.waiting.reorders
        for request in self.waiting.order(self.running):
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted by one before it
            if reorders and not preempted and request.suspended is None:
                budget = self._schedule_waiting(plan, budget, before=request)
            num_new = request.num_suspended_tokens
            num_new = num_new or self._num_new(request, request.num_computed_tokens, budget)
            if num_new == 0:
                break
            while not self.kv.can_allocate(request, num_new):
                victim = self.waiting.victim(self.running)
                budget += self._preempt(victim, plan)
                preempted = True
                if victim is request:
                    break
            else:
                self._schedule(request, num_new, plan)
                budget -= num_new
        return None if preempted else budget

    def _schedule_waiting(
        self, plan: SchedulePlan, budget: int, before: Request | None = None
    ) -> int:
        """Returns what is left of the budget. before: admit those who may overtake this one."""
        # With no free seat the head is not asked for: `lpm` looks up every waiting request for it.
        while self.waiting and budget > 0 and self.seats_taken < self.config.max_num_seqs:
            if before is not None and not self.waiting.overtakes(before):
                break
            request = self.waiting.head()
            if self.seats_taken + _seats(request) > self.config.max_num_seqs:
                break
            cached = self.kv.find_cached(request)
            stored = self.kv.find_stored(request, cached)
            if stored is None:  # those behind it need not wait for the disk
                self.waiting.remove(request)
                self.loading.append(request)
                continue
            num_cached = len(cached) * self.kv.block_size
            num_found = self.kv.num_found(cached, stored)
            num_new = self._num_new(request, num_found, budget)
            if num_new == 0:
                break
            if not self.kv.can_allocate(request, num_found - num_cached + num_new, cached):
                break
            self.waiting.admit(request)
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            self.kv.count_lookup(request, num_cached, stored)
            self._schedule(request, num_new, plan, cached, stored)
            budget -= num_new
        return budget

    def _schedule_drafts(self, plan: SchedulePlan) -> None:
        """Drafts get what nobody else wanted: never another request's blocks or budget."""
        if self.proposer is None:
            return
        budget = self.config.max_num_batched_tokens - plan.num_tokens
        for entry in plan.scheduled:
            request = entry.request
            if not entry.is_last_chunk or entry.num_new > 1:
                continue  # it has more to catch up with
            if request.forks_pending or request.suspended is not None:
                continue  # n sequences draw from one row; a suspended step goes on as it is
            count = min(budget, request.num_tokens_left - 1, self.config.num_speculative_tokens)
            while count > 0 and not self.kv.can_allocate(request, 1 + count):
                count -= 1
            if count > 0 and (count := self.proposer.num_drafts(request, count)):
                self.kv.allocate_drafts(entry, count)
                budget -= count

    def _resume_loaded(self) -> None:
        """Back to their place in the queue: requests whose wait for the disk is over."""
        self.kv.collect()
        for request in [r for r in self.loading if not self.kv.is_loading(r)]:
            self.loading.remove(request)
            self.waiting.resume(request)

    def _num_new(self, request: Request, computed: int, budget: int) -> int:
        if request.overwrites_kv:  # a prompt in one piece, then token by token
            whole = max(1, request.num_prompt_tokens - computed)
            return whole if whole <= budget else 0
        if not self.config.enable_chunked_prefill:  # one that no step has room for goes alone
            whole, most = request.num_tokens - computed, self.config.max_num_batched_tokens
            return whole if whole <= budget or budget == most else 0
        chunk = self.config.max_prefill_chunk or budget
        return min(request.num_tokens - computed, chunk, budget)

    def _schedule(
        self,
        request: Request,
        num_new: int,
        plan: SchedulePlan,
        cached: Sequence[int] = (),
        stored: TierHit | None = None,
    ) -> None:
        allocation = self.kv.allocate(request, num_new, cached, stored)
        start = request.num_computed_tokens
        plan.scheduled.append(ScheduledRequest(request, start, num_new, allocation))
        if self._events:
            span = (start, start + num_new)
            self._events.emit("scheduling", "request.scheduled", request.request_id, span)

    def _make_room(self, plan: SchedulePlan) -> None:
        """Let a strictly more important waiting request take seats and blocks of lesser ones.

        Nobody is thrown out in vain: all of the lesser ones together must be enough.
        """
        lesser = [request for request in self.running if self.waiting.outranks(request)]
        if not lesser:
            return
        head = self.waiting.head()
        cached = self.kv.find_cached(head)
        stored = self.kv.find_stored(head, cached)
        if stored is None:
            return  # not before its blocks are here
        num_found = self.kv.num_found(cached, stored)
        num_new = self._num_new(head, num_found, self.config.max_num_batched_tokens)
        num_new += num_found - len(cached) * self.kv.block_size

        def fits(without: list[Request]) -> bool:
            seats = self.seats_taken + _seats(head) - sum(_seats(r) for r in without)
            room = self.kv.can_allocate(head, num_new, cached, without)
            return seats <= self.config.max_num_seqs and room

        if fits(lesser):
            while not fits([]):
                victim = self.waiting.victim(lesser)
                lesser.remove(victim)
                self._preempt(victim, plan)

    def _preempt(self, request: Request, plan: SchedulePlan) -> int:
        """Back to the queue without blocks; returns the budget it had been given this step."""
        freed = 0
        for entry in plan.scheduled:
            if entry.request is request:
                self.kv.take_back(entry.allocation)
                freed = entry.num_new
        plan.scheduled = [entry for entry in plan.scheduled if entry.request is not request]
        plan.preempted.append(request)
        self.running.remove(request)
        self.kv.free(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens, request.suspended = 0, None
        request.drop_drafts()
        request.num_preemptions += 1
        request.group.metrics.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.put_back(request)
        if self._events:
            self._events.emit("scheduling", "request.preempted", request.request_id)
        return freed

    def advance(self, plan: SchedulePlan, steps: int = 1) -> None:
        """The step has been computed: the tokens it completed are in the cache.

        steps: a plan of decodes alone may have been computed so often, one token further each
        time (a simulator does that while nothing could change it).
        """
        self._step += steps - 1
        self._work += steps * plan.num_completed_tokens
        self.waiting.served(plan.scheduled, steps)
        for entry in plan.scheduled:
            if entry.completed:
                entry.request.num_computed_tokens = entry.end - entry.num_draft + steps - 1
                entry.allocation.computed = True
                self.kv.publish_computed(entry.request, entry.allocation)

    def keep_drafts(self, entry: ScheduledRequest, num_accepted: int) -> None:
        """The step's drafts have been judged: the first `num_accepted` are tokens now."""
        request = entry.request
        if self._events:
            span = (entry.end - entry.num_draft, entry.end)
            data = {"token_ids": list(request.draft_token_ids), "num_accepted": num_accepted}
            self._events.emit("decode", "draft.judged", request.request_id, span, **data)
        request.num_computed_tokens += num_accepted
        self.waiting.accepted(request, num_accepted)
        request.drop_drafts()
        self.kv.roll_back(request, entry.allocation)

    def take_back(self, plan: SchedulePlan) -> None:
        """The step was not computed: what it published must not be found."""
        for entry in plan.scheduled:
            self.kv.take_back(entry.allocation)

    def restart(self, requests: Iterable[Request]) -> None:
        """A step was interrupted, wherever it was: these requests, all there are, begin again.

        Interrupted inside of it, even the books may be wrong, so they are begun again as well. What
        was cached on the device is lost, what the tiers hold is not.
        """
        self.kv.pool.reset()
        self.running, self.loading, self.waiting = [], [], self._make_policy()
        for request in sorted(requests, key=lambda r: (r.arrival, r.index)):
            request.block_table, request.num_published_blocks = [], 0
            request.num_computed_tokens, request.suspended = 0, None
            request.drop_drafts()
            if request.status is RequestStatus.RUNNING:
                request.num_preemptions += 1
                if self._events:
                    self._events.emit("scheduling", "request.preempted", request.request_id)
            request.status = RequestStatus.WAITING
            self.kv.forget(request)
            self.waiting.add(request)


def _seats(request: Request) -> int:
    return 1 + request.forks_pending
