"""Recorded traffic as a workload, and which public file it is.

`perf.load.traces` reads the formats. A trace names blocks of tokens; here a name stands for all
that came before it too, and blocks are as long as the simulator's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from minifer.perf.load.traces import Trace
from minifer.simulation.workloads.arrivals import BLOCK, Arrival


@dataclass(frozen=True)
class KnownTrace:
    """A public file. licence: of its repository; CC-BY asks whoever shows figures to name it.
    tick: seconds of its clock, where several requests share a time (0: it is finer)."""

    name: str
    source: str
    licence: str
    tick: float = 0.0


# SHA-256 → file
KNOWN_TRACES: Mapping[str, KnownTrace] = MappingProxyType(
    {
        "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6": KnownTrace(
            "Azure LLM inference trace 2023, code",
            "github.com/Azure/AzurePublicDataset b469a113 data/AzureLLMInferenceTrace_code.csv",
            "CC-BY-4.0",
        ),
        "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8": KnownTrace(
            "Azure LLM inference trace 2023, conversations",
            "github.com/Azure/AzurePublicDataset b469a113 data/AzureLLMInferenceTrace_conv.csv",
            "CC-BY-4.0",
        ),
        "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df": KnownTrace(
            "Mooncake conversations",
            "github.com/kvcache-ai/Mooncake 3b5a5941 FAST25-release/traces/conversation_trace",
            "Apache-2.0",
            tick=3.0,
        ),
        "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131": KnownTrace(
            "Mooncake synthetic",
            "github.com/kvcache-ai/Mooncake 3b5a5941 FAST25-release/traces/synthetic_trace",
            "Apache-2.0",
        ),
    }
)


def recognise(path: str | Path) -> KnownTrace | None:
    """The public file that this is, byte for byte; None for any other."""
    with open(path, "rb") as file:
        return KNOWN_TRACES.get(hashlib.file_digest(file, "sha256").hexdigest())


def trace_workload(trace: Trace, *, rate: float | None = None) -> list[Arrival]:
    """One request a row. rate: requests a second over the whole trace, which is played faster or
    slower for it; None: as recorded.

    Blocks become the simulator's: several of a finer trace are one, and what does not fill one at
    the end of a prompt has no name. Raises `ValueError` for a rate that is not above 0 or
    that rows which all come at once cannot have, and for blocks that do not divide those of the
    simulator.
    """
    if rate is not None and not rate > 0:
        raise ValueError(f"rate must be above 0, got {rate}")
    if BLOCK % trace.hash_block:
        raise ValueError(f"blocks of {trace.hash_block} tokens do not divide those of {BLOCK}")
    span, count = trace.rows[-1].time, len(trace.rows)
    if rate is not None and count > 1 and not span:
        raise ValueError(
            f"rate={rate:g} needs a trace whose rows come one after the other, all {count} come at "
            "the same time"
        )
    stretch = 1.0 if rate is None or not span else (count - 1) / span / rate
    names: dict[tuple[int, tuple[int, ...]], int] = {}
    each = BLOCK // trace.hash_block
    out = []
    for i, row in enumerate(trace.rows):
        parent, chain = -1, []
        for k in range(min(row.input_len // BLOCK, len(row.hash_ids) // each)):
            content = row.hash_ids[k * each : (k + 1) * each]
            parent = names.setdefault((parent, content), len(names))
            chain.append(parent)
        out.append(
            Arrival(
                f"r{i}",
                row.time * stretch,
                row.input_len,
                row.output_len,
                tuple(chain),
                session=i,
            )
        )
    return out
