"""Nodes with roles, links between them, stores below them, and routers in front of them."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from minifer.config import EngineConfig
from minifer.routing.policy import Decision, Role
from minifer.simulation.cluster import Cluster, Link, NodeSpec, StoreLevel, identical
from minifer.simulation.rejection import DecodeLoad, PredictedTTFT
from minifer.simulation.simulator import simulate
from minifer.simulation.steps.times import DecodePrices, FittedSteps, FixedSteps, PrefillPrices
from minifer.simulation.workloads.arrivals import Arrival, Conversation

STEPS = FittedSteps(PrefillPrices(0.02, 1e-4), ((0, DecodePrices(0.02, 1e-4)),))
KV = 1e6  # bytes a token


def engine(**options) -> EngineConfig:
    return EngineConfig(**{"block_size": 512, "num_kv_blocks": 400, **options})


def node(name: str, role: Role = Role.MIXED, steps=STEPS, store=(), prefetch=False, **options):
    return NodeSpec(name, steps, engine(**options), role, store, prefetch)


def split(num_prefill: int, num_decode: int, link: Link = Link(), **options) -> Cluster:  # noqa: B008
    prefill = [node(f"p{i}", Role.PREFILL, **options) for i in range(num_prefill)]
    decode = [node(f"d{i}", Role.DECODE, **options) for i in range(num_decode)]
    return Cluster((*prefill, *decode), link=link, kv_bytes=KV)


def traffic(rate: float, count: int, seed: int = 0) -> list[Arrival]:
    rng, now, rows = random.Random(seed), 0.0, []
    for i in range(count):
        now += rng.expovariate(rate)
        rows.append(Arrival(str(i), now, rng.randint(10, 2000), rng.randint(1, 80)))
    return rows


# -- prefill here, decode there


def test_one_request_by_hand():
    """1,000 tokens are 0.12 s of prefill and 1 GB, which a link of 10 GB/s moves in 0.1 s."""
    cluster = split(1, 1, Link(10e9, latency=0.005))
    (record,) = simulate([Arrival("a", 1.0, 1000, 3)], cluster).requests
    arrives = 1.0 + 0.12 + 0.1 + 0.005
    decode = STEPS.seconds([(1, 1001)])
    assert record.path == ("p0", "d0")
    assert list(record.token_times) == pytest.approx([1.12, arrives + decode, arrives + 2 * decode])


def test_a_single_token_needs_no_decode_node():
    (record,) = simulate([Arrival("a", 0.0, 1000, 1)], split(1, 1)).requests
    assert record.path == ("p0",) and record.finished


def test_where_nobody_decodes_a_request_ends_with_its_first_token():
    (record,) = simulate([Arrival("a", 0.0, 1000, 50)], split(1, 0)).requests
    assert record.finished and list(record.token_times) == [pytest.approx(0.12)]


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_every_token_comes_once_and_in_order(num_prefill, num_decode):
    workload = traffic(6, 150)
    result = simulate(workload, split(num_prefill, num_decode, Link(5e9)))
    for record, arrival in zip(result.requests, workload, strict=True):
        times = list(record.token_times)
        assert record.finished and len(times) == arrival.output_len
        assert times == sorted(set(times))
        if arrival.output_len > 1:
            least = arrival.prompt_len * KV / 5e9 + 0.02
            assert times[1] - times[0] >= least - 1e-9
            assert [name[0] for name in record.path] == ["p", "d"]
    computed = {n.name[0]: 0 for n in result.nodes}
    for n in result.nodes:
        computed[n.name[0]] += n.prefill_tokens + n.decode_tokens
    assert computed["p"] == sum(a.prompt_len for a in workload)
    assert computed["d"] == sum(a.output_len - 1 for a in workload)


def test_all_of_a_tight_decode_node_comes_back():
    """Its KV fits a few requests: others wait with their KV at the door, some are preempted and
    compute their tokens again there."""
    workload = traffic(20, 100, seed=3)
    prefill = node("p", Role.PREFILL)
    decode = node("d", Role.DECODE, block_size=16, num_kv_blocks=300)
    result = simulate(workload, Cluster((prefill, decode), kv_bytes=KV))
    assert all(record.finished for record in result.requests)
    d = result.nodes[1]
    assert d.num_preemptions > 0 and d.prefill_tokens > 0
    assert d.peak_kv_usage > 0.95


def test_a_prefill_node_keeps_kv_until_it_is_sent():
    """Two prompts of 1,000 tokens, room for one of them: the second waits for the transfer."""
    link = Link(1e9)  # a second each
    cluster = Cluster(
        (node("p", Role.PREFILL, num_kv_blocks=2), node("d", Role.DECODE)), link=link, kv_bytes=KV
    )
    workload = [Arrival("a", 0.0, 1000, 2), Arrival("b", 0.0, 1000, 2)]
    a, b = simulate(workload, cluster).requests
    assert a.first_token == pytest.approx(0.12)
    assert b.admitted == pytest.approx(1.12)


def test_transfers_of_one_node_queue_unless_told_otherwise():
    """First tokens at 0.12 and 0.24 s, a transfer takes a second, then one decode."""
    workload = [Arrival("a", 0.0, 1000, 2), Arrival("b", 0.0, 1000, 2)]
    seconds = {}
    for queued in (True, False):
        result = simulate(workload, split(1, 1, Link(1e9, queued=queued)))
        seconds[queued] = [r.token_times[1] - r.token_times[0] for r in result.requests]
    assert seconds[False] == pytest.approx([1.02, 1.02], abs=0.001)
    assert seconds[True] == pytest.approx([1.02, 2.12 - 0.24 + 0.02], abs=0.001)


def test_s11_a_faster_link_never_hurts_and_soon_stops_helping():
    workload = traffic(4, 150, seed=1)
    tpot = []
    for bandwidth in (1e9, 3e9, 10e9, 100e9, 1000e9):
        result = simulate(workload, split(2, 1, Link(bandwidth)))
        tpot.append(statistics.fmean(r.tpot for r in result.requests if r.tpot is not None))
    assert tpot == sorted(tpot, reverse=True)
    assert tpot[0] > 2 * tpot[-1] and tpot[-2] < 1.02 * tpot[-1]


def test_the_decode_router_sees_what_is_on_its_way():
    """Three requests at once for three decode nodes: each gets one, although none is there yet."""
    workload = [Arrival(str(i), 0.0, 100, 5) for i in range(3)]
    result = simulate(workload, split(3, 3, Link(1e9)))
    assert sorted(r.path[1] for r in result.requests) == ["d0", "d1", "d2"]


# -- what the router sees


class Spy:
    """Sends everything to the first node, and writes down what it was told."""

    def __init__(self):
        self.seen = []

    def choose(self, request, replicas, matched):
        self.seen.append((request, [*replicas], dict(matched)))
        return Decision(replicas[0].name, matched[replicas[0].name], "spy")


def spied(workload, nodes, **options):
    spy = Spy()
    simulate(workload, Cluster(nodes, router=lambda: spy, kv_bytes=KV, **options))
    return spy.seen


def test_the_router_sees_backlogs_that_shrink_with_time():
    """A prompt of 10,000 tokens is 1.02 s of work, a quarter of which is done after 0.255 s."""
    workload = [Arrival("a", 0.0, 10_000, 1), Arrival("b", 0.255, 100, 1), Arrival("c", 9.0, 1, 1)]
    options = {"enable_chunked_prefill": False}
    seen = spied(workload, (node("x", **options), node("y", **options)))
    first, second, third = ([s.prefill_seconds for s in states] for _, states, _ in seen)
    assert first == [0, 0]
    assert second == pytest.approx([1.02 * 0.75, 0])
    assert third == [0, 0]
    assert [s.prefill_tokens for s in seen[1][1]] == [10_000, 0]
    assert [s.num_requests for s in seen[1][1]] == [1, 0]


def test_the_router_sees_who_decodes_and_how_full_a_node_is():
    workload = [Arrival("a", 0.0, 1000, 500), Arrival("b", 1.0, 100, 1)]
    seen = spied(workload, (node("x", num_kv_blocks=10), node("y")))
    x, y = seen[1][1]
    assert (x.decode_blocks, x.kv_usage) == (3, 0.3)
    assert (y.decode_blocks, y.kv_usage) == (0, 0.0)


def test_the_router_sees_what_each_node_holds():
    names = (1, 2, 3)
    workload = [Arrival("a", 0.0, 1600, 1, names), Arrival("b", 9.0, 1600, 1, (*names[:2], 7))]
    seen = spied(workload, (node("x"), node("y")))
    assert [matched for _, _, matched in seen] == [{"x": 0, "y": 0}, {"x": 1024, "y": 0}]
    request = seen[1][0]
    assert (request.num_tokens, request.prefix_keys, request.block_size) == (1600, (1, 2, 7), 512)


def test_prefix_affinity_finds_more_than_round_robin():
    rng = random.Random(4)
    chats = []
    for i in range(30):
        names, length, turns = [], 0, []
        for turn in range(6):
            length += rng.randint(600, 1500)
            while len(names) < length // 512:
                names.append(1000 * i + len(names))
            turns.append(
                Arrival(f"{i}.{turn}", rng.uniform(1, 9), length, 40, tuple(names), session=i + 1)
            )
            length += 40
        chats.append(Conversation(tuple(turns)))
    hits = {}
    for router in ("round_robin", "prefix_affinity"):
        cluster = Cluster(identical(3, STEPS, engine()), router=router)
        result = simulate(chats, cluster)
        hits[router] = sum(r.cached_len for r in result.requests)
    assert hits["prefix_affinity"] > 1.4 * hits["round_robin"]


# -- below the device


STORE = StoreLevel("dram", 100_000, 10e9, latency=0.01)


def test_what_is_stored_by_assumption_is_loaded_before_the_first_chunk():
    """10,000 of 12,000 tokens are there: 10 GB at 10 GB/s, and 0.01 s; then 0.02 + 0.2 s."""
    workload = [Arrival("a", 0.0, 12_000, 1, stored_len=10_000)]
    level = StoreLevel("cluster", 0, 10e9, latency=0.01)
    result = simulate(
        workload, Cluster((node("n", store=(level,), max_num_batched_tokens=4096),), kv_bytes=KV)
    )
    (record,) = result.requests
    assert record.ttft == pytest.approx(1.01 + 0.22)
    assert (record.loaded_len, record.cached_len, record.reused_len) == (10_000, 0, 10_000)
    assert result.nodes[0].load_seconds == pytest.approx(1.01)
    assert result.nodes[0].prefill_tokens == 2_000


def test_one_token_is_always_left_to_compute():
    level = StoreLevel("cluster", 0, math.inf)
    for stored in (1999, 2000, 3000):
        workload = [Arrival("a", 0.0, 2000, 1, stored_len=stored)]
        result = simulate(workload, Cluster((node("n", store=(level,)),), kv_bytes=KV))
        assert result.requests[0].loaded_len == 1999


def loaded(*nodes: NodeSpec, router="round_robin") -> list[tuple[str, int, int]]:
    """(node, found on the device, loaded) of the same long prompt again and again."""
    names = tuple(range(8))
    workload = [Arrival(str(i), 10.0 * i, 4100, 1, names) for i in range(4)]
    result = simulate(workload, Cluster(nodes, router=router, kv_bytes=KV))
    return [(r.path[0], r.cached_len, r.loaded_len) for r in result.requests]


def test_a_store_of_ones_own_brings_back_what_the_device_lost():
    """The device holds nine blocks, the prompt fills nine: nothing of it is left next time."""
    other = [Arrival("x", 5.0, 4100, 1, tuple(range(100, 108)))]
    names = tuple(range(8))
    workload = [Arrival("a", 0.0, 4100, 1, names), *other, Arrival("b", 10.0, 4100, 1, names)]
    for store, expected in (((), 0), ((STORE,), 4096)):
        cluster = Cluster((node("n", store=store, num_kv_blocks=9),), kv_bytes=KV)
        assert simulate(workload, cluster).requests[2].loaded_len == expected


def test_a_shared_store_serves_what_another_node_computed():
    own = (STORE,)
    shared = (StoreLevel("cluster", 100_000, 10e9, shared=True),)
    assert loaded(node("x", store=own), node("y", store=own)) == [
        ("x", 0, 0),
        ("y", 0, 0),
        ("x", 4096, 0),
        ("y", 4096, 0),
    ]
    assert loaded(node("x", store=shared), node("y", store=shared))[1] == ("y", 0, 4096)


def test_the_least_recently_used_leaves_a_level_first():
    level = StoreLevel("dram", 3 * 4096, 10e9)
    prompts = {name: tuple(range(100 * i, 100 * i + 8)) for i, name in enumerate("abcd")}
    order = "abcadbac"  # d pushes b out; b then pushes c out
    workload = [
        Arrival(f"{i}{name}", 10.0 * i, 4100, 1, prompts[name]) for i, name in enumerate(order)
    ]
    cluster = Cluster((node("n", store=(level,), num_kv_blocks=9),), kv_bytes=KV)
    found = [r.loaded_len for r in simulate(workload, cluster).requests]
    assert found == [0, 0, 0, 4096, 0, 0, 4096, 0]


def test_a_hit_below_moves_up():
    """Three nodes with small DRAM over one big cluster level: the second load is the fast one."""
    fast, slow = StoreLevel("dram", 8192, 100e9), StoreLevel("all", 10**6, 1e9, shared=True)
    nodes = [node(n, store=(fast, slow), num_kv_blocks=9) for n in "xy"]
    names, other = tuple(range(8)), tuple(range(50, 58))
    workload = [
        Arrival("computed on x", 0.0, 4100, 1, names),
        Arrival("slow on y", 20.0, 4100, 1, names),
        Arrival("on x", 40.0, 4100, 1, other),
        Arrival("evicts on y", 60.0, 4100, 1, other),
        Arrival("on x again", 80.0, 4100, 1, other),
        Arrival("fast on y", 100.0, 4100, 1, names),
    ]
    result = simulate(workload, Cluster(tuple(nodes), router="round_robin", kv_bytes=KV))
    ttft = {r.request_id: r.ttft for r in result.requests}
    assert ttft["slow on y"] == pytest.approx(4.096 + 0.0204)
    assert ttft["fast on y"] == pytest.approx(0.04096 + 0.0204)


def test_prefetching_lets_others_compute_meanwhile():
    """One second of loading, for the first of two; then one of loading for a third."""
    level = StoreLevel("cluster", 0, 10e9)
    workload = [
        Arrival("loads", 0.0, 10_100, 1, stored_len=10_000),
        Arrival("computes", 0.001, 1000, 1),
        Arrival("loads too", 0.002, 10_100, 1, stored_len=10_000),
    ]
    ttft = {}
    for prefetch in (False, True):
        cluster = Cluster((node("n", store=(level,), prefetch=prefetch),), kv_bytes=KV)
        result = simulate(workload, cluster)
        assert [r.loaded_len for r in result.requests] == [10_000, 0, 10_000]
        ttft[prefetch] = [r.ttft for r in result.requests]
    assert ttft[False] == pytest.approx([1.03, 1.03 + 1.13, 1.03 + 1.13], abs=0.01)
    assert ttft[True] == pytest.approx([1.03, 0.12, 2.03], abs=0.01)


# -- cold and warm prompts apart


def test_cold_prompts_go_to_their_own_nodes_and_their_kv_comes_back_warm():
    """The second turn is warm everywhere, because the store is shared."""
    shared = (StoreLevel("cluster", 10**6, 50e9, shared=True),)
    nodes = (node("cold", Role.PRE_PREFILL, store=shared), node("warm", Role.PREFILL, store=shared))
    names = tuple(range(40))
    workload = [
        Arrival("turn 1", 0.0, 20_000, 1, names[:39]),
        Arrival("turn 2", 10.0, 20_500, 1, names),
        Arrival("short", 20.0, 100, 1),
    ]
    result = simulate(workload, Cluster(nodes, router="cold_warm", kv_bytes=70_000))
    assert [r.path for r in result.requests] == [("cold",), ("warm",), ("warm",)]
    assert result.requests[1].loaded_len == 39 * 512


# -- turning away


def test_who_would_wait_too_long_is_refused():
    workload = traffic(40, 300, seed=2)
    everybody = simulate(workload, Cluster((node("n"),)))
    some = simulate(workload, Cluster((node("n"),), rejection=PredictedTTFT(1.0)))
    assert max(r.ttft for r in everybody.requests) > 5
    assert 0 < len(some.rejected) < 300
    for record in some.rejected:
        assert record.rejected == "ttft" and record.end == record.arrived and not record.path
        assert not record.finished and record.e2e is None and record.ttft is None
    assert max(r.ttft for r in some.finished) < 2.5
    assert len(some.finished) + len(some.rejected) == 300


def test_a_user_who_is_refused_asks_nothing_more():
    turns = tuple(Arrival(f"t{i}", 0.0, 100, 3) for i in range(3))
    result = simulate([Conversation(turns)], Cluster((node("n"),), rejection=PredictedTTFT(0.01)))
    assert [r.request_id for r in result.requests] == ["t0"]


def decode_loads(rejection) -> list[int]:
    """Requests that decode, once a second: about twice as many come as are let in.

    Eight seconds of prefill on 32 nodes, nine seconds of decoding on one.
    """
    rng, now, rows = random.Random(5), 0.0, []
    while now < 200:
        now += rng.expovariate(4)
        rows.append(Arrival(str(len(rows)), now, 2_000, 400))
    prefill = identical(32, FixedSteps(8.0), engine(max_num_seqs=1), role=Role.PREFILL)
    nodes = (*prefill, node("d", Role.DECODE))
    cluster = Cluster(nodes, router="least_load", kv_bytes=KV, rejection=rejection)
    requests = simulate(rows, cluster, until=200).requests
    lives = [(r.first_token, r.end or 1e9) for r in requests if r.first_token is not None]
    return [sum(first <= t < end for first, end in lives) for t in range(40, 190)]


def test_the_load_of_now_swings_and_the_predicted_one_does_not():
    """Prefill takes long, so the decode load of now lags behind what was let in (Mooncake)."""
    naive = decode_loads(DecodeLoad(20))
    predicted = decode_loads(DecodeLoad(20, decode_seconds=9.0))
    assert max(naive) > 1.4 * max(predicted) and min(naive) < 0.3 * min(predicted)
    assert statistics.pstdev(naive) > 4 * statistics.pstdev(predicted)


# -- what is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cluster(()), "at least one"),
        (lambda: Cluster((node("a"), node("a"))), "different names"),
        (lambda: Cluster((node("a", Role.DECODE),)), "one that prefills"),
        (lambda: Cluster((node("a"),), router="nearest"), "router must be one of"),
        (lambda: Cluster((node("a"),), kv_bytes=-1), "kv_bytes must be at least 0"),
        (lambda: Link(0), "bandwidth must be above 0"),
        (lambda: Link(1, latency=-1), "latency must be at least 0"),
        (lambda: StoreLevel("x", -1, 1), "capacity must be at least 0"),
        (lambda: StoreLevel("x", 1, 0), "bandwidth must be above 0"),
        (lambda: NodeSpec("n", STEPS, EngineConfig()), "needs num_kv_blocks"),
        (lambda: node("n", speculative_method="ngram"), 'must have speculative_method="none"'),
    ],
)
def test_what_cannot_be_simulated_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
