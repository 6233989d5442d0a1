"""What is published about real traffic: figures, never files.

Each entry holds what the generator needs to make traffic of that kind. The figures are aggregates
over public traces; the traces themselves are not part of minifer (`traces.py` reads them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from minifer.simulation.workloads.lengths import Lengths, Lognormal


@dataclass(frozen=True)
class Reuse:
    """How prompts share their beginnings.

    requests_per_session: mean; their number is geometric. similarity: correlation of the
    logarithms of two prompt lengths of one session, fitted so that `bound` comes out. gap: seconds
    from a request to the next one of its session. shared_blocks: leading blocks that all prompts
    have in common. bound: share of prompt blocks that a cache without limit would find.
    """

    requests_per_session: float
    similarity: float
    gap: Lognormal
    shared_blocks: int
    bound: float


@dataclass(frozen=True)
class TraceStatistics:
    """rate: requests a second. cv: coefficient of variation of the gaps between arrivals."""

    name: str
    about: str
    num_requests: int
    rate: float
    cv: float
    lengths: Lengths
    source: str
    licence: str
    reuse: Reuse | None = None


_AZURE = "github.com/Azure/AzurePublicDataset, traces of 2023; Patel et al., Splitwise, ISCA 2024"
_MOONCAKE = "github.com/kvcache-ai/Mooncake, FAST25-release; Qin et al., Mooncake, FAST 2025"

# Lognormals by the mean and deviation of the logarithms, unless a comment says otherwise.
PUBLISHED: Mapping[str, TraceStatistics] = MappingProxyType(
    {
        trace.name: trace
        for trace in (
            TraceStatistics(
                "azure-code",
                "code completion: prompts of 2,000 tokens, answers of 28, in hard bursts",
                num_requests=8_819,
                rate=2.566,
                cv=13.15,
                lengths=Lengths(Lognormal(7.00, 1.36), Lognormal(2.79, 0.85)),
                source=_AZURE,
                licence="CC-BY-4.0",
            ),
            TraceStatistics(
                "azure-conversation",
                "conversations: prompts of 1,150 tokens, answers of 210",
                num_requests=19_366,
                rate=5.53,
                cv=1.09,
                lengths=Lengths(Lognormal(6.63, 0.99), Lognormal(5.02, 0.86), correlation=0.09),
                source=_AZURE,
                licence="CC-BY-4.0",
            ),
            TraceStatistics(
                "azure-short",
                "of the same those that fit into 2,048 tokens, where lengths move together",
                num_requests=16_528,
                rate=4.72,
                cv=1.08,
                # Fitted to what is left after the cut: mean 754 and 232, correlation 0.54, mean of
                # (prompt + output) · output 2.9e5.
                lengths=Lengths(
                    Lognormal(7.01, 0.99), Lognormal(5.75, 1.04), correlation=0.85, max_total=2_048
                ),
                source=_AZURE,
                licence="CC-BY-4.0",
            ),
            TraceStatistics(
                "mooncake-conversation",
                "long conversations: prompts of 12,000 tokens, of which a cache can find 37 %",
                num_requests=12_031,
                rate=3.40,
                cv=1.0,  # the file has ticks of 3 s; spread over them its arrivals are Poisson
                # Of the outputs the mean, 343, and the 90th percentile, 597.
                lengths=Lengths(Lognormal(8.74, 1.20), Lognormal(5.686, 0.551), correlation=0.05),
                reuse=Reuse(
                    # 1.63 in the hour of the file, which cuts some sessions
                    requests_per_session=1.70,
                    similarity=0.98,
                    gap=Lognormal.of_quantiles(123.0, 483.0),
                    shared_blocks=1,
                    bound=0.366,
                ),
                source=_MOONCAKE,
                licence="Apache-2.0",
            ),
        )
    }
)
