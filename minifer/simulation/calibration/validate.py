"""Does the simulator tell what a real engine did? Replay the engine's own log, and compare.

The arrivals, lengths and cache hits are the log's, the settings those of the engine, the step times
fitted to its steps; everything else is simulated. Each request's TTFT, TPOT and E2E are compared
with what the log says.

A fit judged by the steps it was made from flatters itself. So the same is done a second time with
prices from the first half of the steps, judged by the second half: by the steps themselves, and by
the requests that came then.

TTFT is the hardest: an error in the queue before a request adds up, while an error of a step is a
small part of a long answer. It is always shown. Published simulators reach 12 % of E2E and 23 % of
TTFT at best over many settings (Vidur, MLSys 2024, says below 9 % of E2E in its own).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from minifer.config import EngineConfig
from minifer.simulation.calibration.fit import StepErrors, StepFit, errors_of, fit_steps
from minifer.simulation.calibration.step_log import LoggedRequest, StepLog
from minifer.simulation.cluster import Cluster, NodeSpec, StoreLevel
from minifer.simulation.result import RequestRecord
from minifer.simulation.simulator import simulate
from minifer.simulation.steps.times import StepTimes
from minifer.simulation.workloads.arrivals import Arrival

METRICS = ("ttft", "tpot", "e2e")
AIMS: Mapping[str, float] = {"ttft": 0.25, "e2e": 0.15}  # mean absolute relative error


@dataclass(frozen=True)
class MetricErrors:
    """Over `count` requests: mean seconds in the log and simulated, mean absolute relative error
    (MAPE), and mean relative error, whose sign says which is slower."""

    count: int
    real: float
    simulated: float
    mape: float
    bias: float


@dataclass(frozen=True)
class Validation:
    """fit: to all steps. errors: metric → of all requests. half_steps: prices of the first half of
    the steps on the second; half_errors: with these prices, of the requests that came then (None:
    there are none). num_left_out: requests that got no token."""

    fit: StepFit
    errors: Mapping[str, MetricErrors]
    half_steps: StepErrors
    half_errors: Mapping[str, MetricErrors] | None
    num_requests: int
    num_left_out: int

    @property
    def missed(self) -> list[str]:
        """Metrics whose error on all requests is above its aim."""
        return [m for m, aim in AIMS.items() if m in self.errors and self.errors[m].mape > aim]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "fit": self.fit.to_dict(), "missed": self.missed}


def validate(log: StepLog, config: EngineConfig | None = None) -> Validation:
    """config: instead of the log's own. Raises `ValueError` for a log that says nothing of the
    engine's settings when none are given, one without answers, or one that is too short to fit."""
    requests = [request for request in log.requests if request.output_len]
    if not requests:
        raise ValueError("the log must hold at least one request with an answer, got none")
    fit = fit_steps(log.steps)
    errors = compare(requests, replay(log, fit.steps, config).values())
    middle = len(log.steps) // 2
    first, second = log.steps[:middle], log.steps[middle:]
    half = fit_steps(first).steps
    later = [request for request in requests if request.arrival >= second[0].start]
    replayed = replay(log, half, config)
    half_errors = compare(later, (replayed[r.request_id] for r in later)) if later else None
    return Validation(
        fit,
        errors,
        errors_of(half, second),
        half_errors,
        len(requests),
        len(log.requests) - len(requests),
    )


def replay(
    log: StepLog, times: StepTimes, config: EngineConfig | None = None
) -> dict[str, RequestRecord]:
    """Simulate the log's requests on one node with the engine's settings; by request id.

    What the engine's cache had of a prompt is taken from the log. Raises as `validate`.
    """
    config = log.config if config is None else config
    if config is None or config.num_kv_blocks is None:
        raise ValueError(
            "the log does not tell the engine's settings: record it with `minifer sim record`, or "
            "give them, num_kv_blocks among them"
        )
    plain = replace(
        config,
        enable_prefix_caching=False,
        kv_dram_bytes=None,
        kv_disk_path=None,
        speculative_method="none",
        speculative_model=None,
        speculative_num_loops=None,
    )
    found = StoreLevel("the engine's cache", 0, math.inf)
    node = NodeSpec("engine", times, plain, store=(found,), in_tokens=True)
    start = min(request.arrival for request in log.requests)
    arrivals = [
        Arrival(
            request.request_id,
            request.arrival - start,
            request.prompt_len,
            request.output_len,
            stored_len=request.cached_len,
        )
        for request in log.requests
        if request.output_len
    ]
    result = simulate(arrivals, Cluster((node,)), name_tokens=plain.block_size)
    return {record.request_id: record for record in result.requests}


def compare(
    real: Sequence[LoggedRequest], simulated: Iterable[RequestRecord]
) -> dict[str, MetricErrors]:
    """Of requests that both have, by metric; one that nobody has a value of is left out."""
    records = {record.request_id: record for record in simulated}
    out = {}
    for metric in METRICS:
        pairs = [
            (value, predicted)
            for request in real
            if (value := _real(request, metric))
            and (predicted := getattr(records[request.request_id], metric)) is not None
        ]
        if pairs:
            relative = [predicted / value - 1 for value, predicted in pairs]
            out[metric] = MetricErrors(
                len(pairs),
                math.fsum(value for value, _ in pairs) / len(pairs),
                math.fsum(predicted for _, predicted in pairs) / len(pairs),
                math.fsum(map(abs, relative)) / len(pairs),
                math.fsum(relative) / len(pairs),
            )
    return out


def _real(request: LoggedRequest, metric: str) -> float | None:
    times = request.token_times
    if metric == "ttft":
        return times[0] - request.arrival
    if metric == "e2e":
        return times[-1] - request.arrival
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
