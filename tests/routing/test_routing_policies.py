"""Policies: published examples, ties, old views, and that nobody starves."""

from __future__ import annotations

from collections import Counter

import pytest
from routing_helpers import BLOCK, Clock, loaded, make_request, send

from minifer.routing.cache_aware import CacheAware, imbalanced
from minifer.routing.cold_warm import ColdWarm, is_cold
from minifer.routing.dynamo import DynamoCost, dynamo_cost, softmin
from minifer.routing.index import KVIndex
from minifer.routing.policies import POLICIES, make_policy
from minifer.routing.policy import NoReplicaError, ReplicaState, Role
from minifer.routing.pools import pool
from minifer.routing.tracker import LoadTracker

EVERY = sorted(POLICIES)
BY_LOAD = [name for name in EVERY if name not in ("random", "round_robin")]

# -- published examples


def test_s03_dynamo_takes_the_second_of_the_documented_workers():
    """https://docs.nvidia.com/dynamo, "Routing Concepts": 8 + 10, 5 + 5, 2 + 9 → worker 2."""
    assert [dynamo_cost(8, 10), dynamo_cost(5, 5), dynamo_cost(2, 9)] == [18, 10, 11]
    workers = [ReplicaState(f"w{i}", decode_blocks=n) for i, n in enumerate((10, 5, 9), start=1)]
    cached = {"w1": 2 * BLOCK, "w2": 5 * BLOCK, "w3": 8 * BLOCK}
    decision = DynamoCost().choose(make_request(10 * BLOCK), workers, cached)
    assert (decision.replica, decision.cached_tokens) == ("w2", 5 * BLOCK)
    assert DynamoCost(overlap_weight=2).choose(make_request(160), workers, cached).replica == "w3"
    assert DynamoCost(overlap_weight=0).choose(make_request(160), workers, cached).replica == "w2"


def test_dynamo_counts_prompts_that_wait_on_a_worker():
    """160 tokens wait where 80 of this prompt are held: 15 blocks there, 10 elsewhere."""
    busy, idle = ReplicaState("busy", prefill_tokens=160), ReplicaState("idle")
    assert DynamoCost().choose(make_request(160), [busy, idle], {"busy": 80}).replica == "idle"


def test_s04_a_prompt_is_cold_once():
    """The fixture of smg-project/smg#469; the units are ours: tokens, blocks of 5."""
    assert is_cold(100, 5, match_threshold=0.1, unmatched=50, min_tokens=50)
    assert not is_cold(100, 10, match_threshold=0.1, unmatched=50, min_tokens=50)
    assert not is_cold(49, 0, match_threshold=0.1, unmatched=40, min_tokens=50)
    assert is_cold(50, 0, match_threshold=0.1, unmatched=50, min_tokens=50)  # at least, both
    assert not is_cold(100, 5, match_threshold=0.1, unmatched=96, min_tokens=50)

    policy = make_policy("cold_warm:match_threshold=.1,unmatched=50,min_tokens=50")
    replicas = [ReplicaState("cold", Role.PRE_PREFILL), ReplicaState("warm", Role.PREFILL)]
    index = KVIndex(clock=Clock())
    for replica in replicas:
        index.add(replica.name)
    prompt = make_request(100, [("shared", 0), *range(19)], block_size=5)
    index.record("warm", prompt.prefix_keys[:1])
    first = policy.choose(prompt, replicas, index.matched_tokens(prompt))
    assert (first.replica, first.reason) == ("cold", "cold")
    index.record(first.replica, prompt.prefix_keys)
    second = policy.choose(prompt, replicas, index.matched_tokens(prompt))
    assert (second.replica, second.reason) == ("warm", "warm")


def test_s05_sglang_balances_by_a_number_and_a_factor():
    assert imbalanced((100, 30))  # 70 > 64 and 100 > 45
    assert not imbalanced((60, 10))  # 50 <= 64
    assert not imbalanced((300, 220))  # 80 > 64, but 300 <= 330
    uneven = CacheAware().choose(make_request(), loaded(100, 30), {"a": 160})
    assert (uneven.replica, uneven.reason, uneven.cached_tokens) == ("b", "balance", 0)
    even = CacheAware().choose(make_request(), loaded(60, 10), {"a": 160})
    assert (even.replica, even.reason, even.cached_tokens) == ("a", "prefix", 160)


def test_sglang_follows_a_match_above_the_threshold_and_else_the_smallest_tree():
    policy, replicas = CacheAware(), loaded(0, 0, 0)
    assert policy.choose(make_request(100), replicas, {"a": 31}).replica == "a"  # 69 new tokens
    small = policy.choose(make_request(100), replicas, {"a": 30})
    assert small.reason == "tree" and small.replica in "bc"  # 100 new tokens
    last = policy.choose(make_request(100), replicas, {})
    assert {small.replica, last.replica} == {"b", "c"}
    assert policy.choose(make_request(100), replicas, {}).replica == "a"


def test_a_tree_grows_by_what_was_new():
    """a: 100 tokens. b: 60, and 10 of a prompt of which it had the rest: 70, and not 130."""
    policy, (a, b) = CacheAware(), loaded(0, 0)
    policy.choose(make_request(100), [a], {})
    policy.choose(make_request(60), [b], {})
    policy.choose(make_request(70), [b], {"b": 60})
    assert policy.choose(make_request(100), [a, b], {}).replica == "b"


# -- ties and old views


@pytest.mark.parametrize("name", EVERY)
def test_case_154_equal_replicas_share_the_requests(name):
    """ai-dynamo/dynamo#3581: with equal scores the first worker got all."""
    policy, replicas = make_policy(name, seed=3), loaded(0, 0, 0)
    requests = [make_request(160, [f"prompt {i}"], f"r{i}") for i in range(300)]
    shares = Counter(policy.choose(request, replicas, {}).replica for request in requests)
    assert len(shares) == 3 and min(shares.values()) > 60


@pytest.mark.parametrize("text", ["dynamo:temperature=1", "power_of_two", "random"])
def test_case_155_routers_with_the_same_old_view_do_not_herd(text):
    """ai-dynamo/dynamo#589: each sent all it had to the worker that looked least loaded."""
    view = loaded(3, 4, 4, 5, 4, 5, 4, 6)
    for replica in view:
        replica.decode_blocks = 10 * replica.num_requests
    routers = [make_policy(text, seed) for seed in (1, 2)]
    shares = Counter(
        r.choose(make_request(), view, {}).replica for r in routers for _ in range(200)
    )
    assert max(shares.values()) < 0.5 * 400
    greedy = [make_policy("dynamo", seed) for seed in (1, 2)]
    herd = Counter(r.choose(make_request(), view, {}).replica for r in greedy for _ in range(200))
    assert herd == {"a": 400}


def test_the_temperature_of_dynamo_is_relative_to_the_range_of_costs():
    assert softmin([10, 18], 1) == pytest.approx([0.7310585786, 0.2689414214])  # 1 / (1 + e^-1)
    assert softmin([0, 1e9], 0.001) == pytest.approx([1, 0])
    assert softmin([7, 7, 7], 0.5) == pytest.approx([1 / 3] * 3)
    middle = softmin([0, 1, 2], 0.5)
    assert middle[0] / middle[1] == pytest.approx(middle[1] / middle[2])


@pytest.mark.parametrize("name", ["dynamo", "prefix_affinity", "cache_aware"])
def test_case_153_who_holds_the_prefix_does_not_get_everything(name):
    """ai-dynamo/dynamo#7836: the worker with most overlap won always, and the others starved."""
    policy, tracker = make_policy(name), LoadTracker()
    for replica in "abc":
        tracker.add(replica)
    shares = Counter(send(policy, tracker, make_request(160), {"a": 160}) for _ in range(300))
    assert shares["a"] >= 100 and min(shares["b"], shares["c"]) >= 50


def test_case_157_a_full_worker_is_left_out_while_there_are_others():
    """ai-dynamo/dynamo#9688."""
    full, free = ReplicaState("full", kv_usage=0.95), ReplicaState("free", decode_blocks=1000)
    policy = DynamoCost()
    decision = policy.choose(make_request(), [full, free], {"full": 160})
    assert (decision.replica, decision.reason) == ("free", "cost")
    only = policy.choose(make_request(), [full], {})
    assert (only.replica, only.reason) == ("full", "busy")
    everyone = DynamoCost(busy_threshold=1).choose(make_request(), [full, free], {"full": 160})
    assert everyone.replica == "full"


# -- what all policies keep


@pytest.mark.parametrize("name", EVERY)
def test_without_a_healthy_replica_every_policy_says_so(name):
    policy = make_policy(name)
    with pytest.raises(NoReplicaError, match="none of 0"):
        policy.choose(make_request(), [], {})
    with pytest.raises(NoReplicaError, match="none of 2"):
        policy.choose(make_request(), [ReplicaState(n, healthy=False) for n in "ab"], {})


@pytest.mark.parametrize("name", EVERY)
def test_an_unhealthy_replica_is_never_chosen(name):
    policy, replicas = make_policy(name), loaded(0, 5, 5)
    replicas[0].healthy = False
    chosen = {policy.choose(make_request(), replicas, {"a": 160}).replica for _ in range(50)}
    assert chosen <= {"b", "c"}


@pytest.mark.parametrize("text", [*EVERY, "dynamo:temperature=1"])
def test_policies_of_one_seed_decide_the_same(text):
    def decisions(seed: int) -> list[str]:
        policy, tracker = make_policy(text, seed), LoadTracker()
        for replica in "abcd":
            tracker.add(replica)
        requests = [make_request(100 + i % 7, [i % 5], f"r{i}") for i in range(60)]
        return [send(policy, tracker, request) for request in requests]

    assert decisions(1) == decisions(1)


@pytest.mark.parametrize("name", EVERY)
def test_a_replica_that_is_best_in_every_way_is_not_starved(name):
    def view() -> list[ReplicaState]:
        busy = [
            ReplicaState(n, Role.MIXED, 9, prefill_tokens=4000, decode_blocks=90, kv_usage=0.7)
            for n in "abc"
        ]
        return [*busy, ReplicaState("best")]

    policy = make_policy(name)
    chosen = [policy.choose(make_request(), view(), {"best": 160}).replica for _ in range(60)]
    assert "best" in chosen
    if name in BY_LOAD and name != "power_of_two":  # which does not look at all of them
        assert set(chosen) == {"best"}


@pytest.mark.parametrize("name", EVERY)
def test_a_decision_never_promises_more_than_the_prompt(name):
    decision = make_policy(name).choose(make_request(100), loaded(0), {"a": 112})
    assert decision.cached_tokens == 100


# -- single policies


def test_round_robin_takes_turns_in_each_of_two_pools():
    """One counter for both would send every prefill to the same replica."""
    policy = make_policy("round_robin")
    prefill = [ReplicaState(n, Role.PREFILL) for n in ("p1", "p2")]
    decode = [ReplicaState(n, Role.DECODE) for n in ("d1", "d2")]
    turns = [
        policy.choose(make_request(), p, {}).replica for _ in range(4) for p in (prefill, decode)
    ]
    assert turns == ["p1", "d1", "p2", "d2"] * 2


def test_round_robin_goes_on_when_a_replica_leaves_or_comes():
    policy, (a, b, c) = make_policy("round_robin"), loaded(0, 0, 0)
    assert [policy.choose(make_request(), [a, b, c], {}).replica for _ in range(4)] == list("abca")
    assert [policy.choose(make_request(), [a, c], {}).replica for _ in range(3)] == list("cac")
    assert policy.choose(make_request(), [a, b, c], {}).replica == "b"


def test_least_work_compares_seconds_where_all_can_say_and_else_tokens():
    fast = ReplicaState("fast", prefill_tokens=9000, prefill_seconds=1.0)
    slow = ReplicaState("slow", prefill_tokens=2000, prefill_seconds=4.0)
    policy = make_policy("least_work")
    assert policy.choose(make_request(), [fast, slow], {}).replica == "fast"
    slow.prefill_seconds = 0.0
    assert policy.choose(make_request(), [fast, slow], {}).replica == "slow"
    idle = ReplicaState("idle", num_requests=50)
    assert policy.choose(make_request(), [fast, slow, idle], {}).replica == "idle"
    decoding = loaded(7, 2, 5)
    assert {policy.choose(make_request(), decoding, {}).replica for _ in range(9)} == {"b"}


def test_power_of_two_never_takes_the_most_loaded():
    policy, view = make_policy("power_of_two"), loaded(1, 2, 3)
    shares = Counter(policy.choose(make_request(), view, {}).replica for _ in range(300))
    assert set(shares) == {"a", "b"} and 150 < shares["a"] < 250  # two pairs of three hold a


def test_hard_and_soft_partition_of_cold_and_warm():
    cold = ReplicaState("cold", Role.PRE_PREFILL)
    warm = ReplicaState("warm", Role.PREFILL, 1, prefill_tokens=800)
    hit, miss = {"warm": 9000}, {"warm": 16}
    hard, soft = make_policy("cold-warm"), make_policy("cold-warm:soft")
    long = make_request(10_000)
    assert hard.choose(long, [cold, warm], hit).replica == "warm"
    helped = soft.choose(long, [cold, warm], hit)
    assert (helped.replica, helped.reason, helped.cached_tokens) == ("cold", "helped", 0)
    for policy in (hard, soft):
        assert policy.choose(long, [cold, warm], miss).replica == "cold"
    cold.num_requests = 1  # no longer idle
    assert soft.choose(long, [cold, warm], hit).replica == "warm"
    cold.num_requests, warm.prefill_tokens = 0, 0  # nothing to wait for
    assert soft.choose(long, [cold, warm], hit).replica == "warm"


@pytest.mark.parametrize("matched", [{}, {"x": 10_000}])
def test_an_empty_pool_of_cold_or_warm_is_replaced_by_the_other(matched):
    policy, long = ColdWarm(), make_request(10_000)
    for role in Role:
        assert policy.choose(long, [ReplicaState("only", role)], matched).replica == "only"


def test_inside_of_a_pool_another_policy_chooses():
    policy = make_policy("cold_warm:within=prefix_affinity")
    replicas = [*loaded(0, 0), ReplicaState("cold", Role.PRE_PREFILL)]
    for name in "ab":
        assert policy.choose(make_request(), replicas, {name: 160}).replica == name


def test_pools_by_role():
    replicas = [ReplicaState(role.value, role) for role in Role]
    names = {role: {r.name for r in pool(replicas, role)} for role in Role}
    assert names[Role.PREFILL] == {"mixed", "prefill", "pre-prefill"}
    assert names[Role.DECODE] == {"mixed", "decode"}
    assert names[Role.PRE_PREFILL] == {"pre-prefill"} and names[Role.MIXED] == {"mixed"}


# -- names and options


def test_options_are_read_by_name_and_kind():
    policy = make_policy("cold_warm:match_threshold=.1,unmatched=512, soft , within=dynamo", 7)
    assert isinstance(policy, ColdWarm) and isinstance(policy.within, DynamoCost)
    assert (policy.match_threshold, policy.unmatched, policy.soft) == (0.1, 512, True)
    assert make_policy("cold_warm:soft=no").soft is False
    assert make_policy("prefix_affinity:load_factor=inf").load_factor == float("inf")
    assert isinstance(make_policy("Cache-Aware".lower()), CacheAware)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fastest", "router must be one of random, round_robin, .*, got 'fastest'"),
        ("", "router must be one of"),
        ("random:seed=3", "router random has no options, got 'seed'"),
        (
            "dynamo:heat=1",
            "has the options overlap_weight, temperature, busy_threshold, got 'heat'",
        ),
        ("dynamo:temperature=hot", "router dynamo:temperature must be a number, got 'hot'"),
        ("dynamo:temperature", "router dynamo:temperature must be a number, got ''"),
        ("dynamo:temperature=-1", "router dynamo: temperature must be at least 0, got -1"),
        ("dynamo:temperature=nan", "temperature must be at least 0, got nan"),
        ("dynamo:temperature=1,temperature=2", "got temperature twice"),
        ("dynamo:busy_threshold=0", r"busy_threshold must be in \(0, 1\], got 0"),
        ("cache_aware:balance_abs=.5", "balance_abs must be a whole number, got '.5'"),
        ("cache_aware:balance_rel=.5", "balance_rel must be at least 1, got 0.5"),
        ("prefix_affinity:load_factor=.9", "load_factor must be at least 1, got 0.9"),
        ("prefix_affinity:hash_blocks=0", "hash_blocks must be at least 1, got 0"),
        ("cold_warm:match_threshold=2", r"match_threshold must be in \[0, 1\], got 2"),
        ("cold_warm:soft=maybe", "cold_warm:soft must be true or false, got 'maybe'"),
        ("cold_warm:within=nobody", "router must be one of"),
    ],
)
def test_a_wrong_option_is_named(text, said):
    with pytest.raises(ValueError, match=said):
        make_policy(text)
