"""Prefix affinity: homes that stay, and a load that is never exceeded."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_helpers import loaded, make_request, send

from minifer.kv.prefix_key import sha256
from minifer.routing.policies import make_policy
from minifer.routing.policy import ReplicaState
from minifer.routing.prefix_affinity import PrefixAffinity
from minifer.routing.tracker import LoadTracker

KEYS = [sha256(str(i).encode()) for i in range(2000)]


def homes(replicas: list[ReplicaState]) -> dict[bytes, str]:
    policy = PrefixAffinity()
    return {key: policy.choose(make_request(64, [key]), replicas, {}).replica for key in KEYS}


def test_only_the_prefixes_of_a_replica_that_leaves_find_a_new_home():
    replicas = loaded(*[0] * 10)
    before = homes(replicas)
    shares = Counter(before.values())
    assert min(shares.values()) > 150 and max(shares.values()) < 250  # 200 each
    after = homes([r for r in replicas if r.name != "d"])
    moved = [key for key in KEYS if before[key] != after[key]]
    assert moved == [key for key in KEYS if before[key] == "d"]
    assert len(moved) < 1.25 * len(KEYS) / 10
    assert len({after[key] for key in moved}) == 9, "they are spread over all that are left"


def test_all_processes_agree_on_a_home():
    script = (
        "from minifer.routing.policies import make_policy\n"
        "from minifer.routing.policy import ReplicaState, RoutingRequest\n"
        "policy, replicas = make_policy('prefix_affinity'), [ReplicaState(n) for n in 'abcdefgh']\n"
        "keys = [b'one', b'two', 3, 'four', ('five', 6)]\n"
        "requests = [RoutingRequest('r', 64, [key]) for key in keys]\n"
        "print(*(policy.choose(r, replicas, {}).replica for r in requests))\n"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1 and len(answers.pop().split()) == 5


def test_a_prompt_that_goes_on_keeps_its_home():
    """The key of the fourth block names the first four, whatever follows."""
    policy, replicas = PrefixAffinity(), loaded(0, 0, 0, 0, 0)
    for start in range(0, 400, 20):
        chat = KEYS[start : start + 20]
        places = {
            policy.choose(make_request(16 * n, chat[:n]), replicas, {}).replica for n in (4, 5, 20)
        }
        assert len(places) == 1


def test_prompts_shorter_than_a_block_go_anywhere():
    policy, replicas = PrefixAffinity(), loaded(0, 0, 0)
    requests = [make_request(7, name=f"r{i}") for i in range(300)]
    shares = Counter(policy.choose(request, replicas, {}).replica for request in requests)
    assert min(shares.values()) > 60


@given(
    loads=st.lists(st.integers(0, 50), min_size=1, max_size=10),
    factor=st.sampled_from([1.0, 1.1, 1.25, 2.0, 3.7]),
    key=st.sampled_from(KEYS[:20]),
    holders=st.dictionaries(st.sampled_from("abcdefghij"), st.integers(0, 160)),
)
def test_a_load_is_never_exceeded(loads, factor, key, holders):
    """arXiv 1608.01350: at most ⌈c · m / n⌉ of the m balls in each of the n bins."""
    policy, replicas = PrefixAffinity(load_factor=factor), loaded(*loads)
    chosen = policy.choose(make_request(160, [key]), replicas, holders).replica
    load = next(replica.num_requests for replica in replicas if replica.name == chosen)
    exact = math.ceil(round(factor * (sum(loads) + 1) / len(loads), 9))
    assert load + 1 <= exact


def test_the_bound_is_not_one_more_by_rounding():
    """1.1 · 50 is 55.00000000000001 in floating point."""
    assert PrefixAffinity(load_factor=1.1).load_limit(loaded(49)) == 55
    assert PrefixAffinity(load_factor=1.1).load_limit(loaded(20, 20, 9)) == 19  # 18.3


def test_requests_with_one_prefix_spread_within_the_bound():
    policy, tracker = make_policy("prefix_affinity:load_factor=1.25"), LoadTracker()
    for name in "abcd":
        tracker.add(name)
    for count in range(1, 401):
        send(policy, tracker, make_request(160, KEYS[:10]))
        loads = sorted(replica.num_requests for replica in tracker.replicas())
        assert loads[-1] <= math.ceil(1.25 * count / 4)
    assert loads == [25, 125, 125, 125], "as few replicas as the bound allows"


def test_who_holds_the_prompt_comes_before_its_home():
    policy, replicas = PrefixAffinity(), loaded(0, 0, 0, 0)
    for name in "abcd":
        decision = policy.choose(make_request(160, KEYS[:10]), replicas, {name: 128})
        assert (decision.replica, decision.reason) == (name, "prefix")
    two = policy.choose(make_request(160, KEYS[:10]), replicas, {"a": 96, "b": 128})
    assert two.replica == "b"
    replicas[1].num_requests = 5
    next_best = policy.choose(make_request(160, KEYS[:10]), replicas, {"a": 96, "b": 128})
    assert (next_best.replica, next_best.reason) == ("a", "prefix")


def test_a_template_that_all_prompts_share_is_no_match():
    policy, replicas = PrefixAffinity(match_threshold=0.3), loaded(0, 0, 0, 0)
    prompts = [make_request(160, KEYS[i : i + 10]) for i in range(0, 400, 10)]
    chosen = [policy.choose(prompt, replicas, {"a": 32}) for prompt in prompts]
    assert {d.replica for d in chosen} == set("abcd") and {d.reason for d in chosen} == {"hash"}


def test_the_reason_says_when_the_load_decided():
    policy, replicas = PrefixAffinity(), loaded(0, 0)
    home = policy.choose(make_request(64, KEYS[:4]), replicas, {})
    next(r for r in replicas if r.name == home.replica).num_requests = 9
    away = policy.choose(make_request(64, KEYS[:4]), replicas, {})
    assert home.reason == "hash" and away.reason == "balance" and home.replica != away.replica


@pytest.mark.parametrize("factor", ["1", "inf"])
def test_the_ends_of_the_load_factor(factor):
    policy, tracker = make_policy(f"prefix_affinity:load_factor={factor}"), LoadTracker()
    for name in "abc":
        tracker.add(name)
    shares = Counter(send(policy, tracker, make_request(160, KEYS[:10])) for _ in range(90))
    assert sorted(shares.values()) == ([30, 30, 30] if factor == "1" else [90])
