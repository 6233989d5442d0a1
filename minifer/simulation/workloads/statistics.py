"""What a workload is like: the figures by which one recognises another of its kind."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from minifer.perf.load.metrics import percentile
from minifer.simulation.workloads.arrivals import BLOCK, Arrival, Conversation, Workload

COLD, WARM = 0.10, 0.50  # shares of a prompt's blocks at most, at least, found in a full cache


@dataclass(frozen=True)
class LengthStatistics:
    """Tokens. mu, sigma: mean and deviation of the natural logarithm."""

    mean: float
    p50: float
    p90: float
    p99: float
    mu: float
    sigma: float

    @classmethod
    def of(cls, lengths: Sequence[int]) -> LengthStatistics:
        logs = [math.log(length) for length in lengths]
        p50, p90, p99 = (percentile(lengths, q) for q in (50, 90, 99))
        return cls(
            statistics.fmean(lengths),
            p50,
            p90,
            p99,
            statistics.fmean(logs),
            statistics.pstdev(logs),
        )


@dataclass(frozen=True)
class WorkloadStatistics:
    """seconds: from the first to the last arrival; of conversations, of their first turns only.

    num_arrivals: requests, or first turns where the others wait for answers. rate: arrivals a
    second in them, infinity where all come at once. cv: coefficient of variation of their gaps.
    correlation: of prompt and output lengths; log_correlation: of their logarithms.
    bound: share of prompt blocks, the last one included, that a cache without limit would find;
    token_bound: the same by tokens. cold, warm: shares of requests of whose prompt blocks it finds
    at most 10 %, at least 50 %. stored: share of prompt tokens that `Arrival.stored_len` names.
    """

    num_requests: int
    num_sessions: int
    num_arrivals: int
    seconds: float
    rate: float
    cv: float
    prompt: LengthStatistics
    output: LengthStatistics
    correlation: float
    log_correlation: float
    bound: float
    token_bound: float
    cold: float
    warm: float
    stored: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; infinity is null."""
        return {**asdict(self), "rate": self.rate if math.isfinite(self.rate) else None}


def describe(workload: Workload) -> WorkloadStatistics:
    """Raises `ValueError` for a workload without requests."""
    if not workload:
        raise ValueError("the workload must hold at least one request, got none")
    requests = list(requests_of(workload))
    times = sorted(w.turns[0].time if isinstance(w, Conversation) else w.time for w in workload)
    seconds = times[-1] - times[0]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = statistics.fmean(gaps) if gaps else 0.0
    prompts = [request.prompt_len for request in requests]
    outputs = [request.output_len for request in requests]
    found = blocks_found(requests)
    shares = [
        hit / num_blocks(request.prompt_len) for hit, request in zip(found, requests, strict=True)
    ]
    return WorkloadStatistics(
        num_requests=len(requests),
        num_sessions=len({request.session for request in requests}),
        num_arrivals=len(times),
        seconds=seconds,
        rate=len(gaps) / seconds if seconds else math.inf,
        cv=statistics.pstdev(gaps) / mean if mean else 0.0,
        prompt=LengthStatistics.of(prompts),
        output=LengthStatistics.of(outputs),
        correlation=_correlation(prompts, outputs),
        log_correlation=_correlation(list(map(math.log, prompts)), list(map(math.log, outputs))),
        bound=sum(found) / sum(map(num_blocks, prompts)),
        token_bound=sum(found) * BLOCK / sum(prompts),
        cold=sum(share <= COLD for share in shares) / len(shares),
        warm=sum(share >= WARM for share in shares) / len(shares),
        stored=sum(request.stored_len for request in requests) / sum(prompts),
    )


def num_blocks(prompt_len: int) -> int:
    """Blocks of a prompt, one that is not full included."""
    return -(-prompt_len // BLOCK)


def requests_of(workload: Workload) -> Iterable[Arrival]:
    """All requests, those of a conversation one after the other, in the order of the workload."""
    return (request for request, _ in with_waits(workload))


def with_waits(workload: Workload) -> Iterator[tuple[Arrival, bool]]:
    """The same, each with whether it waits for the answer before it."""
    for item in workload:
        for turn in item.turns if isinstance(item, Conversation) else (item,):
            yield turn, isinstance(item, Conversation) and turn is not item.turns[0]


def blocks_found(requests: Iterable[Arrival]) -> list[int]:
    """Leading blocks of each prompt that occurred before, in the order given: what a cache that
    never forgets would find."""
    seen: set[int] = set()
    found = []
    for request in requests:
        hit = 0
        for name in request.block_names:
            if name not in seen:
                break
            hit += 1
        seen.update(request.block_names)
        found.append(hit)
    return found


def _correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Pearson's; 0 where one of them does not vary."""
    return statistics.correlation(x, y) if len(set(x)) > 1 and len(set(y)) > 1 else 0.0
