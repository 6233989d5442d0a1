"""Workloads by name, for the command line and for searches over the rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from minifer.simulation.workloads.arrivals import Workload
from minifer.simulation.workloads.generator import Sessions, cold_warm, open_loop
from minifer.simulation.workloads.lengths import Lengths, Lognormal
from minifer.simulation.workloads.published import PUBLISHED, TraceStatistics
from minifer.simulation.workloads.trace_like import like

_RAMP = 30.0  # seconds in which the cold/warm study's rate grows


@dataclass(frozen=True)
class NamedWorkload:
    """rate: requests or sessions a second when nobody says otherwise. make: (number of requests or
    sessions, rate, seed) → workload."""

    about: str
    rate: float
    make: Callable[[int, float, int], Workload]


def make_workload(name: str, count: int, rate: float | None = None, seed: int = 0) -> Workload:
    """A workload of `WORKLOADS`. Raises `ValueError` for an unknown name, a count below 1 or a rate
    that is not above 0."""
    if name not in WORKLOADS:
        raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}, got {name!r}")
    if count < 1:
        raise ValueError(f"the number of requests must be at least 1, got {count}")
    named = WORKLOADS[name]
    return named.make(count, named.rate if rate is None else rate, seed)


def _like(trace: TraceStatistics) -> NamedWorkload:
    return NamedWorkload(
        trace.about, trace.rate, lambda count, rate, seed: like(trace, count, rate=rate, seed=seed)
    )


def _single(about: str, lengths: Lengths, rate: float, cv: float = 1.0) -> NamedWorkload:
    return NamedWorkload(
        about, rate, lambda count, rate, seed: open_loop(lengths, count, rate, cv=cv, seed=seed)
    )


_SHORT = PUBLISHED["azure-short"]
# Whole, the trace's lengths hardly correlate; those that fit into 2,048 tokens do.
_INDEPENDENT = replace(
    PUBLISHED["azure-conversation"].lengths, correlation=0.0, max_total=_SHORT.lengths.max_total
)
CHATS = Sessions(
    first=Lengths(Lognormal.of_quantiles(300, 1_500), Lognormal.of_quantiles(130, 500), 0.3),
    added=Lognormal.of_quantiles(60, 400),
    turns=5,
    think=Lognormal.of_quantiles(10, 60, most=600),
    tenants=4,
    system_len=2_048,
    skew=1.0,
    max_len=16_384,
)

WORKLOADS: Mapping[str, NamedWorkload] = MappingProxyType(
    {
        **{name: _like(trace) for name, trace in PUBLISHED.items()},
        "azure-short-independent": _single(
            "the lengths of azure-conversation that fit into 2,048 tokens, drawn independently of "
            "each other",
            _INDEPENDENT,
            _SHORT.rate,
        ),
        "azure-short-bursty": _single(
            "the lengths of azure-short, in bursts: gaps with a coefficient of variation of 4",
            _SHORT.lengths,
            _SHORT.rate,
            cv=4.0,
        ),
        "short": _single(
            "prompts of 100 tokens, answers of 25: what a small model on a CPU can serve",
            Lengths(
                Lognormal.of_quantiles(90, 200, least=8, most=400),
                Lognormal.of_quantiles(20, 45, least=2, most=100),
                correlation=0.3,
            ),
            rate=1.0,
        ),
        "chat": NamedWorkload(
            "closed loop: chats of 5 turns on average, 4 tenants with a system prompt each; the "
            "rate is of new chats",
            0.5,
            lambda count, rate, seed: CHATS.closed_loop(count, rate, seed=seed),
        ),
        "chat-open": NamedWorkload(
            "the same chats; no turn waits for the answer before",
            0.5,
            lambda count, rate, seed: CHATS.open_loop(count, rate, seed=seed),
        ),
        "cold-warm": NamedWorkload(
            "contexts of 84,000 tokens, 10 % of them new: the base case of cache-aware routing; "
            f"the rate grows for {_RAMP:g} s",
            1.0,
            lambda count, rate, seed: cold_warm(rate, count / rate, seed=seed, ramp=_RAMP),
        ),
    }
)
