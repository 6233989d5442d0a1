"""The simulator against truths that need no simulator: queues, a plan on paper, conservation."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from minifer.config import POLICIES, EngineConfig
from minifer.routing.policy import Role
from minifer.simulation.cluster import Cluster, Link, NodeSpec, StoreLevel, identical
from minifer.simulation.rejection import DecodeLoad, PredictedTTFT
from minifer.simulation.result import SimulationResult
from minifer.simulation.simulator import simulate
from minifer.simulation.steps.times import DecodePrices, FittedSteps, FixedSteps, PrefillPrices
from minifer.simulation.workloads.arrivals import Arrival, Conversation

SLOW = FittedSteps(PrefillPrices(1.0, 0.1), ((0, DecodePrices(0.5, 0.25)),))
NAME = 64  # tokens of a block's name


@pytest.mark.parametrize("servers", [1, 2, 5])
def test_least_work_is_one_queue_for_all_servers(servers: int) -> None:
    """M/D/c: who goes where the least work waits begins when the first server is free (Kiefer and
    Wolfowitz 1955, "On the theory of queues with many servers")."""
    rng, now, free = random.Random(servers), 0.0, [0.0] * servers
    arrivals, waits = [], []
    for i in range(500):
        now += rng.expovariate(0.85 * servers)
        arrivals.append(Arrival(str(i), now, 100, 1))
        begins = max(now, heapq.heappop(free))
        waits.append(begins - now)
        heapq.heappush(free, begins + 1.0)
    engine = EngineConfig(block_size=512, num_kv_blocks=50, max_num_seqs=1)
    result = simulate(arrivals, Cluster(identical(servers, FixedSteps(1.0), engine)))
    assert [record.queue_time for record in result.requests] == pytest.approx(waits, abs=1e-9)
    assert max(waits) > 2


def test_four_requests_on_paper() -> None:
    """Two seats, ten tokens a step.

    ====  ==============  =======================================  =====
    from  computed        seconds                                  until
    ====  ==============  =======================================  =====
    0     a 10            1 + 10 · 0.1                             2
    2     a 2, b 8        1 + 10 · 0.1                             4
    4     a, c 5          the larger of 1 and 0.5, 0.5, 0.25       5.75
    5.75  c, d 9          1 + 0.9 + 0.25                           7.9
    7.9   c, d 9          the same                                 10.05
    10.1  d 2             1 + 0.2                                  11.25
    ====  ==============  =======================================  =====
    """
    engine = EngineConfig(
        block_size=16, num_kv_blocks=10, max_num_seqs=2, max_num_batched_tokens=10
    )
    workload = [
        Arrival("a", 0.0, 12, 2),
        Arrival("b", 0.5, 8, 1),
        Arrival("c", 1.0, 5, 3),
        Arrival("d", 1.2, 20, 1),
    ]
    result = simulate(workload, Cluster((NodeSpec("n", SLOW, engine),)), name_tokens=16)
    assert [r.admitted for r in result.requests] == pytest.approx([0, 2, 4, 5.75])
    times = [[4, 5.75], [4], [5.75, 7.9, 10.05], [11.25]]
    for record, expected in zip(result.requests, times, strict=True):
        assert list(record.token_times) == pytest.approx(expected)
    (node,) = result.nodes
    assert (node.prefill_tokens, node.decode_tokens) == (45, 3)


# -- anything goes


def deployment(rng: random.Random) -> Cluster:
    """Small nodes of any kind: little memory, few seats, stores, rejection."""
    chunked = rng.random() < 0.7
    engine = EngineConfig(
        block_size=rng.choice([16, 32]),
        num_kv_blocks=rng.randrange(6, 16),
        max_num_seqs=rng.randrange(1, 6),
        max_num_batched_tokens=rng.choice([16, 64, 256]),
        enable_chunked_prefill=chunked,
        max_prefill_chunk=rng.choice([None, 8]) if chunked else None,
        scheduling_policy=rng.choice(POLICIES),
        enable_prefix_caching=rng.random() < 0.7,
        prefill_ageing=rng.choice([0, 0.1, 1.0]),
        mlfq_quantum=rng.choice([4, 32]),
        mlfq_starvation_steps=rng.choice([None, 5]),
    )
    steps = FittedSteps(
        PrefillPrices(0.01, 0.001, 1e-7),
        ((0, DecodePrices(0.005, 0.001, 1e-6)), (3, DecodePrices(0.006, 0.0005, 1e-6))),
    )
    store = (
        StoreLevel("dram", rng.choice([0, 500]), 1e6),
        StoreLevel("pool", 5000, 5e5, 0.001, shared=True),
    )[: rng.randrange(3)]
    roles = rng.choice(["m", "mmm", "pd", "ppddd", "pmd"])
    kinds = {"m": Role.MIXED, "p": Role.PREFILL, "d": Role.DECODE}
    nodes = tuple(
        NodeSpec(
            f"{role}{i}",
            steps,
            engine,
            kinds[role],
            () if role == "d" else store,
            prefetch=bool(store) and rng.random() < 0.5,
            in_tokens=rng.random() < 0.5,
        )
        for i, role in enumerate(roles)
    )
    return Cluster(
        nodes,
        router=rng.choice(["least_work", "least_load", "prefix_affinity"]),
        link=Link(rng.choice([1e4, math.inf]), rng.choice([0, 0.1]), rng.random() < 0.5),
        kv_bytes=rng.choice([0, 10.0]),
        rejection=rng.choice([None, None, PredictedTTFT(1.0), DecodeLoad(2, 1.0)]),
    )


def traffic(rng: random.Random, capacity: int) -> list[Arrival | Conversation]:
    """Bursts, shared beginnings, conversations; every request fits into an empty node."""
    out: list[Arrival | Conversation] = []
    now = 0.0
    for i in range(rng.randrange(5, 30)):
        now += rng.choice([0, rng.expovariate(20)])
        turns, before = [], 0
        for k in range(rng.choice([1, 1, 3])):
            prompt = min(before + rng.randrange(1, capacity // 2 + 1), capacity - capacity // 4)
            answer = rng.randrange(1, capacity // 4 + 1)
            names = tuple(1000 * i + j if j else i % 3 for j in range(prompt // NAME))
            time = now if k == 0 else rng.choice([0.0, 0.5])
            tenant = rng.choice("ab")
            turns.append(Arrival(f"{i}.{k}", time, prompt, answer, names, 0, tenant, i, k))
            before = min(prompt + answer, capacity // 3)
        out.append(Conversation(tuple(turns)) if len(turns) > 1 else turns[0])
    return out


def turns_of(item: Arrival | Conversation) -> tuple[Arrival, ...]:
    return item.turns if isinstance(item, Conversation) else (item,)


def every_token_once(workload: list[Arrival | Conversation], result: SimulationResult) -> None:
    records = {record.request_id: record for record in result.requests}
    wanted = {turn.request_id: turn for item in workload for turn in turns_of(item)}
    least = 0
    for name, record in records.items():
        turn = wanted[name]
        if record.rejected:
            assert not record.token_times and record.end == record.arrived
            continue
        times = list(record.token_times)
        assert record.finished and len(times) == turn.output_len and times == sorted(times)
        assert record.arrived <= record.admitted < times[0] == record.first_token
        assert record.end == times[-1] and record.reused_len < turn.prompt_len
        least += turn.prompt_len - record.reused_len + turn.output_len - 1
    computed = sum(node.prefill_tokens + node.decode_tokens for node in result.nodes)
    if any(record.num_preemptions for record in records.values()):
        assert computed >= least
    else:
        assert computed == least
    assert all(node.peak_kv_usage <= 1 for node in result.nodes)
    for before, after in (pair for item in workload for pair in pairwise(turns_of(item))):
        answered = records.get(before.request_id)
        if answered is None or answered.rejected:
            assert after.request_id not in records
        else:
            came = records[after.request_id].arrived
            assert came == pytest.approx(answered.end + after.time)


def test_whatever_the_deployment_every_token_comes_once_and_stretches_change_nothing() -> None:
    preempted = rejected = 0
    for seed in range(40):
        rng = random.Random(seed)
        cluster = deployment(rng)
        workload = traffic(rng, cluster.nodes[0].kv_capacity)
        result = simulate(workload, cluster, name_tokens=NAME)
        every_token_once(workload, result)
        alone = simulate(workload, cluster, name_tokens=NAME, coast=False)
        assert result.requests == alone.requests, seed
        preempted += sum(node.num_preemptions for node in result.nodes)
        rejected += len(result.rejected)
    assert preempted > 20 and rejected > 20


def whole_prompts(cluster: Cluster) -> Cluster:
    (node,) = cluster.nodes
    engine = replace(node.engine, enable_chunked_prefill=False, max_num_batched_tokens=64)
    return replace(cluster, nodes=(replace(node, engine=engine),))


@pytest.mark.parametrize("change", [lambda cluster: cluster, whole_prompts])
def test_a_prompt_that_is_cached_but_for_a_token_does_not_hold_up_the_next(
    change: Callable[[Cluster], Cluster],
) -> None:
    """Its step looks like one of decodes alone, and still the next step may admit another."""
    engine = EngineConfig(block_size=64, num_kv_blocks=16, max_num_seqs=4)
    cluster = change(Cluster((NodeSpec("n", SLOW, engine),)))
    workload = [
        Arrival("a", 0.0, 65, 1, (1,)),
        Arrival("b", 1.0, 65, 40, (1,)),
        Arrival("c", 2.0, 200, 1),
    ]
    result = simulate(workload, cluster, name_tokens=NAME)
    alone = simulate(workload, cluster, name_tokens=NAME, coast=False)
    assert result.requests == alone.requests
    assert result.requests[2].first_token < 35
