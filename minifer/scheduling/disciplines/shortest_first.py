"""`sjf` and `srpt`: the shortest prefill first."""

from __future__ import annotations

from collections.abc import Sequence

from minifer.request import Request
from minifer.scheduling.policies import Measure, Ranked


class ShortestFirst(Ranked):
    """The least prefill left first; waiting counts.

    ageing: tokens of prefill that are forgiven for each one computed meanwhile, whoever it was for
    (or seconds for seconds). Everybody who waits sees the same work done, so the order by
    (left − ageing · waited) is the order by (left + ageing · arrived), which never changes while a
    request waits. A request with a prefill of W waits for nobody who comes more than W / ageing of
    work later. With 0, long prompts wait as long as shorter ones keep coming.

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
