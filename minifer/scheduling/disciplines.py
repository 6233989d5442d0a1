"""Orders from queueing theory and from papers: who is next when requests differ in length.

=======  ==================================================  =======================================
`sjf`    the shortest prefill first, then to its end         starves the long without ageing
`srpt`   the shortest remaining prefill, asked every step    the same; the best mean there is
`mlfq`   who has had least so far, in levels                 asks for no lengths; does work twice
`vtc`    the tenant that has had least so far                fair to tenants, whatever they send
=======  ==================================================  =======================================

What a prompt costs is known when it comes, and what its answer costs is not: the first two order
prefills alone. Whoever decodes goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from minifer.request import Request
from minifer.scheduling.plan import ScheduledRequest
from minifer.scheduling.policies import FCFS, Measure, Policy, Ranked


class ShortestFirst(Ranked):
    """The least prefill left first; waiting counts.

    ageing: work that is forgiven for waiting, as a share of what the engine does meanwhile. All
    wait at the same speed, so the order by (left − ageing · waited) is the order by (left + ageing
    · arrived), which never changes while a request waits. A request with a prefill of W waits for
    nobody who comes more than W / ageing of work later. With 0, long prompts wait as long as
    shorter ones keep coming.

    in_chunks: compare running prefills too, every step (SRPT): a short prompt gets its tokens
    before the next chunk of a long one. Else (SJF) what has begun goes on. Memory is never taken
    from a running request for a waiting one. When there is too little, who has the most left gives
    up its blocks.
    """

    def __init__(self, measure: Measure, ageing: float, in_chunks: bool) -> None:
        super().__init__()
        self.reorders = in_chunks
        self._measure, self._ageing = measure, ageing

    def rank(self, request: Request) -> float:
        rank = self._measure.left(request)
        return rank + self._ageing * self._measure.arrived(request) if self._ageing else rank

    def order(self, running: Sequence[Request]) -> Sequence[Request]:
        """Decodes in the order in which they began, then prefills by rank."""
        running = super().order(running)
        if not self.reorders:
            return running
        prefills = [request for request in running if _prefills(request)]
        if not prefills:
            return running
        prefills.sort(key=lambda request: (self.rank(request), request.arrival))
        return [request for request in running if not _prefills(request)] + prefills

    def overtakes(self, running: Request) -> bool:
        head = self._heap[0]
        mine = (self.rank(running), running.arrival)
        return _prefills(running) and head[:2] < mine

    def victim(self, running: Sequence[Request]) -> Request:
        return max(running, key=lambda r: (_prefills(r), self.rank(r), r.arrival, r.index))


def _prefills(request: Request) -> bool:
    """Is it more than its newest token behind?"""
    return request.num_tokens - request.num_computed_tokens > 1 and request.suspended is None


@dataclass
class _Turn:
    """Where a request stands in `SkipJoinMLFQ`. left: tokens of its quantum. furthest: tokens that
    were charged: what a preemption made it compute again is not. since: step it began to wait."""

    level: int
    left: int
    furthest: int = 0
    since: int = 0


class SkipJoinMLFQ(Policy):
    """Levels of growing quanta (FastServe, https://arxiv.org/abs/2305.05920).

    Level i has a quantum of `quantum` · 2^i tokens. A request joins the first level whose quantum
    covers its prompt: it would fall through those above without an answer ("skip-join"). Each token
    that is computed for it uses its quantum up; then it falls to the next level. Lower levels go
    first, and take seats and blocks of higher ones. So a short answer is not held up by long ones,
    and nobody has to know which is which. In the last level it is first come, first served.

    The price is work done twice: here a request that gives up its place computes its tokens again,
    as far as the prefix cache has lost them (FastServe swaps them to the host's memory).

    left: tokens before a request's next one. starvation_steps: whoever waits longer is lifted to
    level 0; it waits a quarter more at most. None: never, and then long requests may starve.
    """

    LEVELS = 12
    steady, reorders = False, True

    def __init__(
        self, left: Callable[[Request], int], quantum: int, starvation_steps: int | None
    ) -> None:
        self._left, self._quantum, self._starving = left, quantum, starvation_steps
        self._levels = [FCFS() for _ in range(self.LEVELS)]
        self._turns: WeakKeyDictionary[Request, _Turn] = WeakKeyDictionary()
        self._now = self._looked = 0  # steps

    def _queue(self, request: Request) -> FCFS:
        return self._levels[self._turns[request].level]

    def add(self, request: Request) -> None:
        level, needed = 0, self._left(request)
        while self._quantum << level < needed and level < self.LEVELS - 1:
            level += 1
        self._turns[request] = _Turn(level, self._quantum << level, since=self._now)
        self._queue(request).add(request)

    def put_back(self, request: Request) -> None:
        self._turn(request).since = self._now
        self._queue(request).put_back(request)

    def resume(self, request: Request) -> None:
        self._queue(request).resume(request)

    def remove(self, request: Request) -> None:
        self._queue(request).remove(request)

    def head(self) -> Request:
        return next(queue for queue in self._levels if queue).head()

    def order(self, running: Sequence[Request]) -> Sequence[Request]:
        return sorted(running, key=lambda r: (r.suspended is None, self._level(r)))

    def outranks(self, running: Request) -> bool:
        return self._level(self.head()) < self._level(running)

    overtakes = outranks

    def victim(self, running: Sequence[Request]) -> Request:
        return max(running, key=lambda r: (self._level(r), r.arrival, r.index))

    def served(self, entries: Sequence[ScheduledRequest], steps: int) -> None:
        self._now += steps
        for entry in entries:
            if entry.completed:
                end = entry.end - entry.num_draft + steps - 1
                self._charge(self._turn(entry.request), entry.start, end)
        if self._starving is not None and self._now - self._looked > self._starving // 4:
            self._looked = self._now
            self._lift(self._starving)

    def accepted(self, request: Request, num_drafts: int) -> None:
        turn = self._turn(request)
        self._charge(turn, turn.furthest, turn.furthest + num_drafts)

    def _charge(self, turn: _Turn, start: int, end: int) -> None:
        turn.left -= max(0, end - max(start, turn.furthest))
        turn.furthest = max(end, turn.furthest)
        while turn.left <= 0 and turn.level < self.LEVELS - 1:
            turn.level += 1
            turn.left += self._quantum << turn.level

    def _lift(self, starving: int) -> None:
        """Whoever has waited for longer starts again at the top."""
        for queue in self._levels[1:]:
            for request in [r for r in queue if self._turns[r].since + starving <= self._now]:
                queue.remove(request)
                turn = self._turns[request]
                turn.level, turn.left, turn.since = 0, self._quantum, self._now
                self._levels[0].add(request)

    def _turn(self, request: Request) -> _Turn:
        """A fork goes on where its parent was born: at the level of its own length."""
        if request not in self._turns:
            self._turns[request] = _Turn(0, self._quantum)
        return self._turns[request]

    def _level(self, request: Request) -> int:
        return self._turn(request).level

    def __len__(self) -> int:
        return sum(map(len, self._levels))

    def __iter__(self) -> Iterator[Request]:
        return (request for queue in self._levels for request in queue)


class VirtualTokenCounter(Policy):
    """Fair shares for tenants (VTC, OSDI '24, https://arxiv.org/abs/2401.00588).

    Every tenant has a counter: of its prompts' tokens, when they are admitted, and of its answers',
    twice, as they come. The next request is the oldest one of the waiting tenant with the smallest
    counter. Two tenants that have requests waiting differ by 2 · max(W_IN · longest prompt, W_OUT ·
    tokens of the KV cache) at most, whatever they send. A tenant that comes back is lifted to the
    others: who was away has no credit. Inside of a tenant it is first come, first served.

    One who sends little waits for others' requests that run, and for nobody's queue. Nobody
    starves: the others' counters rise.
    """

    W_IN, W_OUT = 1, 2  # the paper's: a token of an answer costs about twice one of a prompt
    MOST_IDLE = 1000  # tenants to remember that have nothing waiting

    steady = False

    def __init__(self) -> None:
        self._queues: dict[str, FCFS] = {}  # of tenants with requests waiting
        self.counters: dict[str, int] = {}
        self._last = ""  # the tenant whose queue was the last to become empty

    def add(self, request: Request) -> None:
        self._queue(request).add(request)

    def put_back(self, request: Request) -> None:
        self._queue(request).put_back(request)

    def resume(self, request: Request) -> None:
        self._queue(request).resume(request)

    def _queue(self, request: Request) -> FCFS:
        tenant = request.params.tenant
        if tenant not in self._queues:
            lift = self._floor()
            self._forget(lift)
            self.counters[tenant] = max(self.counters.get(tenant, 0), lift)
            self._queues[tenant] = FCFS()
        return self._queues[tenant]

    def _floor(self) -> int:
        if not self._queues:
            return self.counters.get(self._last, 0)
        return min(self.counters[tenant] for tenant in self._queues)

    def _forget(self, lift: int) -> None:
        """Counters below the level that all are lifted to say nothing."""
        if len(self.counters) > len(self._queues) + self.MOST_IDLE:
            known = self.counters.items()
            self.counters = {t: c for t, c in known if t in self._queues or c >= lift}

    def remove(self, request: Request) -> None:
        tenant = request.params.tenant
        self._queues[tenant].remove(request)
        if not self._queues[tenant]:
            del self._queues[tenant]
            self._last = tenant

    def admit(self, request: Request) -> None:
        self.remove(request)
        if not request.num_preemptions:
            self.counters[request.params.tenant] += self.W_IN * request.num_prompt_tokens

    def head(self) -> Request:
        tenant = min(self._queues, key=lambda t: (self.counters[t], self._queues[t].head().arrival))
        return self._queues[tenant].head()

    def served(self, entries: Sequence[ScheduledRequest], steps: int) -> None:
        for entry in entries:
            if entry.is_last_chunk and entry.completed:  # a token follows, for each of n sequences
                self.accepted(entry.request, steps + entry.request.forks_pending)

    def accepted(self, request: Request, num_drafts: int) -> None:
        tenant = request.params.tenant
        self.counters[tenant] = self.counters.get(tenant, 0) + self.W_OUT * num_drafts

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Request]:
        return (request for queue in self._queues.values() for request in queue)
