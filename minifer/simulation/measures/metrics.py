"""What a simulated run was worth, and whether its figures mean anything.

===============  ==================================================================================
TTFT             arrival to first token: of all, of cold and of warm requests. Cold is what had to
                 compute more than half of its prompt (`COLD_SHARE`).
ITL, max ITL     gaps between tokens: of all requests together, and the longest of each. A P99 over
                 tokens hides one long gap a request.
TPOT             mean time a token after the first, of each request
E2E              arrival to last token
goodput          requests that met every limit of the SLO, a second; attainment: their share. One
                 that was rejected, or had not ended with the run, met none (a system that drops
                 requests must not look better for it; Wang et al., arXiv 2410.14257).
hit rate         prompt tokens that were not computed, of all prompt tokens
starvation age   longest time that a request waited for its first step
saturation       see `Saturation`: past it the figures grow with the length of the run
===============  ==================================================================================

Percentiles as in `perf.load.metrics`. The names of limits too, and `cold_ttft` and `warm_ttft`,
which stand for `ttft` with requests of their kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from minifer.perf.load.metrics import SLO_METRICS, STATISTICS, percentile
from minifer.simulation.measures.intervals import Interval, share_interval
from minifer.simulation.measures.saturation import Saturation, saturation_of
from minifer.simulation.result import RequestRecord, SimulationResult
from minifer.simulation.workloads.arrivals import Arrival, Workload

COLD_SHARE = 0.5
LIMITS = (*SLO_METRICS, "cold_ttft", "warm_ttft")
SERIES = ("ttft", "cold_ttft", "warm_ttft", "queue", "itl", "max_itl", "tpot", "e2e")
Slo = Mapping[str, float]  # of `LIMITS`, in seconds


@dataclass(frozen=True)
class Percentiles:
    """Seconds; of `count` values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        """None without values."""
        if not values:
            return None
        ordered = sorted(values)
        mean = math.fsum(ordered) / len(ordered)
        p50, p90, p99 = (percentile(ordered, q) for q in (50, 90, 99))
        return cls(len(ordered), mean, p50, p90, p99, ordered[-1])


@dataclass(frozen=True)
class RunMetrics:
    """Of the requests that came after the warm-up; utilisation of the whole run, node → share.

    seconds: in which they came. offered: requests a second in them; infinity, and no goodput,
    where all came at once. attainment, goodput: None without an SLO.
    """

    num_requests: int
    num_finished: int
    num_rejected: int
    seconds: float
    offered: float
    ttft: Percentiles | None
    cold_ttft: Percentiles | None
    warm_ttft: Percentiles | None
    queue: Percentiles | None
    itl: Percentiles | None
    max_itl: Percentiles | None
    tpot: Percentiles | None
    e2e: Percentiles | None
    attainment: Interval | None
    goodput: Interval | None
    hit_rate: float
    starvation_age: float
    utilisation: Mapping[str, float]
    saturation: Saturation

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; infinity is null."""
        out: dict[str, Any] = _finite(asdict(self))
        out["saturation"]["unstable"] = self.saturation.unstable
        return out


def measure(
    result: SimulationResult,
    slo: Slo | None = None,
    *,
    warmup: float = 0.0,
    is_cold: Callable[[RequestRecord], bool] | None = None,
    seed: int = 0,
) -> RunMetrics:
    """warmup: seconds from the first arrival whose requests do not count. is_cold: instead of
    `COLD_SHARE`. seed: of the bootstrap. Raises `ValueError` when nothing is left to measure, or
    for an unknown limit."""
    cold = is_cold or computed_most
    records = counted(result, warmup)
    times = [record.arrived for record in records]
    seconds = times[-1] - times[0]
    done = [record for record in records if record.finished]
    attainment = goodput = None
    if slo:
        met = [meets(record, slo, cold) for record in records]
        attainment = share_interval(met, seed)
        if seconds:  # else there is no rate
            rate = (len(records) - 1) / seconds
            ends = (attainment.value, attainment.low, attainment.high)
            goodput = Interval(*(x * rate for x in ends))
    prompt = sum(record.prompt_len for record in records)
    return RunMetrics(
        num_requests=len(records),
        num_finished=len(done),
        num_rejected=sum(bool(record.rejected) for record in records),
        seconds=seconds,
        offered=(len(records) - 1) / seconds if seconds else math.inf,
        **{name: Percentiles.of(series(records, name, cold)) for name in SERIES},
        attainment=attainment,
        goodput=goodput,
        hit_rate=sum(record.reused_len for record in records) / prompt,
        starvation_age=max(waited(record, result.seconds) for record in records),
        utilisation={node.name: result.utilisation(node.name) for node in result.nodes},
        saturation=saturation_of(result, warmup),
    )


def series(
    records: Sequence[RequestRecord],
    name: str,
    is_cold: Callable[[RequestRecord], bool] | None = None,
) -> list[float]:
    """All values of one of `SERIES`, in seconds; a request that does not have it gives none.

    Raises `ValueError` for another name.
    """
    if name not in SERIES:
        raise ValueError(f"a metric must be one of {', '.join(SERIES)}, got {name!r}")
    if name == "itl":
        return [gap for record in records for gap in record.gaps]
    cold = computed_most if is_cold is None else is_cold
    if name in ("cold_ttft", "warm_ttft"):
        records = [record for record in records if cold(record) == (name == "cold_ttft")]
        name = "ttft"
    attribute = {"max_itl": "max_gap", "queue": "queue_time"}.get(name, name)
    values = (getattr(record, attribute) for record in records if not record.rejected)
    return [value for value in values if value is not None]


def statistic(records: Sequence[RequestRecord], name: str) -> float:
    """Such as "ttft_p90" or "itl_mean"; NaN where there are no values. Raises `ValueError` for
    what is no series and statistic."""
    metric, _, which = name.rpartition("_")
    if which not in STATISTICS:
        raise ValueError(f"{name!r} must end in one of {', '.join('_' + s for s in STATISTICS)}")
    values = series(records, metric)
    if not values:
        return math.nan
    q = STATISTICS[which]
    return math.fsum(values) / len(values) if q is None else percentile(values, q)


def counted(result: SimulationResult, warmup: float = 0.0) -> list[RequestRecord]:
    """The requests that came after the warm-up. Raises `ValueError` if there are none."""
    if not result.requests:
        raise ValueError("the run must have requests to be measured, got none")
    start = result.requests[0].arrived + warmup
    records = [record for record in result.requests if record.arrived >= start]
    if not records:
        raise _too_warm(warmup, len(result.requests))
    return records


def check_warmup(workload: Workload, warmup: float) -> None:
    """Raise the `ValueError` of `counted` before the run, where all arrivals are known beforehand:
    no turn waits for an answer."""
    times = [item.time for item in workload if isinstance(item, Arrival)]
    if times and len(times) == len(workload) and max(times) < min(times) + warmup:
        raise _too_warm(warmup, len(times))


def _too_warm(warmup: float, num_requests: int) -> ValueError:
    return ValueError(f"warmup={warmup} s leaves none of {num_requests} requests")


def computed_most(record: RequestRecord) -> bool:
    """Cold: more than half of the prompt had to be computed."""
    return record.reused_len < (1 - COLD_SHARE) * record.prompt_len


def meets(
    record: RequestRecord, slo: Slo, is_cold: Callable[[RequestRecord], bool] = computed_most
) -> bool:
    """Did it finish within every limit? One token has no TPOT and no gap, which meets the limit."""
    if not record.finished:
        return False
    for name, limit in slo.items():
        if name == "ttft":
            kind = "cold_ttft" if is_cold(record) else "warm_ttft"
            value = None if kind in slo else record.ttft
        elif name in ("cold_ttft", "warm_ttft"):
            value = record.ttft if is_cold(record) == (name == "cold_ttft") else None
        elif name == "max_itl":
            value = record.max_gap
        elif name in ("tpot", "e2e"):
            value = getattr(record, name)
        else:
            raise ValueError(f"slo must name some of {', '.join(LIMITS)}, got {name!r}")
        if value is not None and value > limit:
            return False
    return True


def waited(record: RequestRecord, now: float) -> float:
    """Seconds from its arrival to its first step, or until `now` if it had none."""
    if record.rejected:
        return 0.0
    return (now if record.admitted is None else record.admitted) - record.arrived


def parse_limits(texts: Sequence[str]) -> dict[str, float]:
    """["ttft=1", "cold_ttft=10", …] → limits in seconds. Raises `ValueError` for anything else."""
    slo = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            limit = float(number)
        except ValueError:
            limit = math.nan
        if name in slo:
            raise ValueError(f"slo must name each limit once, got {name} twice")
        if name not in LIMITS or not limit > 0:
            raise ValueError(
                f"slo must be NAME=SECONDS with a name of {', '.join(LIMITS)}, got {text!r}"
            )
        slo[name] = limit
    return slo


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
