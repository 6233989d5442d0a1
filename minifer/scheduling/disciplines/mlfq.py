"""`mlfq`: whoever has had least so far, in levels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from minifer.request import Request
from minifer.scheduling.plan import ScheduledRequest
from minifer.scheduling.policies import FCFS, Policy


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
        self._now = 0  # steps

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
        if self._starving is not None:
            every = max(1, self._starving // 4)
            if self._now % every < steps:  # a multiple of it is among these steps
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
