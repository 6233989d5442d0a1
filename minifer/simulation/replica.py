"""One node: the engine's scheduler and KV manager, with a stop-watch in place of the model.

A step is planned when the one before it ends; its seconds come from `StepTimes`, and nothing is
computed. A plan that nothing can change is not made again: while everybody decodes inside of a
block and nobody can be let in, the next steps differ in their times alone, so many of them are one
event::

    schedule     |              |            |
    steps        | prefill + …  | d d d d d d | d d …
    event                       ^             ^    a request ends, a block is full, somebody comes

If somebody comes in the middle of such a stretch, it is cut after the step that runs.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import cast

from minifer.events import EventBus
from minifer.kv.manager import Allocation, KVCacheManager
from minifer.kv.tiers.tiers import KVTiers
from minifer.request import Request
from minifer.routing.policy import ReplicaState
from minifer.scheduling.plan import SchedulePlan
from minifer.scheduling.policies import Measure
from minifer.scheduling.scheduler import Scheduler
from minifer.simulation.backlog import Backlog
from minifer.simulation.cluster import NodeSpec
from minifer.simulation.result import NodeRecord, RequestRecord
from minifer.simulation.sim_request import SimRequest
from minifer.simulation.store import LevelState, NodeStore

MAX_STRETCH = 64  # steps that one event may stand for; longer ones are mostly cut


class Replica:
    """A node at work. Times are seconds on the simulation's clock.

    levels: of its store. kv_bytes: of a token. start_load: see `NodeStore`. coast: let one event
    stand for many equal steps; the result is the same. events: what scheduler and KV manager say.
    """

    def __init__(
        self,
        spec: NodeSpec,
        levels: Sequence[LevelState] = (),
        kv_bytes: float = 0.0,
        start_load: Callable[[SimRequest, float], None] | None = None,
        *,
        coast: bool = True,
        events: EventBus | None = None,
    ) -> None:
        config = spec.engine
        self.spec = spec
        self.record = NodeRecord(spec.name, spec.role)
        self.store = NodeStore(levels, config.block_size, kv_bytes, start_load)
        self.kv = KVCacheManager(
            config.num_kv_blocks or 0,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            index=config.prefix_index,
            events=events,
            tiers=cast(KVTiers, self.store),
        )
        measure = None if spec.in_tokens else Measure(self._left, _arrived)
        self.scheduler = Scheduler(config, self.kv, events, measure=measure)
        self.plan: SchedulePlan | None = None  # of the step that runs
        self.sending_until = 0.0  # its link is busy
        self.loading_until = 0.0  # so is its store, where it prefetches
        self.first_tokens: list[RequestRecord] = []  # of the last step
        self._backlog = Backlog(self._compute_seconds)
        self._num_requests = 0
        self._coming: list[SimRequest] = []  # since the last step was planned
        self._coast = coast
        self._started = 0.0
        self._ends = array("d")  # of the step, and of those that repeat it
        self._used_blocks = 0
        self._num_published = 0
        self._block_seconds = 0.0

    # -- requests come and go

    def reusable(self, request: SimRequest) -> tuple[int, float]:
        """Leading tokens that need not be computed, and the seconds it takes to load them."""
        keys = request.prefix_keys[: (request.num_tokens - 1) // self.kv.block_size]
        cached = len(self.kv.pool.index.match(keys)) if keys else 0
        hit = self.store.find(request, keys[cached:])
        return cached * self.kv.block_size + hit.tokens, hit.seconds

    def alone(self, request: SimRequest) -> float:
        """Seconds to the first token of a request that has this node to itself."""
        reused, load = self.reusable(request)
        return load + self._compute_seconds(request, reused)

    def _left(self, request: Request) -> float:
        """Seconds before the next token of a request that waits, or that has begun."""
        sim, computed = cast(SimRequest, request), request.num_computed_tokens
        return self._compute_seconds(sim, computed) if computed else self.alone(sim)

    def _compute_seconds(self, request: SimRequest, computed: int) -> float:
        total = request.num_tokens
        return self.spec.step_times.seconds([(total - computed, total)])

    def add(self, request: SimRequest) -> None:
        """A request comes; one that was sent here has been expected. The scheduler hears of it
        between two steps, as an engine's does: after what the step before has changed."""
        request.record.path += (self.spec.name,)
        if not request.received:
            self.expect()
            self._forecast(request)
        self._coming.append(request)

    def _forecast(self, request: SimRequest) -> None:
        reused, load = self.reusable(request)
        seconds = load + self._compute_seconds(request, reused)
        self._backlog.put(request, request.num_tokens - reused, seconds)

    def finish(self, request: SimRequest, hold: bool = False) -> list[int]:
        """Take a request out; hold: keep its blocks until `let_go`, and return them."""
        held = list(request.block_table) if hold else []
        self.kv.pool.acquire(held)
        self.scheduler.finish(request)
        self._num_requests -= 1
        return held

    def expect(self) -> None:
        """Count a request that is on its way here."""
        self._num_requests += 1

    def let_go(self, held: Sequence[int]) -> None:
        """Blocks that were kept are free."""
        self.kv.pool.release(reversed(held))

    def look(self, now: float) -> ReplicaState:
        """How the router sees this node now."""
        backlog, pool = self._backlog, self.kv.pool
        used = pool.num_blocks - pool.num_free
        return ReplicaState(
            self.spec.name,
            self.spec.role,
            self._num_requests,
            backlog.tokens,
            backlog.seconds(now, now if self.plan is None else self.ends_at),
            max(0, used - backlog.num_blocks),
            used / pool.num_blocks,
        )

    # -- steps

    def begin(self, now: float) -> float | None:
        """Plan the next step; says when it, and those that repeat it, are over. None: idle."""
        scheduler = self.scheduler
        for request in self._coming:
            scheduler.add(request)
        self._coming.clear()
        if not (scheduler.running or scheduler.waiting or scheduler.loading):
            return None
        had = len(scheduler.running)
        plan = scheduler.schedule()
        for preempted in plan.preempted:
            self._preempted(cast(SimRequest, preempted))
        if not plan:
            return None
        self.plan, self._started = plan, now
        self._backlog.begin(plan.scheduled, now)
        times = self.spec.step_times
        chunks = [(entry.num_new, entry.start + entry.num_new) for entry in plan.scheduled]
        self._num_published += sum(len(entry.allocation.published) for entry in plan.scheduled)
        now += times.seconds(chunks) + self.store.step_seconds
        self.record.load_seconds += self.store.step_seconds
        self.store.step_seconds = 0.0
        self._ends = array("d", (now,))
        # Whoever was admitted, or got a first token, is one more that decodes in the next step.
        changes = len(scheduler.running) > had or self._backlog.shrinks
        for ahead in range(1, 1 if changes else self._stretch(plan)):
            now += times.seconds([(1, context + ahead) for _, context in chunks])
            self._ends.append(now)
        self._used_blocks = self.kv.pool.num_blocks - self.kv.pool.num_free
        return now

    def _preempted(self, request: SimRequest) -> None:
        request.record.num_preemptions += 1
        self.record.num_preemptions += 1
        if request in self._backlog:
            self._forecast(request)

    def _stretch(self, plan: SchedulePlan) -> int:
        """How many steps in a row have this plan, apart from their contexts."""
        scheduler, P = self.scheduler, self.kv.block_size
        waiting = scheduler.waiting
        if not self._coast or plan.preempted or (waiting and not waiting.steady):
            return 1
        if len(plan.scheduled) < len(scheduler.running):
            return 1
        steps = MAX_STRETCH
        for entry in plan.scheduled:
            if entry.num_new > 1 or not entry.is_last_chunk:
                return 1
            request = cast(SimRequest, entry.request)
            inside = P - 1 - entry.start % P  # before the step that fills the block
            steps = min(steps, inside, request.goal - request.num_tokens)
        return max(1, steps)

    def cut(self, now: float) -> float | None:
        """Somebody came: end the stretch with the step that runs now; says when, if sooner."""
        steps = bisect_left(self._ends, now) + 1
        if self.plan is None or steps >= len(self._ends):
            return None
        del self._ends[steps:]
        return self._ends[-1]

    def cut_before(self, now: float) -> float | None:
        """End the stretch with the last step that was over by then, if there is one; says when."""
        steps = 0 if self.plan is None else bisect_right(self._ends, now)
        if not steps:
            return None
        del self._ends[steps:]
        return self._ends[-1]

    @property
    def ends_at(self) -> float:
        """When the step that runs, and those that repeat it, will be over."""
        return self._ends[-1]

    def end(self, now: float) -> list[SimRequest]:
        """The step is over. Returns who has all the tokens that it gets here; see `finish`."""
        plan, ends = self.plan, self._ends
        assert plan is not None  # between `begin` and here
        steps, self.plan = len(ends), None
        self.scheduler.advance(plan, steps)
        self._count(plan, steps, now)
        self._backlog.end()
        done = []
        self.first_tokens = []
        for entry in plan.scheduled:
            if self.store.keeps:
                self._store(entry.allocation)
            if not entry.is_last_chunk:
                continue
            request = cast(SimRequest, entry.request)
            request.num_tokens += steps
            request.record.token_times.extend(ends)
            if request.record.first_token is None:
                request.record.first_token = ends[0]
                self.first_tokens.append(request.record)
            if request.num_tokens >= request.goal:
                done.append(request)
        return done

    def _count(self, plan: SchedulePlan, steps: int, now: float) -> None:
        record, seconds = self.record, now - self._started
        record.num_steps += steps
        record.busy_seconds += seconds
        self._block_seconds += self._used_blocks * seconds
        usage = self._used_blocks / self.kv.pool.num_blocks
        record.peak_kv_usage = max(record.peak_kv_usage, usage)
        if steps > 1:
            record.decode_tokens += steps * len(plan.scheduled)
            return
        counts = plan.counts
        record.decode_tokens += counts["num_decode_tokens"]
        record.prefill_tokens += counts["num_prefill_tokens"]

    def _store(self, done: Allocation) -> None:
        blocks = self.kv.pool.blocks
        if done.hits or done.published:
            self.store.store([blocks[block] for block in (*done.hits, *done.published)])

    def close(self, seconds: float) -> NodeRecord:
        """What this node did in a run of so many seconds."""
        blocks = self.kv.pool.blocks
        published = sum(block.key is not None for block in blocks)
        self.record.num_evictions = self._num_published - published
        if seconds:
            self.record.mean_kv_usage = self._block_seconds / (seconds * len(blocks))
        return self.record


def _arrived(request: Request) -> float:
    return cast(SimRequest, request).record.arrived
