"""What the times mean. Definitions are those of `vllm bench serve` but for where a clock starts.

=========  ========================================================================================
TTFT       time to first token: from when the request was due to the first chunk with text (an
           answer without any: to its end). Due, not sent, see `generator.py`.
E2E        from when it was due to the last chunk.
TPOT       time per output token: (E2E − TTFT) ÷ (output tokens − 1), one value a request; none
           for an answer of one token.
ITL        inter-token latency: the gaps between chunks with text, all requests together. A chunk
           that holds several tokens is one gap and is not divided: its reader waited once and then
           got them all. So with several tokens a chunk ITL is larger than TPOT; `tokens_per_chunk`
           tells by how much.
goodput    completed requests that met every limit of the SLO, a second (Zhong et al., "DistServe",
           OSDI 2024); attainment: their share of all requests, where a failure meets none.
           Limits: ttft, tpot, e2e and max_itl (the longest gap of a request), in seconds; an
           answer that has no TPOT or gap meets that limit.
late       sent − due: how far this client fell behind.
=========  ========================================================================================

Percentiles interpolate between the two nearest values (type 7 of Hyndman and Fan, "Sample
Quantiles in Statistical Packages", 1996: numpy's default). Throughput divides by the seconds from
the start to the end of the last request. Failed requests count nowhere but in `failed`, in the
attainment and in those seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # so that percentiles need no HTTP client
    from minifer.perf.load.client import Record
    from minifer.perf.load.generator import LoadRun

LATENCIES = ("ttft", "tpot", "itl", "e2e", "late")
SLO_METRICS = ("ttft", "tpot", "e2e", "max_itl")
STATISTICS: Mapping[str, float | None] = {"mean": None, "p50": 50, "p90": 90, "p99": 99, "max": 100}


def percentile(values: Sequence[float], q: float) -> float:
    """The value that q percent of `values` are below. Raises `ValueError` for none, or a bad q."""
    if not values or not 0 <= q <= 100:
        raise ValueError(f"a percentile needs values and q in [0, 100], got {len(values)}, q={q}")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * q / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


# -- one request


def ttft(record: Record) -> float:
    first = record.chunk_times[0] if record.chunk_times else record.end
    return first - record.intended


def e2e(record: Record) -> float:
    return record.end - record.intended


def itl(record: Record) -> list[float]:
    return [later - earlier for earlier, later in pairwise(record.chunk_times)]


def num_output_tokens(record: Record) -> int:
    """The server's count; without one a chunk passes for a token."""
    return len(record.chunk_times) if record.output_tokens is None else record.output_tokens


def tpot(record: Record) -> float | None:
    count = num_output_tokens(record)
    return (e2e(record) - ttft(record)) / (count - 1) if count > 1 else None


def meets(record: Record, slo: Mapping[str, float]) -> bool:
    """Did it complete within every limit?"""
    values = {
        "ttft": ttft(record),
        "tpot": tpot(record) or 0.0,
        "e2e": e2e(record),
        "max_itl": max(itl(record), default=0.0),
    }
    return record.error is None and all(values[name] <= limit for name, limit in slo.items())


def parse_slo(limits: Sequence[str]) -> dict[str, float]:
    """["ttft=0.5", …] → {"ttft": 0.5, …}. Raises `ValueError` for another name or no number."""
    slo = {}
    for text in limits:
        name, _, number = text.partition("=")
        try:
            limit = float(number)
        except ValueError:
            limit = math.nan
        if name not in SLO_METRICS or not limit > 0:
            raise ValueError(
                f"slo must be NAME=SECONDS with one of {', '.join(SLO_METRICS)}, got {text!r}"
            )
        slo[name] = limit
    return slo


# -- all requests


def summarize(run: LoadRun, slo: Mapping[str, float] | None = None) -> dict[str, float]:
    """Every metric by name: the counts, the rates, and `ttft_p50` … in seconds.

    Raises `RuntimeError` when no request was completed: there is nothing to measure.
    """
    done = [record for record in run.records if record.error is None]
    if not done:
        said = next((record.detail for record in run.records if record.detail), "")
        kinds = ", ".join(f"{kind} ({count})" for kind, count in failures([run]).items())
        raise RuntimeError(f"none of {len(run.records)} requests was completed: {kinds} {said}")
    seconds = run.end - run.start
    tokens = sum(map(num_output_tokens, done))
    prompt = sum(record.prompt_tokens or 0 for record in done)
    out: dict[str, float] = {
        "seconds": seconds,
        "requests": len(run.records),
        "completed": len(done),
        "failed": len(run.records) - len(done),
        "max_in_flight": max(count for _, count in in_flight(run.records)),
        "prompt_tokens": prompt,
        "output_tokens": tokens,
        "request_throughput": len(done) / seconds,
        "output_throughput": tokens / seconds,
        "total_throughput": (prompt + tokens) / seconds,
    }
    if chunks := sum(len(record.chunk_times) for record in done):
        out["tokens_per_chunk"] = tokens / chunks
    cached = [record.cached_tokens for record in done if record.cached_tokens is not None]
    if cached and prompt:
        out["cached_share"] = sum(cached) / prompt
    if slo:
        good = sum(meets(record, slo) for record in done)
        out |= {"goodput": good / seconds, "slo_attainment": good / len(run.records)}
    for name, values in latencies(run).items():
        if values:
            out |= {f"{name}_{key}": _statistic(values, q) for key, q in STATISTICS.items()}
    return out


def latencies(run: LoadRun) -> dict[str, list[float]]:
    """Seconds of each of `LATENCIES`, of all completed requests (late: of all)."""
    done = [record for record in run.records if record.error is None]
    return {
        "ttft": [ttft(record) for record in done],
        "tpot": [value for record in done if (value := tpot(record)) is not None],
        "itl": [gap for record in done for gap in itl(record)],
        "e2e": [e2e(record) for record in done],
        "late": [record.sent - record.intended for record in run.records],
    }


def _statistic(values: Sequence[float], q: float | None) -> float:
    return math.fsum(values) / len(values) if q is None else percentile(values, q)


def failures(runs: Sequence[LoadRun]) -> dict[str, int]:
    """Kind of failure → requests, the most frequent first."""
    kinds = (r.error for run in runs for r in run.records if r.error is not None)
    return dict(Counter(kinds).most_common())


def in_flight(records: Sequence[Record]) -> list[tuple[float, int]]:
    """(time, requests in flight from then on), at every change. One that ends as another is sent
    has left before.
    """
    changes = [(r.end, -1) for r in records] + [(r.sent, 1) for r in records]
    steps: list[tuple[float, int]] = []
    count = 0
    for time, change in sorted(changes):
        count += change
        if steps and steps[-1][0] == time:
            steps[-1] = (time, count)
        else:
            steps.append((time, count))
    return steps


def to_dict(record: Record, start: float) -> dict[str, Any]:
    """JSON-ready; times in seconds after the start of the run."""
    return {
        "session": record.session,
        "turn": record.turn,
        "due": record.intended - start,
        "sent": record.sent - start,
        "ttft": ttft(record) if record.error is None else None,
        "tpot": tpot(record) if record.error is None else None,
        "itl": itl(record),
        "e2e": e2e(record),
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "cached_tokens": record.cached_tokens,
        "finish_reason": record.finish_reason,
        "error": record.error,
        "detail": record.detail or None,
    }
