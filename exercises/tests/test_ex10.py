"""Tests of exercises 10. The truths: published examples, sums in fractions, every case tried, the
simulator asked again."""

from __future__ import annotations

import functools
import math
import random
import re
from fractions import Fraction

import pytest

from minifer.config import EngineConfig
from minifer.course.grading import compare, points, probe, unchanged
from minifer.routing.policy import Role
from minifer.simulation.cluster import Cluster, NodeSpec, StoreLevel
from minifer.simulation.simulator import simulate
from minifer.simulation.steps.named import find_steps
from minifer.simulation.workloads.generator import cold_warm

ALLOWED_IMPORTS = {
    "10.4": ("minifer.simulation", "minifer.routing.policy", "minifer.config")
}


def replica(name, waiting=0, decoding=0, healthy=True):
    return {
        "name": name,
        "healthy": healthy,
        "waiting": waiting,
        "decoding": decoding,
    }


WORKERS = [replica("w1", 0, 10), replica("w2", 0, 5), replica("w3", 0, 9)]
MATCHED = {"w1": 32, "w2": 80, "w3": 128}


def score(target, num_tokens, matched, replicas, weight, block_size):
    tried = f"cheapest({num_tokens}, {matched}, {replicas}, {weight}, {block_size})"
    with unchanged(tried, matched=matched, replicas=replicas):
        return target.cheapest(num_tokens, matched, replicas, weight, block_size), tried


@points("10.1", 1)
def test_ex10_1_the_documented_example(target):
    got, tried = score(target, 160, MATCHED, WORKERS, 1.0, 16)
    compare(got, ("w2", 10.0), tried)
    got, tried = score(target, 160, MATCHED, WORKERS, 3.0, 16)
    compare(got, ("w3", 15.0), tried)
    got, tried = score(target, 160, MATCHED, WORKERS[:1], 1.0, 16)
    compare(got, ("w1", 18.0), tried)


@points("10.1", 2)
def test_ex10_1_costs_of_random_replicas(target, rng):
    for count in (1, 2, 3, 5, 8, 8, 8, 8):
        num_tokens, block_size = rng.randrange(1, 3_000), rng.choice([8, 16, 64])
        weight = rng.choice([0.25, 0.5, 1.0, 2.0])
        replicas = [
            replica(f"n{i}", rng.randrange(3_000), rng.randrange(150))
            for i in range(count)
        ]
        matched = {
            one["name"]: rng.randrange(num_tokens + 1)
            for one in replicas
            if rng.random() < 0.7
        }
        costs = {}
        for one in replicas:
            prefill = one["waiting"] + num_tokens - matched.get(one["name"], 0)
            costs[one["name"]] = (
                Fraction(weight) * prefill / block_size + one["decoding"]
            )
        best = min(costs, key=costs.__getitem__)
        got, tried = score(target, num_tokens, matched, replicas, weight, block_size)
        compare(got, (best, float(costs[best])), tried, atol=1e-9)


@points("10.1", 1)
def test_ex10_1_only_healthy_ones_and_of_equals_the_first(target):
    sick = [replica("a", healthy=False), replica("b", 16, 3), replica("c", 0, 4)]
    got, tried = score(target, 32, {"a": 32}, sick, 1.0, 16)
    compare(got, ("b", 6.0), tried)
    for replicas in ([], [replica("a", healthy=False)]):
        try:
            got, tried = score(target, 32, {}, replicas, 1.0, 16)
        except ValueError:
            continue
        raise AssertionError(
            f"tried     {tried}\ngot       {got!r}\nexpected  ValueError"
        )


@points("10.1", 1)
def test_ex10_1_a_match_is_at_most_the_prompt(target):
    two = [replica("a", 0, 2), replica("b", 0, 1)]
    got, tried = score(target, 32, {"a": 96, "b": 32}, two, 1.0, 16)
    compare(got, ("b", 1.0), tried)
    got, tried = score(target, 30, {"z": 30}, two, 1.0, 16)
    compare(got, ("b", 2.875), tried)


NAMES = ["x", "y", "z", "u", "v"]


def preferred(target, prefix, names, matched, enough):
    tried = f"preference({prefix!r}, {names}, {matched}, {enough})"
    with unchanged(tried, names=names, matched=matched):
        return list(target.preference(prefix, names, matched, enough)), tried


def truth_order(target, prefix, names, matched, enough):
    """By counting who is before whom, without a sort."""
    hashes = {name: target.weight_of(prefix, name) for name in names}

    def before(a, b):
        held = [
            matched.get(n, 0) if matched.get(n, 0) >= enough else -1 for n in (a, b)
        ]
        if held[0] != held[1]:
            return held[0] > held[1]
        return hashes[a] > hashes[b]

    places = {name: sum(before(o, name) for o in names if o != name) for name in names}
    return [next(n for n in names if places[n] == i) for i in range(len(names))]


@points("10.2", 1)
def test_ex10_2_who_holds_most_comes_first(target, rng):
    for matched, enough in (
        ({}, 1),
        ({"y": 30, "v": 50, "x": 9}, 10),
        ({"y": 10, "z": 10, "u": 9}, 10),
        ({"x": 5, "y": 90}, 91),
        ({"y": 1}, 1),
        ({"y": 1, "u": 0, "v": 0}, 1),
        ({"x": 0, "y": 0}, 1),
        ({"x": 0, "y": 0, "z": 0}, 1),
    ):
        prefix = f"prompt {rng.randrange(10**6)}"
        got, tried = preferred(target, prefix, NAMES, matched, enough)
        compare(got, truth_order(target, prefix, NAMES, matched, enough), tried)


@points("10.2", 1)
def test_ex10_2_a_new_replica_takes_its_share_and_moves_nobody_else(target, rng):
    homes = moved = 0
    for i in range(300):
        prefix = f"{rng.randrange(10**9)}/{i}"
        (before, *_), _ = preferred(target, prefix, NAMES[:4], {}, 1)
        (after, *_), _ = preferred(target, prefix, NAMES, {}, 1)
        moved += after != before
        homes += after == NAMES[4]
    compare(moved - homes, 0, "homes that moved to another replica than the new one")
    compare(20 <= moved <= 110, True, f"of 300 homes about a fifth moves, {moved} did")


def placed(target, order, loads, factor):
    tried = f"place({order}, {loads}, {factor})"
    with unchanged(tried, order=order, loads=loads):
        return target.place(order, loads, factor), tried


@points("10.2", 1)
def test_ex10_2_the_bound_by_hand(target):
    cases = [
        (["x", "y", "z"], {"x": 5, "y": 1, "z": 0}, 1.25, "y"),
        (["x", "y", "z"], {"x": 3, "y": 2, "z": 1}, 1.25, "y"),  # ⌈2.92⌉ = 3
        (["x", "y"], {"x": 1, "y": 0}, 1.0, "y"),  # 1 each
        (["x", "y"], {"x": 1, "y": 1}, 1.0, "x"),  # ⌈1.5⌉ = 2
        (["y", "x"], {"x": 0, "y": 0}, 1.0, "y"),
        (["x", "y"], {"x": 900, "y": 0}, math.inf, "x"),
        (["x", "y", "z", "u"], {"x": 4, "y": 3, "z": 3, "u": 1}, 1.5, "y"),  # 4.5
    ]
    cases[-1] = (["x", "y", "z", "u"], {"x": 5, "y": 5, "z": 4, "u": 0}, 1.25, "z")
    for order, loads, factor, expected in cases:
        got, tried = placed(target, order, loads, factor)
        compare(got, expected, tried)


@points("10.2", 2)
def test_ex10_2_nobody_ever_has_more(target, rng):
    for factor in (1.0, 1.25, 1.5, 2.0):
        loads = dict.fromkeys(NAMES[: rng.choice([2, 4])], 0)
        for _ in range(60):
            order = list(loads)
            rng.shuffle(order)
            if rng.random() < 0.7:  # a popular one
                order.sort(key=lambda name: name != "x")
            total = sum(loads.values()) + 1
            limit = -(-Fraction(factor) * total // len(loads))
            expected = next(name for name in order if loads[name] + 1 <= limit)
            got, tried = placed(target, order, loads, factor)
            compare(got, expected, tried)
            loads[got] += 1
            if rng.random() < 0.3:
                loads[rng.choice([n for n in loads if loads[n]])] -= 1


def source(name, held, bandwidth, latency=0.0, backlog=0):
    return {
        "name": name,
        "held": held,
        "bandwidth": bandwidth,
        "latency": latency,
        "backlog": backlog,
    }


def flat(new, cached):
    return new * 0.001


def exact(new, cached):
    return new / 1024


def quadratic(new, cached):
    """Attention: what is cached is attended to."""
    return 0.002 + new * 2.5e-4 + 1e-7 * new * (new + 2 * cached)


def decided(target, num_tokens, local, sources, kv_bytes, seconds):
    tried = f"fetch_or_compute({num_tokens}, {local}, {sources}, {kv_bytes}, {seconds.__name__})"
    with unchanged(tried, sources=sources):
        return target.fetch_or_compute(
            num_tokens, local, sources, kv_bytes, seconds
        ), tried


@points("10.3", 1)
def test_ex10_3_the_example_and_its_break_even(target):
    for bandwidth, expected in ((8e9, ("peer", 0.28)), (0.8e9, (None, 1.0))):
        sources = [source("peer", 800, bandwidth)]
        got, tried = decided(target, 1_000, 0, sources, 100_000, flat)
        compare(got, expected, tried, atol=1e-9)
    sources = [
        source("far", 800, 8e9, latency=0.9),
        source("busy", 800, 8e9, backlog=10**9),
    ]
    got, tried = decided(target, 1_000, 0, sources, 100_000, flat)
    compare(got, (None, 1.0), tried, atol=1e-9)


@points("10.3", 2)
def test_ex10_3_random_sources(target, rng):
    for count in (0, 1, 2, 4, 4, 4, 4, 4, 4, 4):
        num_tokens = rng.randrange(200, 9_000)
        local = rng.choice([0, rng.randrange(num_tokens)])
        kv_bytes = rng.choice([70_000, 131_072])
        sources = [
            source(
                f"s{i}",
                rng.randrange(num_tokens + 1),
                rng.choice([1e9, 1e10, 1e11]),
                rng.choice([0.0, 0.01, 0.2]),
                rng.choice([0, 10**8]),
            )
            for i in range(count)
        ]
        times = {None: quadratic(num_tokens - local, local)}
        for one in sources:
            useful = range(local + 1, min(one["held"], num_tokens - 1) + 1)
            if useful:
                sent = len(useful) * kv_bytes + one["backlog"]
                rest = quadratic(num_tokens - useful[-1], useful[-1])
                times[one["name"]] = (
                    one["latency"] + sent / (one["bandwidth"] / 8) + rest
                )
        best = min(times, key=times.__getitem__)
        got, tried = decided(target, num_tokens, local, sources, kv_bytes, quadratic)
        compare(got, (best, times[best]), tried, atol=1e-9)


@points("10.3", 1)
def test_ex10_3_the_last_token_nothing_new_and_ties(target):
    # 1 byte a token at 1,024 bytes a second, which is how fast it computes: 100 tokens sent and the
    # last one computed take as long as computing all.
    got, tried = decided(target, 101, 0, [source("a", 101, 8192)], 1, exact)
    compare(got, (None, 101 / 1024), tried, atol=1e-12)
    got, tried = decided(target, 101, 0, [source("a", 101, 16_384)], 1, exact)
    compare(got, ("a", 51 / 1024), tried, atol=1e-12)
    behind = [source("a", 60, 8e12), source("b", 40, 8e12)]
    got, tried = decided(
        target, 101, 60, behind, 1_000, lambda new, cached: 1.0 + cached
    )
    compare(got, (None, 61.0), tried, atol=1e-9)
    twins = [source("b", 50, 8e12), source("a", 50, 8e12)]
    got, tried = decided(target, 101, 0, twins, 0, flat)
    compare(got, ("b", 0.051), tried, atol=1e-9)


# -- 10.4


@functools.cache
def truth_run(kind, rate, cold_share, seed):
    """(cold, seconds) of each request, simulated here."""
    engine = EngineConfig(
        block_size=4096,
        num_kv_blocks=60,
        max_num_batched_tokens=262_144,
        max_num_seqs=1,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
    )
    first = Role.PREFILL if kind == "equal" else Role.PRE_PREFILL
    store = (StoreLevel("cluster", 0, bandwidth=50e9),)
    steps = find_steps("cold-warm")
    nodes = tuple(
        NodeSpec(f"node{i}", steps, engine, role, store)
        for i, role in enumerate((first, Role.PREFILL))
    )
    router = "least_work" if kind == "equal" else "cold_warm"
    traffic = cold_warm(rate, 600.0, seed=seed, cold_share=cold_share)
    cluster = Cluster(nodes, router=router, kv_bytes=70_272)
    return tuple(
        (record.turn == 0, record.ttft)
        for record in simulate(traffic, cluster).requests
    )


def in_time(rows):
    return sum(seconds <= (10.0 if cold else 1.0) for cold, seconds in rows)


def truth_carried(rows, each):
    groups = (
        [[r for r in rows if r[0]], [r for r in rows if not r[0]]] if each else [rows]
    )
    return all(Fraction(in_time(g), len(g)) >= Fraction(9, 10) for g in groups if g)


def rows_of(warm, late_warm, cold, late_cold):
    return (
        *[(False, 0.5)] * (warm - late_warm),
        *[(False, 1.25)] * late_warm,
        *[(True, 9.0)] * (cold - late_cold),
        *[(True, 11.0)] * late_cold,
    )


@points("10.4", 1)
def test_ex10_4_when_a_run_is_carried(target, rng):
    cases = [(90, 9, 10, 1), (90, 9, 10, 2), (90, 2, 10, 5), (90, 10, 10, 0), (90, 9, 0, 0),
             (0, 0, 10, 1), (0, 0, 10, 2), (90, 0, 10, 10), (90, 0, 10, 9)]  # fmt: skip
    cases += [
        (n, rng.randrange(n // 5), m, rng.randrange(m // 4))
        for n, m in ((rng.randrange(20, 200), rng.randrange(8, 40)) for _ in range(20))
    ]
    for case in cases:
        rows = list(rows_of(*case))
        rng.shuffle(rows)
        for each in (False, True):
            tried = "carried of {} warm requests ({} late) and {} cold ones ({} late), each={}".format(
                *case, each
            )
            got = target.carried(tuple(rows), each)
            compare(got, truth_carried(rows, each), tried)
    exact = ((False, 1.0),) * 9 + ((True, 10.0),)
    compare(target.carried(exact, True), True, f"carried({exact}, True)")
    slow = ((False, 3.0),) * 9 + ((True, 3.0),)
    compare(target.carried(slow, False), False, f"carried({slow}, False)")


@points("10.4", 2)
def test_ex10_4_the_highest_rate_that_is_carried(target):
    def world(good, asked):
        def run(kind, rate, cold_share, seed):
            asked.append((kind, rate, cold_share, seed))
            share = good[rate] if kind == "apart" else 0
            return rows_of(80, 0 if share else 60, 20, 0 if share == 2 else 5)

        return run

    rates = [0.5, 1.0, 1.5, 2.0]
    for good, each, expected, calls in (
        ({0.5: 2, 1.0: 2, 1.5: 0, 2.0: 0}, False, 1.0, 3),
        ({0.5: 2, 1.0: 0, 1.5: 2, 2.0: 2}, False, 0.5, 2),
        ({0.5: 0, 1.0: 2, 1.5: 2, 2.0: 2}, False, 0.0, 1),
        ({0.5: 2, 1.0: 2, 1.5: 2, 2.0: 2}, False, 2.0, 4),
        ({0.5: 2, 1.0: 1, 1.5: 1, 2.0: 1}, True, 0.5, 2),
        ({0.5: 2, 1.0: 1, 1.5: 1, 2.0: 1}, False, 2.0, 4),
    ):
        asked = []
        tried = f'sustained("apart", {rates}, 0.2, 7, {each}, run), a world that carries {good}'
        got = target.sustained("apart", rates, 0.2, 7, each, world(good, asked))
        compare(got, expected, tried)
        expected_calls = [("apart", rate, 0.2, 7) for rate in rates[:calls]]
        compare(asked, expected_calls, tried + " → its calls of run")
    got = target.sustained(
        "equal", rates, 0.2, 7, False, world(dict.fromkeys(rates, 2), [])
    )
    compare(got, 0.0, 'sustained("equal", …) in a world that carries "apart" alone')


def confirmed(rates, kind, rate, cold_share, seed, each, where):
    """Is `rate` carried, and the next one not?"""
    at = [i for i, r in enumerate(rates) if abs(r - rate) < 1e-9]
    compare(len(at), 1, f"{where}: {rate!r} is one of RATES")
    higher = rates[at[0] + 1 :][:1]
    for tried, expected in ((rate, True), *((r, False) for r in higher)):
        rows = truth_run(kind, tried, cold_share, seed)
        compare(
            truth_carried(rows, each),
            expected,
            f"{where}: {kind}, {tried} requests/s, cold_share={cold_share}, seed {seed}, "
            f"each={each}: carried",
        )


RATES = [0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8]


def number(value, where):
    plain = type(value) in (int, float)
    compare(plain, True, f"{where} is a number, got {value!r}")
    return value


@points("10.4", 1)
def test_ex10_4_the_gains_are_those_of_the_simulator(target):
    report = target.report()
    compare(type(report) is dict, True, "report() is a dict")
    for key in ("equal", "apart", "gains"):
        compare(
            len(report[key]),
            5,
            f"report()[{key!r}] has a number for each seed: how many",
        )
    for seed, equal, apart, gain in zip(
        range(1, 6), report["equal"], report["apart"], report["gains"], strict=True
    ):
        for kind, rate in (("equal", equal), ("apart", apart)):
            number(rate, f"report()[{kind!r}]")
            confirmed(RATES, kind, rate, 0.1, seed, False, f"report()[{kind!r}]")
        number(gain, 'report()["gains"]')
        compare(
            gain,
            round(apart / equal - 1, 2),
            f'report()["gains"], seed {seed}',
            atol=1e-6,
        )


@points("10.4", 2)
def test_ex10_4_where_it_vanishes_and_why(target):
    report = target.report()
    compare(type(report) is dict, True, "report() is a dict")
    there = report["vanishes"]
    share, each = number(there["cold_share"], "cold_share"), there["each"]
    compare(
        type(each) is bool,
        True,
        f'report()["vanishes"]["each"] is a bool, got {each!r}',
    )
    compare(
        0 <= share <= 1,
        True,
        f'report()["vanishes"]["cold_share"] is in [0, 1], got {share}',
    )
    for kind in ("equal", "apart"):
        rate = number(there[kind], f'report()["vanishes"][{kind!r}]')
        if kind == "apart" and rate == 0:
            rows = truth_run(kind, RATES[0], share, 1)
            compare(
                truth_carried(rows, each),
                False,
                f"apart, {RATES[0]} requests/s: carried",
            )
        else:
            confirmed(
                RATES, kind, rate, share, 1, each, f'report()["vanishes"][{kind!r}]'
            )
    compare(there["equal"] > 0, True, "equal sustains some rate there")
    gone = there["apart"] <= there["equal"]
    compare(
        gone,
        True,
        f"apart ({there['apart']}) sustains no more than equal ({there['equal']})",
    )
    because = report["because"]
    compare(type(because) is str, True, 'report()["because"] is a string')
    count = len(because.split())
    compare(
        20 <= count <= 120,
        True,
        f'report()["because"] has 20 to 120 words, it has {count}',
    )
    names_the_highest(because, max(report["gains"]))


def names_the_highest(because, gain):
    highest = f"{gain:.0%}"[:-1]
    spaces = " \N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}"
    if not re.search(rf"(?<![\d.,]){highest}[{spaces}]?%", because):
        raise AssertionError(
            'tried     report()["because"]\n'
            f"got       {because!r}\n"
            f"expected  the highest of your gains in digits and with the sign: {highest} % or {highest}%"
        )


# -- probes


@probe("10.1")
def probe_score(target):
    rng = random.Random(1)
    out = []
    for _ in range(12):
        replicas = [replica(n, rng.randrange(900), rng.randrange(60)) for n in "abc"]
        matched = {n: rng.randrange(500) for n in "ab"}
        out.append(target.cheapest(700, matched, replicas, 0.5, 16))
    return out


@probe("10.1")
def probe_score_edges(target):
    two = [replica("a", 0, 2), replica("b", 0, 1)]
    return [
        target.cheapest(32, {"a": 96, "b": 32}, two, 1.0, 16),
        target.cheapest(32, {"a": 16}, two, 1.0, 16),
        target.cheapest(32, {}, [replica("a", healthy=False), *two], 1.0, 16),
    ]


@probe("10.1")
def probe_score_nobody(target):
    return target.cheapest(32, {}, [replica("a", healthy=False)], 1.0, 16)


@probe("10.2")
def probe_preference(target):
    matched = {"y": 10, "z": 10, "u": 9, "x": 30}
    return [target.preference(f"p{i}", NAMES, matched, 10) for i in range(6)]


@probe("10.2")
def probe_homes(target):
    return [target.preference(f"p{i}", NAMES[:4], {}, 1)[0] for i in range(20)]


@probe("10.2")
def probe_place(target):
    out = []
    for loads in (
        (5, 1, 0),
        (3, 2, 1),
        (1, 0, 0),
        (1, 1, 1),
        (2, 2, 2),
        (0, 0, 0),
        (9, 3, 4),
    ):
        order = ["x", "y", "z"]
        for factor in (1.0, 1.25, 2.0, math.inf):
            out.append(
                target.place(order, dict(zip(order, loads, strict=True)), factor)
            )
    return out


@probe("10.3")
def probe_decisions(target):
    rng, out = random.Random(3), []
    for _ in range(10):
        sources = [
            source(
                f"s{i}",
                rng.randrange(5_000),
                rng.choice([1e9, 1e10, 1e11]),
                0.01 * i,
                10**7,
            )
            for i in range(3)
        ]
        local = rng.choice([0, 900])
        out.append(target.fetch_or_compute(5_000, local, sources, 100_000, quadratic))
    return out


@probe("10.3")
def probe_decision_edges(target):
    twins = [source("b", 50, 8e12), source("a", 50, 8e12)]
    return [
        target.fetch_or_compute(101, 0, [source("a", 101, 16_384)], 1, exact),
        target.fetch_or_compute(101, 0, [source("a", 101, 8192)], 1, exact),
        target.fetch_or_compute(101, 60, [source("a", 60, 8e12)], 1_000, flat),
        target.fetch_or_compute(101, 0, twins, 0, flat),
    ]


@probe("10.4")
def probe_carried(target):
    cases = [
        (90, 9, 10, 1),
        (90, 9, 10, 2),
        (90, 2, 10, 5),
        (90, 10, 10, 0),
        (0, 0, 10, 2),
    ]
    exact = ((False, 1.0),) * 9 + ((True, 10.0),)
    slow = ((False, 3.0),) * 9 + ((True, 3.0),)
    rows = [*(rows_of(*case) for case in cases), exact, slow]
    return [target.carried(row, each) for row in rows for each in (False, True)]


@probe("10.4")
def probe_sustained(target):
    out = []
    for failing in (0.5, 1.0, 1.5, 9.0):

        def run(kind, rate, cold_share, seed, failing=failing):
            bad = rate == failing or kind == "equal"
            return rows_of(80, 60 if bad else 0, 20, 0 if seed == 7 else 20)

        for kind, each, seed in (
            ("apart", True, 7),
            ("apart", True, 8),
            ("equal", False, 7),
        ):
            out.append(
                target.sustained(kind, [0.5, 1.0, 1.5, 2.0], 0.2, seed, each, run)
            )
    return out


@probe("10.4")
def probe_report(target):
    report = target.report()
    percent = re.findall(r"[\d.,]*\d\s?%", report["because"])
    return [
        report["gains"],
        report["equal"],
        report["apart"],
        report["vanishes"],
        percent,
    ]
