"""`vtc`: the tenant that has had least so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from minifer.request import Request
from minifer.scheduling.plan import ScheduledRequest
from minifer.scheduling.policies import FCFS, Policy


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
