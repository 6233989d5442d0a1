"""Ray's request router with our policies: ranks, loads, and what happens to a request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason='Ray is not installed: pip install "minifer[ray]"')

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.request_router import PendingRequest, ReplicaID

from minifer.routing.policy import RoutingRequest
from minifer.serving.ray_serve.call import Call
from minifer.serving.ray_serve.router import PolicyRouter

HOME = DeploymentID("engine", "minifer")
KEYS = (b"a", b"b", b"c", b"d")


class FakeReplica:
    """What a router asks of Ray's `RunningReplica`."""

    def __init__(self, name: str, kv_usage: float | None = None) -> None:
        self.replica_id = ReplicaID(name, HOME)
        self.routing_stats = {} if kv_usage is None else {"kv_usage": kv_usage}
        self.max_ongoing_requests = 10

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


def in_loop(policy: str = "least_load", names: str = "abc") -> Callable[[Any], Callable[[], None]]:
    """A test that runs on an event loop and is given a router with replicas of these names."""

    def decorate(test: Callable[[PolicyRouter], Awaitable[None]]) -> Callable[[], None]:
        def run() -> None:
            async def inside() -> None:
                router = PolicyRouter(HOME, DeploymentHandleSource.UNKNOWN)
                router.initialize_state(router=policy)
                router.update_replicas([FakeReplica(name) for name in names])
                await asyncio.sleep(0)
                await test(router)

            asyncio.run(inside())

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate


def pending(call: Any, name: str = "1") -> PendingRequest:
    return PendingRequest([call], {}, RequestMetadata(name, name))


def call(num_tokens: int = 64, keys: tuple[bytes, ...] = KEYS, **fields: Any) -> Call:
    return Call(RoutingRequest("r", num_tokens, keys), "POST", "/v1/completions", **fields)


async def ranks(router: PolicyRouter, request: PendingRequest | None) -> list[list[str]]:
    chosen = await router.choose_replicas(list(router.curr_replicas.values()), request)
    return [[replica.replica_id.unique_id for replica in rank] for rank in chosen]


def load(router: PolicyRouter) -> dict[str, tuple[int, int]]:
    states = router._router.tracker.replicas()
    return {state.name: (state.num_requests, state.prefill_tokens) for state in states}


def routed(router: PolicyRouter, request: PendingRequest, name: str) -> None:
    router.on_request_routed(request, ReplicaID(name, HOME), None)


@in_loop()
async def test_the_choice_comes_first_then_the_others_then_those_to_avoid(router: PolicyRouter):
    asked = call(avoid=("b",))
    (best,), others, avoided = await ranks(router, pending(asked))
    assert {best, *others} == {"a", "c"} and avoided == ["b"]
    assert asked.decision is not None and asked.decision.replica == best
    assert asked.replicas == ("a", "b", "c")


@in_loop(names="a")
async def test_a_replica_to_avoid_is_better_than_none(router: PolicyRouter):
    assert (await ranks(router, pending(call(avoid=("a",)))))[0] == ["a"]


@in_loop()
async def test_requests_that_come_at_once_see_each_other(router: PolicyRouter):
    chosen = [(await ranks(router, pending(call(), str(i))))[0][0] for i in range(6)]
    assert sorted(chosen) == ["a", "a", "b", "b", "c", "c"]
    assert set(load(router).values()) == {(2, 128)}


@in_loop(names="ab")
async def test_asking_again_does_not_count_a_request_twice(router: PolicyRouter):
    request = pending(call())
    await ranks(router, request)  # Ray asks again while all replicas are full
    await ranks(router, request)
    assert sum(number for number, _ in load(router).values()) == 1


@in_loop(names="ab")
async def test_a_request_that_another_replica_takes_is_that_ones_load(router: PolicyRouter):
    request = pending(call())
    (best,), (other,), _ = await ranks(router, request)
    routed(router, request, other)
    assert load(router) == {best: (0, 0), other: (1, 64)}
    router.on_request_completed(ReplicaID(best, HOME), "1")  # that it refused, said late
    assert load(router)[other] == (1, 64)
    router.on_request_completed(ReplicaID(other, HOME), "1")
    assert set(load(router).values()) == {(0, 0)}
    assert not router._assigned


@in_loop(names="ab")
async def test_the_front_door_tells_of_the_first_token_and_of_the_end(router: PolicyRouter):
    asked = call()
    request = pending(asked)
    (best,), *_ = await ranks(router, request)
    routed(router, request, best)
    assert load(router)[best] == (1, 64)
    await asyncio.to_thread(asked.on_first_token)  # the front door's thread is another
    await asyncio.sleep(0)
    assert load(router)[best] == (1, 0)
    await asyncio.to_thread(asked.on_left)
    await asyncio.sleep(0)
    assert load(router)[best] == (0, 0)
    router.on_request_completed(ReplicaID(best, HOME), "1")  # Ray says so, too
    assert load(router)[best] == (0, 0)


@in_loop(names="ab")
async def test_a_request_that_is_left_while_it_waits_is_nobodys_load(router: PolicyRouter):
    request = pending(call())
    await ranks(router, request)
    request.future.cancel()
    await asyncio.sleep(0)
    assert set(load(router).values()) == {(0, 0)}
    assert not router._assigned


@in_loop("prefix_affinity:load_factor=100")
async def test_a_prefix_goes_where_it_was_sent_and_is_forgotten_with_its_replica(
    router: PolicyRouter,
):
    first = pending(call())
    (_,), (other, _), _ = await ranks(router, first)
    routed(router, first, other)  # not where the policy would have it
    router.on_request_completed(ReplicaID(other, HOME), "1")

    asked = call()
    assert (await ranks(router, pending(asked, "2")))[0] == [other]
    assert asked.decision is not None
    assert (asked.decision.reason, asked.decision.cached_tokens) == ("prefix", 64)

    router.on_replica_actor_died(ReplicaID(other, HOME))
    asked = call()
    assert [other] not in await ranks(router, pending(asked, "3"))
    assert other not in asked.replicas
    assert asked.decision is not None and asked.decision.reason == "hash"
    assert other not in load(router)


@in_loop("dynamo", "ab")
async def test_policies_hear_what_replicas_report(router: PolicyRouter):
    router.update_replicas([FakeReplica("a", kv_usage=1.0), FakeReplica("b", kv_usage=0.0)])
    for i in range(4):
        assert (await ranks(router, pending(call(keys=()), str(i))))[0] == ["b"]
    router.update_replicas([FakeReplica("a", kv_usage=0.0), FakeReplica("b", kv_usage=1.0)])
    assert (await ranks(router, pending(call(keys=()), "5")))[0] == ["a"]


@in_loop()
async def test_one_that_is_meant_is_asked_first(router: PolicyRouter):
    assert await ranks(router, pending(call(only="b"))) == [["b"], ["a", "c"]]
    assert await ranks(router, pending(call(only="gone"))) == [[], ["a", "b", "c"]]
    assert set(load(router).values()) == {(0, 0)}


@in_loop()
async def test_what_is_no_call_of_ours_goes_anywhere(router: PolicyRouter):
    assert await ranks(router, None) == [["a", "b", "c"]]
    assert await ranks(router, pending("something else")) == [["a", "b", "c"]]


@in_loop()
async def test_for_a_request_that_was_left_any_replica_will_do(router: PolicyRouter):
    """Ray's routing task must come to an end."""
    request = pending(call(only="gone"))
    request.future.cancel()
    assert await ranks(router, request) == [["a", "b", "c"]]


@in_loop()
async def test_a_call_for_one_that_is_gone_holds_nobody_up(router: PolicyRouter):
    """Through Ray's own queue: more such calls than it has routing tasks, then one for anybody."""
    lost = [
        asyncio.create_task(router._choose_replica_for_request(pending(call(only="gone"), f"{i}")))
        for i in range(20)
    ]
    await asyncio.wait(lost, timeout=10)
    assert all(task.done() for task in lost)
    request = pending(call(), "last")
    async with asyncio.timeout(10):
        replica = await router._choose_replica_for_request(request)
    assert request.args[0].decision.replica == replica.replica_id.unique_id


def test_an_unknown_policy_is_refused():
    async def make() -> None:
        PolicyRouter(HOME, DeploymentHandleSource.UNKNOWN).initialize_state(router="best")

    with pytest.raises(ValueError, match="router must be one of"):
        asyncio.run(make())
