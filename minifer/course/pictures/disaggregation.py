"""Phases apart, and what that costs: simulated runs, KV that moves, models in parts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from minifer.config import EngineConfig, ModelConfig
from minifer.perf.costs import kv_bytes_per_token, prefill_cost
from minifer.perf.devices import Device
from minifer.routing.policy import Role
from minifer.simulation.cluster import Cluster, Link, NodeSpec, identical
from minifer.simulation.measures.metrics import meets
from minifer.simulation.result import SimulationResult
from minifer.simulation.simulator import simulate
from minifer.simulation.steps.published import PUBLISHED_STEPS, published_kv_bytes
from minifer.simulation.steps.times import StepTimes
from minifer.simulation.workloads.arrivals import Arrival, Workload
from minifer.simulation.workloads.generator import Sessions, cold_warm
from minifer.simulation.workloads.lengths import Lengths, Lognormal

if TYPE_CHECKING:
    from torch import Tensor

_LLAMA_70B = "splitwise-llama2-70b-h100-tp8"
STEPS = PUBLISHED_STEPS[_LLAMA_70B]  # of eight H100 that are one node
KV_BYTES = published_kv_bytes(_LLAMA_70B)
LONG, SHORT, ANSWER = 8192, 256, 60  # tokens
COMES = 0.5  # s, when the long prompt does
SLO = {"ttft": 1.0, "tpot": 0.1}  # s, of the study of rates


# -- a long prompt among those who decode


def _engine(budget: int, *, chunked: bool = True, seats: int = 64) -> EngineConfig:
    return EngineConfig(
        block_size=64,
        num_kv_blocks=4096,
        max_num_batched_tokens=budget,
        max_num_seqs=seats,
        enable_chunked_prefill=chunked,
    )


def interference(link: float = 50e9) -> dict[str, SimulationResult]:
    """Four short requests decode when a prompt of `LONG` tokens comes; three deployments.

    Steps as Splitwise measured them, Llama 2 70B on eight H100. link: bytes/s.
    """
    whole, chunks = _engine(16_384, chunked=False), _engine(512)
    apart = (
        NodeSpec("prefill", STEPS, whole, Role.PREFILL),
        NodeSpec("decode", STEPS, _engine(16_384), Role.DECODE),
    )
    clusters = {
        "whole prompts": Cluster(identical(1, STEPS, whole)),
        "chunks of 512": Cluster(identical(1, STEPS, chunks)),
        "two nodes": Cluster(apart, link=Link(link), kv_bytes=KV_BYTES),
    }
    traffic: Workload = [
        *(Arrival(f"short {i}", 0.0, SHORT, ANSWER) for i in range(4)),
        Arrival("long", COMES, LONG, 8),
    ]
    return {name: simulate(traffic, cluster) for name, cluster in clusters.items()}


@dataclass(frozen=True)
class Stall:
    """What the long prompt did. seconds: its first token. pause: the longest between two tokens of
    a short request, once it had come. tokens: times of the first short request's."""

    seconds: float
    pause: float
    num_nodes: int
    tokens: Sequence[float]


def stalls(link: float = 50e9) -> dict[str, Stall]:
    """The three deployments of `interference`."""
    return {name: _stall(result) for name, result in interference(link).items()}


def _stall(result: SimulationResult) -> Stall:
    records = {record.request_id: record for record in result.requests}
    short = [record for name, record in records.items() if name.startswith("short")]
    gaps = [
        after - before
        for record in short
        for before, after in pairwise(record.token_times)
        if after > COMES
    ]
    first = records["long"].ttft or math.inf
    return Stall(first, max(gaps), len(result.nodes), short[0].token_times)


# -- what four replicas carry, by policy and rate


def shared_prompts(rate: float, count: int, seed: int) -> Workload:
    """Requests of 16 tenants, each with a system prompt of 2,048 tokens; four in ten are one's."""
    return _requests(300, tenants=16, system_len=2_048).open_loop(count, rate, seed=seed)


def single_prompts(rate: float, count: int, seed: int) -> Workload:
    """As long as those, and nobody shares anything."""
    return _requests(2_348).open_loop(count, rate, seed=seed)


def _requests(own: int, tenants: int = 0, system_len: int = 0) -> Sessions:
    """Single turns. own: median length of a prompt without the system prompt."""
    return Sessions(
        first=Lengths(
            Lognormal.of_quantiles(own, 2 * own, most=6_000), Lognormal.of_quantiles(60, 150), 0.3
        ),
        added=Lognormal.constant(1),
        turns=1.0,
        tenants=tenants,
        system_len=system_len,
        skew=1.2 if tenants else 0.0,
    )


def four_replicas(policy: str, steps: StepTimes) -> Cluster:
    """Small caches: 80 blocks of 512 tokens each."""
    engine = EngineConfig(
        block_size=512, num_kv_blocks=80, max_num_batched_tokens=2_048, max_num_seqs=32
    )
    return Cluster(identical(4, steps, engine), router=policy)


@dataclass(frozen=True)
class Carried:
    """goodput: requests a second within `SLO`. offered: that came. hit_rate: of prompt tokens.

    busiest: share of the requests at the replica that got most.
    """

    goodput: float
    offered: float
    hit_rate: float
    busiest: float


def carried(workload: Workload, cluster: Cluster) -> Carried:
    result = simulate(workload, cluster)
    records = result.requests
    span = records[-1].arrived - records[0].arrived
    good = sum(meets(record, SLO) for record in records)
    tokens = sum(record.prompt_len for record in records)
    reused = sum(record.reused_len for record in records)
    most = max(Counter(record.path[0] for record in records).values())
    return Carried(good / span, len(records) / span, reused / tokens, most / len(records))


# -- cold and warm prompts


def too_late(
    cluster: Cluster, rate: float, seconds: float = 600.0, seeds: Sequence[int] = (1, 2, 3, 4)
) -> tuple[float, float, float]:
    """Shares that come too late: of warm prompts (1 s), of cold ones (10 s), of all."""
    late = {0: [0, 0], 1: [0, 0]}  # cold is 0, warm is 1: late and all
    for seed in seeds:
        for record in simulate(cold_warm(rate, seconds, seed=seed), cluster).requests:
            warm = record.turn
            late[warm][0] += (record.ttft or math.inf) > (1.0 if warm else 10.0)
            late[warm][1] += 1
    both = (late[0][0] + late[1][0]) / (late[0][1] + late[1][1])
    return late[1][0] / late[1][1], late[0][0] / late[0][1], both


# -- KV that moves, and chips


def recompute_seconds(
    config: ModelConfig, device: Device, num_tokens: int, *, chips: int = 1, sustained: float = 0.5
) -> float:
    """Seconds of a prefill, at a share of the chips' peak."""
    flops = prefill_cost(config, num_tokens).total().flops
    return flops / (sustained * chips * device.peak_flops)


def times_to_have(
    config: ModelConfig, device: Device, lengths: Sequence[int], links: Mapping[str, float]
) -> dict[str, list[float]]:
    """Seconds to have the KV of prefixes: computed here, or over links, given in bytes a second."""
    each = kv_bytes_per_token(config)
    return {
        "compute again": [recompute_seconds(config, device, n) for n in lengths],
        **{name: [n * each / speed for n in lengths] for name, speed in links.items()},
    }


def logits_of_ranks(size: int, token_ids: Sequence[int]) -> Tensor:
    """Float32 logits [V] after a prompt, from minifer-tiny cut for `size` ranks: threads that talk
    over gloo as processes would."""
    import torch

    from minifer.course.example import tiny
    from minifer.execution.backend import TorchBackend
    from minifer.execution.forward_batch import ForwardBatch
    from minifer.execution.kv_storage import KVStorage
    from minifer.execution.parallel.group import Group, in_threads
    from minifer.execution.parallel.loading import fill_rank

    whole = tiny().model
    named = [
        (part.name, whole.get_parameter(part.parameter).detach()[part.start : part.stop])
        for part in whole.weight_parts()
    ]
    count = len(token_ids)

    def work(group: Group) -> Tensor:
        part = fill_rank(tiny().config, group, torch.float32, "cpu", named)
        own, backend = part.config, TorchBackend()
        kv = KVStorage(own.num_kv_slots, 1, count, own.num_kv_heads, own.head_dim, torch.float32)
        places = list(range(count))
        batch = ForwardBatch.build(
            list(token_ids), places, places, [0, count], [count], [[0]], [count - 1], count
        )
        with torch.inference_mode():
            hidden = part(batch, kv, backend)
            return part.logits(hidden[batch.logits_rows], backend)[0]

    return in_threads(size, work)[0]
