"""Loads of replicas: what is added is taken away again, and routers decide by it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from routing_helpers import Clock, make_request

from minifer.routing.index import KVIndex
from minifer.routing.policies import make_policy
from minifer.routing.policy import NoReplicaError, ReplicaState, Role
from minifer.routing.router import Router
from minifer.routing.tracker import Assignment, LoadTracker


def test_the_life_of_a_request():
    tracker = LoadTracker(prefill_seconds=lambda new, cached: new / 100)
    state = tracker.add("a")
    assignment = tracker.sent(make_request(100), "a", cached_tokens=48)
    assert state == ReplicaState("a", num_requests=1, prefill_tokens=52, prefill_seconds=0.52)
    tracker.first_token(assignment)
    assert state == ReplicaState("a", num_requests=1, decode_blocks=7)  # 101 tokens
    tracker.generated(assignment, 13)
    assert state.decode_blocks == 8
    tracker.finished(assignment)
    assert state == ReplicaState("a")
    tracker.finished(assignment)
    tracker.generated(assignment, 99)
    assert state == ReplicaState("a") and assignment.finished


def test_a_request_that_fails_before_its_first_token_leaves_nothing():
    tracker = LoadTracker()
    tracker.add("a")
    tracker.finished(tracker.sent(make_request(100), "a"))
    assert tracker["a"] == ReplicaState("a")


def test_a_request_that_comes_with_its_kv_only_decodes():
    tracker = LoadTracker()
    state = tracker.add("d", Role.DECODE)
    tracker.first_token(tracker.sent(make_request(100), "d", cached_tokens=100))
    assert (state.num_requests, state.prefill_tokens, state.decode_blocks) == (1, 0, 7)


def test_a_replica_that_comes_back_begins_with_nothing():
    tracker = LoadTracker()
    tracker.add("a")
    old = tracker.sent(make_request(100), "a")
    tracker.remove("a")
    assert "a" not in tracker and tracker.replicas() == []
    state = tracker.add("a")
    tracker.first_token(old)
    tracker.finished(old)
    assert state == ReplicaState("a")
    tracker.remove("nobody")
    with pytest.raises(ValueError, match="'a' twice"):
        tracker.add("a")


def test_reports_of_health_and_usage():
    tracker = LoadTracker()
    state = tracker.add("a")
    tracker.report("a", kv_usage=0.5)
    tracker.report("a", healthy=False)
    assert (state.kv_usage, state.healthy) == (0.5, False)
    tracker.report("gone", healthy=True)
    with pytest.raises(ValueError, match=r"kv_usage must be in \[0, 1\], got 1.5"):
        tracker.report("a", kv_usage=1.5)


@pytest.mark.parametrize("seed", range(5))
def test_after_the_last_request_every_load_is_zero(seed):
    rng = random.Random(seed)
    tracker = LoadTracker(prefill_seconds=lambda new, cached: 0.1 * new + 1e-7 * new * cached)
    names = [tracker.add(name).name for name in "abc"]
    running: list[Assignment] = []
    for i in range(400):
        if running and rng.random() < 0.5:
            tracker.finished(running.pop(rng.randrange(len(running))))
        elif running and rng.random() < 0.5:
            tracker.generated(rng.choice(running), rng.randrange(1, 50))
        else:
            request = make_request(rng.randrange(1, 5000), name=f"r{i}")
            running.append(tracker.sent(request, rng.choice(names), rng.randrange(5000)))
        for name in names:
            mine = [a for a in running if a.replica == name]
            state = tracker[name]
            assert state.num_requests == len(mine)
            assert state.prefill_tokens == sum(a.prefill_tokens for a in mine)
            assert state.decode_blocks == sum(a.decode_blocks for a in mine)
            assert state.prefill_seconds == pytest.approx(sum(a.prefill_seconds for a in mine))
    for assignment in running:
        tracker.finished(assignment)
    assert tracker.replicas() == [ReplicaState(name) for name in names]


# -- the router


def make_router(text: str = "prefix_affinity") -> Router:
    router = Router(make_policy(text), KVIndex(clock=Clock()))
    for name in "abc":
        router.add(name)
    return router


def test_the_next_turn_of_a_chat_goes_where_the_last_one_went():
    router = make_router("prefix_affinity:hash_blocks=1,load_factor=inf")
    chats = {name: [f"{name}{i}" for i in range(20)] for name in ("x", "y", "z")}
    for name, keys in chats.items():
        first = router.route(make_request(160, keys[:10], name))
        router.tracker.finished(first)
        decision = router.decide(make_request(320, keys, name))
        assert decision.reason == "prefix"
        second = router.send(make_request(320, keys, name), decision)
        assert second.replica == first.replica and second.prefill_tokens == 160


def test_a_retry_goes_to_another_replica_until_none_is_left():
    router, tried = make_router(), []
    for _ in range(3):
        tried.append(router.route(make_request(160, [1]), exclude=tried).replica)
    assert sorted(tried) == ["a", "b", "c"]
    with pytest.raises(NoReplicaError, match="no healthy replica is left"):
        router.route(make_request(160, [1]), exclude=tried)


def test_prefill_and_decode_are_asked_for_apart():
    router = Router(make_policy("least_load"), KVIndex(clock=Clock()))
    for name, role in {"p": Role.PREFILL, "d1": Role.DECODE, "d2": Role.DECODE}.items():
        router.add(name, role)
    decodes = []
    for i in range(4):
        request = make_request(64, [i])
        prefill = router.route(request, Role.PREFILL)
        decode = router.tracker.sent(request, router.decide(request, Role.DECODE).replica, 64)
        router.tracker.finished(prefill)
        router.tracker.first_token(decode)
        assert prefill.replica == "p"
        decodes.append(decode.replica)
    assert sorted(decodes) == ["d1", "d1", "d2", "d2"]
    router.tracker.report("p", healthy=False)
    with pytest.raises(NoReplicaError, match="no healthy replica for prefill"):
        router.route(request, Role.PREFILL)


def test_a_replica_that_dies_takes_its_cache_and_its_load_along():
    router = make_router("prefix_affinity:load_factor=inf")
    request = make_request(160, range(10))
    first = router.route(request)
    router.remove(first.replica)
    second = router.route(replace(request, request_id="again"))
    assert second.replica != first.replica and second.prefill_tokens == 160
    router.add(first.replica)
    assert router.tracker[first.replica] == ReplicaState(first.replica)
    assert router.index.match(request.prefix_keys) == {second.replica: 10}
