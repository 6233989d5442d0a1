"""Who is next, and who goes first when memory runs out.

A policy is a waiting queue and a choice of victim. The scheduler asks for the head, admits or
leaves it, and never looks further: a request that does not fit is not overtaken.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from minifer.request import Request
from minifer.scheduling.plan import ScheduledRequest

LPM_LIMIT = 128  # SGLang: with more waiting, sorting by prefix costs more than it saves


@dataclass(frozen=True)
class Measure:
    """left: work before a request's next token. arrived: when it came, on a clock that counts the
    work done meanwhile. Both in tokens, or both in seconds."""

    left: Callable[[Request], float]
    arrived: Callable[[Request], float]


class Policy(Protocol):
    """A queue of waiting requests with an opinion.

    steady: the order changes only when requests come or go, not with every step. reorders: it
    wants to be asked whether the head of the queue may overtake running requests.
    """

    steady: bool = True
    reorders: bool = False

    def add(self, request: Request) -> None: ...

    def put_back(self, request: Request) -> None:
        """Return a preempted request."""
        ...

    def resume(self, request: Request) -> None:
        """Return a request that stepped aside to its place in line."""
        ...

    def head(self) -> Request: ...

    def remove(self, request: Request) -> None: ...

    def admit(self, request: Request) -> None:
        """Remove a request because it runs from now on."""
        self.remove(request)

    def order(self, running: Sequence[Request]) -> Sequence[Request]:
        """In which order the running requests get their tokens.

        Those in the middle of their loops first: they have their share of the budget already.
        """
        return sorted(running, key=lambda request: request.suspended is None)

    def victim(self, running: Sequence[Request]) -> Request:
        """Who of the running gives up its blocks."""
        return running[-1]

    def outranks(self, running: Request) -> bool:
        """May the head of the queue take the place of `running`?"""
        return False

    def overtakes(self, running: Request) -> bool:
        """May the head of the queue get its tokens before `running`, if there is room for both?"""
        return False

    def served(self, entries: Sequence[ScheduledRequest], steps: int) -> None:
        """So much has been computed, in so many equal steps."""
        return  # most do not care

    def accepted(self, request: Request, num_drafts: int) -> None:
        """So many drafts have become tokens, beside the one that `served` told of."""
        return

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FCFS(Policy):
    """First come, first served. The last to start running is the first to be preempted."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self._queue.append(request)

    def put_back(self, request: Request) -> None:
        self._queue.appendleft(request)

    def resume(self, request: Request) -> None:
        before = takewhile(lambda other: other.arrival < request.arrival, self._queue)
        self._queue.insert(sum(1 for _ in before), request)

    def head(self) -> Request:
        return self._queue[0]

    def remove(self, request: Request) -> None:
        if self._queue and self._queue[0] is request:
            self._queue.popleft()
        else:
            self._queue.remove(request)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)


class Ranked(Policy):
    """The smallest rank first, then the oldest. The rank of a waiting request never changes."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, float, int, Request]] = []
        self._count = 0

    @abstractmethod
    def rank(self, request: Request) -> float:
        """Its place in line: of a waiting request it may not change."""

    def add(self, request: Request) -> None:
        self._count += 1
        item = (self.rank(request), request.arrival, self._count, request)
        heapq.heappush(self._heap, item)

    put_back = resume = add

    def head(self) -> Request:
        return self._heap[0][-1]

    def remove(self, request: Request) -> None:
        if self._heap[0][-1] is request:
            heapq.heappop(self._heap)
        else:
            self._heap = [item for item in self._heap if item[-1] is not request]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (item[-1] for item in sorted(self._heap, key=lambda item: item[:3]))


class Priority(Ranked):
    """The smallest `priority` first, then the oldest; waiting counts.

    ageing_steps: steps of waiting worth one priority level, None for no ageing. All wait at the
    same speed, so the order by (priority − waited / ageing_steps) is the order by
    (priority · ageing_steps + arrival), which never changes: a heap needs no re-sorting.

    A waiting request may take the place of the least important running one when its plain
    priority is strictly better and it also stands before it in the queue's order. Both, or the
    two would take the place from each other for ever once the running one has aged.
    """

    def __init__(self, ageing_steps: int | None = None) -> None:
        super().__init__()
        self._ageing = ageing_steps

    def rank(self, request: Request) -> float:
        priority = request.params.priority
        return priority if self._ageing is None else priority * self._ageing + request.arrival_step

    def victim(self, running: Sequence[Request]) -> Request:
        return max(running, key=lambda r: (r.params.priority, r.arrival, r.index))

    def outranks(self, running: Request) -> bool:
        waiting = self.head()
        if waiting.params.priority >= running.params.priority:
            return False
        return (self.rank(waiting), waiting.arrival) < (self.rank(running), running.arrival)


class LongestPrefixFirst(FCFS):
    """The longest cached prefix first (SGLang's `lpm`), so that hits come before evictions.

    Falls back to first come, first served while more than `LPM_LIMIT` requests wait. It starves
    requests without a prefix as long as others with one keep coming. Each step with a seat free
    looks up all of those who wait, about a microsecond each where nothing is cached; the other
    policies ask for one.

    cached_tokens: length of a request's cached prefix in tokens.
    """

    def __init__(self, cached_tokens: Callable[[Request], int]) -> None:
        super().__init__()
        self._cached_tokens = cached_tokens

    def head(self) -> Request:
        if len(self._queue) > LPM_LIMIT:
            return self._queue[0]
        return max(self._queue, key=self._cached_tokens)  # the earliest among equals
