"""The simulator against queueing theory, conservation laws and runs that a reader can redo."""

from __future__ import annotations

import doctest
import itertools
import random
import statistics
from dataclasses import replace

import pytest

import minifer.simulation
import minifer.simulation.simulator
from minifer.config import POLICIES, EngineConfig
from minifer.simulation.cluster import Cluster, NodeSpec, identical
from minifer.simulation.keys import KeyTree
from minifer.simulation.simulator import simulate
from minifer.simulation.steps.times import DecodePrices, FittedSteps, FixedSteps, PrefillPrices
from minifer.simulation.workloads.arrivals import Arrival, Conversation

STEPS = FittedSteps(PrefillPrices(0.02, 1e-4, 1e-9), ((0, DecodePrices(0.02, 1e-4, 1e-7)),))


def engine(**options) -> EngineConfig:
    return EngineConfig(**{"block_size": 512, "num_kv_blocks": 400, **options})


def one_node(steps=STEPS, **options) -> Cluster:
    return Cluster((NodeSpec("n", steps, engine(**options)),))


def poisson(rate: float, count: int, seed: int, prompt=(20, 3000), output=(1, 60)) -> list[Arrival]:
    rng, now, rows = random.Random(seed), 0.0, []
    for i in range(count):
        now += rng.expovariate(rate)
        rows.append(Arrival(f"r{i}", now, rng.randint(*prompt), rng.randint(*output)))
    return rows


@pytest.mark.parametrize("module", [minifer.simulation, minifer.simulation.simulator])
def test_the_examples_are_true(module):
    found = doctest.testmod(module)
    assert found.attempted > 5 and found.failed == 0


# -- theory


def times_of_unit_jobs(load: float, count: int) -> list[float]:
    """M/D/1: one job at a time, each a step of one second. Checked against Lindley's recursion."""
    cluster = one_node(FixedSteps(1.0), max_num_seqs=1, enable_prefix_caching=False)
    rng = random.Random(f"{load} {count}")
    gaps = [rng.expovariate(load) for _ in range(count)]
    comes = itertools.accumulate(gaps)
    result = simulate([Arrival(str(i), t, 5, 1) for i, t in enumerate(comes)], cluster)
    waits = itertools.accumulate(gaps[1:], lambda wait, gap: max(0, wait + 1 - gap), initial=0.0)
    times = [record.ttft for record in result.requests]
    assert times == pytest.approx([wait + 1 for wait in waits], abs=1e-6)
    return times


@pytest.mark.parametrize(("load", "sigma"), [(0.3, 0.0035), (0.6, 0.0123)])
def test_s01_a_queue_waits_as_long_as_theory_says(load, sigma):
    """D + D · ρ / 2(1 − ρ). sigma: of the mean of so many jobs, from seed to seed."""
    theory = 1 + load / (2 * (1 - load))
    mean = statistics.fmean(times_of_unit_jobs(load, 20_000)[2000:])
    assert mean == pytest.approx(theory, rel=3 * sigma)


@pytest.mark.slow
@pytest.mark.parametrize(("load", "theory"), [(0.3, 1.214), (0.6, 1.75), (0.8, 3.0), (0.9, 5.5)])
def test_s01_at_every_load(load, theory):
    mean = statistics.fmean(times_of_unit_jobs(load, 400_000)[2000:])
    assert mean == pytest.approx(theory, rel=0.02)


@pytest.mark.parametrize("policy", POLICIES)
def test_s02_littles_law(policy):
    """Requests in the system on average = rate · mean time there. Exact, not only in the limit."""
    result = simulate(poisson(4, 300, 1), one_node(scheduling_policy=policy))
    changes = [(r.arrived, 1) for r in result.requests] + [(r.end, -1) for r in result.requests]
    inside, last, area = 0, 0.0, 0.0
    for now, change in sorted(changes):
        area += inside * (now - last)
        inside, last = inside + change, now
    assert inside == 0
    assert area == pytest.approx(sum(r.e2e for r in result.requests), rel=1e-9)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunked", [True, False])
def test_s02_every_request_is_served_once(policy, chunked):
    workload = poisson(5, 200, 2)
    options = {"scheduling_policy": policy, "enable_chunked_prefill": chunked}
    tight = {"num_kv_blocks": 24, "max_num_batched_tokens": 700}
    result = simulate(workload, one_node(**options, **tight))
    assert [r.request_id for r in result.requests] == [a.request_id for a in workload]
    for record, arrival in zip(result.requests, workload, strict=True):
        times = list(record.token_times)
        assert record.finished and len(times) == arrival.output_len
        assert times == sorted(set(times))
        assert arrival.time <= record.admitted < record.first_token == times[0]
        assert record.end == times[-1] <= result.seconds
        assert record.ttft >= STEPS.seconds([(arrival.prompt_len, arrival.prompt_len)]) - 1e-9
    node = result.nodes[0]
    computed = sum(a.prompt_len + a.output_len - 1 for a in workload)
    assert node.prefill_tokens + node.decode_tokens >= computed
    if not node.num_preemptions:
        assert node.prefill_tokens + node.decode_tokens == computed
    assert node.peak_kv_usage <= 1 and 0 < node.mean_kv_usage < 1
    assert node.busy_seconds <= result.seconds


def test_s02_the_order_does_not_change_when_all_is_done():
    """One node, whole prompts one by one: whatever the discipline, the last end is the same."""
    workload = poisson(3, 120, 3, prompt=(500, 40_000), output=(1, 1))
    ends = set()
    for policy in POLICIES:
        cluster = one_node(
            scheduling_policy=policy,
            enable_chunked_prefill=False,
            max_num_batched_tokens=1,
            max_num_seqs=1,
        )
        result = simulate(workload, cluster)
        ends.add(round(result.seconds, 6))
        assert result.nodes[0].busy_seconds == pytest.approx(
            sum(STEPS.seconds([(a.prompt_len, a.prompt_len)]) for a in workload)
        )
    assert len(ends) == 1


def test_s02_a_run_can_be_repeated():
    workload = poisson(6, 150, 4)
    cluster = Cluster(identical(3, STEPS, engine(num_kv_blocks=30)), router="power_of_two", seed=7)
    runs = [simulate(workload, cluster) for _ in range(2)]
    assert runs[0] == runs[1]
    assert simulate(workload, replace(cluster, seed=8)) != runs[0]


@pytest.mark.parametrize("prompt_len", [1, 511, 512, 513, 5000])
@pytest.mark.parametrize("chunked", [True, False])
def test_an_idle_node_takes_the_service_time(prompt_len, chunked):
    cluster = one_node(enable_chunked_prefill=chunked, max_num_batched_tokens=100_000)
    result = simulate([Arrival(str(i), 50.0 * i, prompt_len, 3) for i in range(4)], cluster)
    prefill = STEPS.seconds([(prompt_len, prompt_len)])
    decodes = [STEPS.seconds([(1, prompt_len + i)]) for i in (1, 2)]
    for record in result.requests:
        assert record.ttft == pytest.approx(prefill, abs=1e-9)
        assert record.gaps == pytest.approx(decodes, abs=1e-9)


def test_a_step_in_chunks_costs_its_fixed_part_again():
    result = simulate([Arrival("a", 0.0, 1000, 1)], one_node(max_num_batched_tokens=400))
    chunks = [(400, 400), (400, 800), (200, 1000)]
    assert result.requests[0].ttft == pytest.approx(sum(STEPS.seconds([c]) for c in chunks))


def test_more_nodes_serve_no_fewer():
    """Mean time to the first token falls with every node; at an overload it falls a lot."""
    workload = poisson(10, 250, 5, prompt=(500, 6000))
    times = []
    for count in (1, 2, 3, 4):
        result = simulate(workload, Cluster(identical(count, STEPS, engine())))
        times.append(statistics.fmean(r.ttft for r in result.requests))
    assert times == sorted(times, reverse=True)
    assert times[0] > 10 * times[3]


# -- one event for many steps


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("nodes", [1, 3])
def test_stretches_of_equal_steps_change_nothing(policy, nodes):
    """Answers of hundreds of tokens on little memory: stretches are cut by arrivals, ends, full
    blocks and preemptions."""
    workload = poisson(3 * nodes, 60 * nodes, 6, prompt=(20, 900), output=(1, 400))
    options = {"num_kv_blocks": 40, "block_size": 64, "scheduling_policy": policy}
    options |= {"mlfq_quantum": 64, "max_num_seqs": 12}
    cluster = Cluster(identical(nodes, STEPS, engine(**options)), router="least_load")
    short, long = (simulate(workload, cluster, coast=coast) for coast in (True, False))
    for a, b in zip(short.requests, long.requests, strict=True):
        assert a.token_times == b.token_times and a == b
    for a, b in zip(short.nodes, long.nodes, strict=True):
        assert (a.num_steps, a.num_preemptions) == (b.num_steps, b.num_preemptions)
        assert (a.prefill_tokens, a.decode_tokens) == (b.prefill_tokens, b.decode_tokens)
        assert a.busy_seconds == pytest.approx(b.busy_seconds)
        assert a.mean_kv_usage == pytest.approx(b.mean_kv_usage)
    assert sum(node.num_preemptions for node in short.nodes) > 0


def test_stretches_are_worth_it():
    """Fewer than a third of the steps are planned one by one."""
    from minifer.scheduling.scheduler import Scheduler

    planned = 0
    schedule = Scheduler.schedule

    def count(self):
        nonlocal planned
        planned += 1
        return schedule(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "schedule", count)
        result = simulate(poisson(1, 100, 7, prompt=(100, 900), output=(50, 400)), one_node())
    assert planned < result.nodes[0].num_steps / 3


# -- prefixes


def test_names_are_found_again():
    same = tuple(range(4))
    workload = [
        Arrival("first", 0.0, 2100, 5, same),
        Arrival("again", 100.0, 2100, 5, same),
        Arrival("longer", 200.0, 2700, 5, (*same, 9)),
        Arrival("other", 300.0, 2700, 5, (*same[:2], 7, 8, 9)),
        Arrival("unnamed", 400.0, 2100, 5),
        Arrival("exact", 500.0, 2048, 5, same),
    ]
    result = simulate(workload, one_node())
    assert [r.cached_len for r in result.requests] == [0, 2048, 2048, 1024, 0, 1536]


def test_a_turn_finds_the_answer_before_it():
    """What the second prompt's names say about the first answer is published with it."""
    first = Arrival("1", 0.0, 700, 400, (1,), session=5, turn=0)
    second = Arrival("2", 60.0, 1700, 10, (1, 2, 3), session=5, turn=1)
    for workload in ([first, second], [Conversation((first, second))]):
        assert simulate(workload, one_node()).requests[1].cached_len == 1024
    elsewhere = replace(second, session=6)
    assert simulate([first, elsewhere], one_node()).requests[1].cached_len == 512
    cut = replace(second, prompt_len=1050, block_names=(1, 2))  # it leaves out some of the answer
    assert simulate([first, cut], one_node()).requests[1].cached_len == 512


def test_coarse_blocks_find_less_than_a_block_less():
    """KV in blocks of 512 instead of 16 tokens: hits differ by less than 512 tokens a request."""
    rng, workload = random.Random(9), []
    trunk = [[1000 * t + i for i in range(200)] for t in range(4)]
    for i in range(80):
        shared = rng.choice(trunk)[: rng.randrange(0, 200)]
        own = [100_000 * (i + 1) + j for j in range(rng.randrange(1, 60))]
        names = (*shared, *own)
        prompt_len = 16 * len(names) + rng.randrange(16)
        workload.append(Arrival(str(i), 10.0 * i, prompt_len, rng.randrange(1, 40), names))
    cached = {}
    for P in (16, 512):
        cluster = one_node(block_size=P, num_kv_blocks=400_000 // P)
        result = simulate(workload, cluster, name_tokens=16)
        cached[P] = [record.cached_len for record in result.requests]
    assert sum(cached[16]) > 50_000
    assert all(
        0 <= fine - coarse < 512 for fine, coarse in zip(cached[16], cached[512], strict=True)
    )


def test_keys_may_be_kept_from_run_to_run():
    workload = [Arrival(str(i), float(i), 3000, 4, (1, 2, 3, i)) for i in range(20)]
    keys = KeyTree()
    runs = [simulate(workload, one_node(), keys=k) for k in (keys, keys, None)]
    assert runs[0] == runs[1] == runs[2]
    with pytest.raises(ValueError, match="keys must be of names of 16 tokens, got 512"):
        simulate(workload, one_node(), keys=keys, name_tokens=16)


# -- closed loop, horizon, stop


def test_turns_wait_for_answers_and_users_think():
    turns = tuple(Arrival(f"t{i}", 5.0 if i else 1.0, 100, 4) for i in range(3))
    result = simulate([Conversation(turns)], one_node(FixedSteps(0.5)))
    assert [r.arrived for r in result.requests] == [1.0, 1.0 + 2.0 + 5.0, 1.0 + 2 * 7.0]
    assert [r.e2e for r in result.requests] == [2.0] * 3


def test_the_horizon_ends_a_run():
    workload = poisson(2, 100, 8)
    whole = simulate(workload, one_node())
    for until in (0.0, 3.3, 17.0, whole.seconds / 2):
        cut = simulate(workload, one_node(), until=until)
        assert cut.stopped and cut.seconds == until
        assert len(cut.requests) == sum(a.time <= until for a in workload)
        for a, b in zip(cut.requests, whole.requests, strict=False):
            assert list(a.token_times) == [t for t in b.token_times if t <= until]
            assert a.end == (b.end if b.end <= until else None)
    late = simulate(workload, one_node(), until=1e9)
    assert late == whole and not late.stopped


def test_a_search_may_stop_a_run():
    workload = poisson(30, 400, 9)
    late = []

    def stop(record):
        late.extend([record.request_id] if record.ttft is not None and record.ttft > 2 else [])
        return len(late) >= 10

    result = simulate(workload, one_node(), stop=stop)
    assert result.stopped and len(late) == 10
    assert len(result.requests) < 400
    assert not simulate(workload, one_node(), stop=lambda record: False).stopped


def test_a_search_is_told_of_first_tokens_and_ends():
    told = []
    workload = [Arrival("a", 0.0, 10, 3), Arrival("b", 9.0, 10, 1)]
    cluster = one_node(FixedSteps(1.0))
    simulate(workload, cluster, stop=lambda r: told.append((r.request_id, r.end)))
    assert told == [("a", None), ("a", 3.0), ("b", None), ("b", 10.0)]


# -- what is refused


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ([Arrival("a", 0.0, 0, 1)], "prompt_len and output_len must be at least 1"),
        ([Arrival("a", 0.0, 1, 0)], "prompt_len and output_len must be at least 1"),
        ([Arrival("a", -1.0, 1, 1)], "time must be at least 0"),
        ([Arrival("a", 0.0, 1, 1), Arrival("a", 1.0, 1, 1)], "'a' is there twice"),
        ([Arrival("a", 0.0, 200_000, 5000)], "needs 204999 tokens of KV, node n has 204800"),
        ([Arrival("a", 0.0, 10, 1, stored_len=5)], "needs nodes with a store"),
        ([Conversation(())], "at least 1 turn"),
    ],
)
def test_what_cannot_be_served_is_refused(workload, message):
    with pytest.raises(ValueError, match=message):
        simulate(workload, one_node())


def test_an_empty_workload_is_no_error():
    result = simulate([], one_node())
    assert (result.requests, result.seconds, result.stopped) == ([], 0.0, False)
    assert result.utilisation("n") == 0
    with pytest.raises(ValueError, match="node must be one of n, got 'x'"):
        result.utilisation("x")


def test_block_sizes_must_fit_the_names():
    with pytest.raises(ValueError, match="block_size must divide 512"):
        simulate([], one_node(block_size=48))
