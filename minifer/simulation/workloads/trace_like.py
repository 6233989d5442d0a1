"""Traffic with the published statistics of a real trace: its lengths, bursts and reuse."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

from minifer.simulation.workloads.arrivals import Arrival
from minifer.simulation.workloads.generator import block_names, geometric, open_loop
from minifer.simulation.workloads.lengths import Lengths
from minifer.simulation.workloads.published import Reuse, TraceStatistics

_SETTLE = 1_800.0  # seconds after which sessions of all ages are under way


def like(
    trace: TraceStatistics, count: int, *, rate: float | None = None, seed: int = 0
) -> list[Arrival]:
    """`count` requests with a trace's lengths, bursts and reuse.

    rate: another than the trace's own plays it faster or slower, as one replays a trace. With
    reuse, a session's prompts are drawn like all others and then sorted: a session grows, and the
    distribution of lengths over all requests stays what it is. Each prompt begins with the full
    blocks of the one before; what the answer adds to the next prompt is part of its length. The
    first requests may belong to sessions that began before, as in a trace.
    """
    rate = trace.rate if rate is None else rate
    if trace.reuse is None:
        return open_loop(trace.lengths, count, rate, cv=trace.cv, seed=seed)
    if not rate > 0:
        raise ValueError(f"rate must be above 0, got {rate}")
    stream = _in_time(_sessions_like(trace, trace.reuse, seed))
    settled = itertools.dropwhile(lambda row: row.time < _SETTLE, stream)
    rows = list(itertools.islice(settled, count))
    stretch = trace.rate / rate
    return [
        replace(row, request_id=f"r{i}", time=(row.time - rows[0].time) * stretch)
        for i, row in enumerate(rows)
    ]


def _sessions_like(trace: TraceStatistics, reuse: Reuse, seed: int) -> Iterator[list[Arrival]]:
    """Sessions without end, in the order they begin."""
    starts, rng, gaps = (
        random.Random(f"{seed}/{name}") for name in ("arrivals", "lengths", "gaps")
    )
    turns = geometric(reuse.requests_per_session, random.Random(f"{seed}/turns"))
    every, shape = reuse.requests_per_session / trace.rate, 1 / trace.cv**2
    time = 0.0
    for session in itertools.count():
        time += starts.gammavariate(shape, every / shape)
        now, rows = time, []
        for turn, (prompt, output) in enumerate(_similar(trace.lengths, reuse, next(turns), rng)):
            now += reuse.gap.draw(gaps) if turn else 0.0
            names = block_names(session, prompt, reuse.shared_blocks)
            rows.append(Arrival("", now, prompt, output, names, session=session, turn=turn))
        yield rows


def _in_time(sessions: Iterable[list[Arrival]]) -> Iterator[Arrival]:
    """The requests of sessions that come in the order of their first ones, by time."""
    waiting: list[tuple[float, int, int, Arrival]] = []
    for rows in sessions:
        while waiting and waiting[0][0] <= rows[0].time:
            yield heapq.heappop(waiting)[-1]
        for row in rows:
            heapq.heappush(waiting, (row.time, row.session, row.turn, row))


def _similar(
    lengths: Lengths, reuse: Reuse, count: int, rng: random.Random
) -> list[tuple[int, int]]:
    """The pairs of one session, by prompt length: their normal scores share a part."""
    common, own = math.sqrt(reuse.similarity), math.sqrt(1 - reuse.similarity)
    together = rng.gauss(0.0, 1.0)
    scores = (common * together + own * rng.gauss(0.0, 1.0) for _ in range(count))
    return sorted(lengths.pair(z, rng.gauss(0.0, 1.0)) for z in scores)
