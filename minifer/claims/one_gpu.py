"""OPT 13B on A100s, as DistServe measured it: the deployments that two claims compare."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

from minifer.config import EngineConfig
from minifer.perf.load.arrivals import arrival_times
from minifer.perf.load.traces import load_trace
from minifer.routing.policy import Role
from minifer.simulation.cluster import Cluster, Link, NodeSpec, identical
from minifer.simulation.steps.published import PUBLISHED_STEPS
from minifer.simulation.steps.times import StepTimes
from minifer.simulation.workloads.arrivals import Arrival
from minifer.simulation.workloads.generator import open_loop
from minifer.simulation.workloads.lengths import Lengths
from minifer.simulation.workloads.published import PUBLISHED

A100 = PUBLISHED_STEPS["distserve-opt-13b-a100-tp1"]
A100_PAIR = PUBLISHED_STEPS["distserve-opt-13b-a100-tp2"]  # tensor parallel over two
VLLM_2024 = PUBLISHED_STEPS["vllm2024-opt-13b-a100-tp1"]  # the same chip, other kernels
KV_BYTES = 2 * 40 * 5120 * 2  # of a token of OPT 13B: keys and values, layers, width, float16
KV_TOKENS = 60_000  # that one GPU holds beside the weights
MAX_LEN = 2048  # of OPT: prompt and answer
_BLOCK = 64
_TOGETHER = 512  # tokens from which an A100 is busy with a prefill; a longer prompt goes alone

TOGETHER = PUBLISHED["azure-short"].lengths  # long prompts have long answers: 0.54
# The same trace's distributions of prompt and answer, drawn as if one said nothing of the other.
APART = replace(PUBLISHED["azure-conversation"].lengths, correlation=0.0, max_total=MAX_LEN)


@dataclass(frozen=True)
class Requests:
    """(rate, seed) → `count` single requests at Poisson times. pairs: (prompt, output) to draw
    from; none: from `lengths`."""

    count: int
    lengths: Lengths = TOGETHER
    pairs: tuple[tuple[int, int], ...] = ()

    def __call__(self, rate: float, seed: int) -> list[Arrival]:
        if not self.pairs:
            return open_loop(self.lengths, self.count, rate, seed=seed)
        drawn = random.Random(f"{seed}/pairs").choices(self.pairs, k=self.count)
        times = arrival_times(self.count, rate, seed=seed)
        return [
            Arrival(f"r{i}", time, prompt, output)
            for i, (time, (prompt, output)) in enumerate(zip(times, drawn, strict=True))
        ]


def recorded_pairs(trace: Path | None) -> tuple[tuple[int, int], ...]:
    """Lengths of a trace's requests that OPT can take; none without a trace."""
    if trace is None:
        return ()
    rows = load_trace(trace).select(max_total_len=MAX_LEN).rows
    return tuple((row.input_len, row.output_len) for row in rows)


def lengths_in_words(trace: Path | None) -> str:
    if trace is None:
        return f"lengths as in Azure's conversations of 2023 up to {MAX_LEN:,} tokens"
    return f"lengths drawn from {trace.name}"


def engine(budget: int, *, chunked: bool = True) -> EngineConfig:
    """budget: tokens of a step; not chunked: whole prompts, before anybody decodes."""
    return EngineConfig(
        block_size=_BLOCK,
        num_kv_blocks=KV_TOKENS // _BLOCK,
        max_num_seqs=256,
        max_num_batched_tokens=budget,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=False,
    )


PREFILL_FIRST = engine(4096, chunked=False)


def colocated(config: EngineConfig, steps: StepTimes = A100) -> Cluster:
    """One GPU that does everything."""
    return Cluster(identical(1, steps, config), kv_bytes=KV_BYTES)


def split(
    num_prefill: int,
    num_decode: int,
    *,
    link: float = 300e9,
    prefill: StepTimes = A100,
    decode: StepTimes = A100,
) -> Cluster:
    """GPUs that prefill whole prompts, and GPUs that decode. link:
    bytes/s at which KV leaves a prefill GPU."""
    first = replace(PREFILL_FIRST, max_num_batched_tokens=_TOGETHER)
    nodes = (
        *(NodeSpec(f"prefill{i}", prefill, first, Role.PREFILL) for i in range(num_prefill)),
        *(NodeSpec(f"decode{i}", decode, engine(4096), Role.DECODE) for i in range(num_decode)),
    )
    return Cluster(nodes, router="least_work", link=Link(link), kv_bytes=KV_BYTES)
