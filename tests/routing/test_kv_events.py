"""KV events of a real scheduler and KV manager: what the router knows is what the engine holds."""

from __future__ import annotations

import json
import random

import pytest
from fakes import ScheduleDriver, make_request
from hypothesis import given
from hypothesis import strategies as st
from routing_helpers import Clock

from minifer.kv.manager import extra_keys
from minifer.kv.prefix_key import make_key
from minifer.kv.tiers.tiers import KVTiers
from minifer.routing.index import KVIndex
from minifer.routing.kv_events import (
    MEDIA,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    decode,
    encode,
)
from minifer.routing.publisher import KVEventPublisher, held_blocks, prompt_digests


def driver(num_blocks: int = 12, dram: int = 0, **config) -> ScheduleDriver:
    """dram: blocks; 0 for no tiers."""
    if dram:
        config = {"kv_dram_bytes": 1 << 20, "kv_load_policy": "always", **config}
    tiers = (lambda config, read: KVTiers(config, read, 64, dram)) if dram else None
    return ScheduleDriver(num_blocks, 4, make_tiers=tiers, **config)


def digests_held(d: ScheduleDriver) -> set[bytes]:
    return {digest for blocks in held_blocks(d.kv).values() for digest in blocks}


def follow(d: ScheduleDriver, **options) -> tuple[KVEventPublisher, KVIndex]:
    index = KVIndex(clock=Clock())
    index.add("a")
    return KVEventPublisher(d.kv, "a", epoch=1, **options), index


@pytest.mark.parametrize("index_name", ["hash", "radix"])
@pytest.mark.parametrize("dram", [0, 5])
@pytest.mark.parametrize("seed", range(4))
def test_the_index_holds_what_the_engine_holds(index_name, dram, seed):
    """Random prompts of shared prefixes on few blocks: evictions, preemptions, failed steps,
    restarts; over the wire, with a second router that begins in the middle."""
    rng = random.Random(f"{seed}/{index_name}/{dram}")
    d = driver(dram=dram, prefix_index=index_name)
    publisher, index = follow(d)
    late: KVIndex | None = None
    prompts: list[list[int]] = []
    for step in range(150):
        waiting = [r for r in d.requests if not r.finished]
        if len(waiting) < 4 and rng.random() < 0.6:
            shared = rng.choice(prompts)[: rng.randrange(1, 30)] if prompts else []
            prompts.append([*shared, *(rng.randrange(3) for _ in range(rng.randrange(1, 12)))][:40])
            d.add(f"r{len(prompts)}", prompts[-1], max_tokens=rng.randrange(1, 6))
        action = rng.random()
        if waiting and action < 0.05:
            d.scheduler.schedule()
            d.scheduler.restart([r for r in d.requests if not r.finished])
        elif waiting and action < 0.1:
            plan = d.scheduler.schedule()
            d.scheduler.take_back(plan)
            for entry in plan.scheduled:
                d.scheduler.finish(entry.request)
        elif waiting:
            d.step(lambda request: rng.randrange(3))
        if step == 60:
            late = KVIndex(clock=Clock())
            late.add("a")
            late.apply(decode(encode(publisher.snapshot())))  # some of it comes once more
        if rng.random() < 0.4:
            batch = decode(encode(publisher.take()))
            for router in (index, late):
                if router is None:
                    continue
                router.apply(batch)
                assert router.num_blocks("a") == len(digests_held(d))
                assert router.snapshots_wanted() == [] and not router.is_approximate("a")
                for prompt in prompts[-5:]:
                    keys = prompt_digests(prompt, 4)
                    held = digests_held(d)
                    count = next((i for i, key in enumerate(keys) if key not in held), len(keys))
                    assert router.match(keys).get("a", 0) == count
    assert len(prompts) > 20
    evictions = sum(e.name == "kv.block_evicted" for e in d.sink.events)
    assert evictions > 5, "otherwise nothing was shown"


def test_a_prompt_that_has_run_is_found_by_its_digests():
    d = driver()
    publisher, index = follow(d)
    d.add("r", list(range(11)), max_tokens=1)
    d.run()
    index.apply(publisher.take())
    assert index.match(prompt_digests(range(11), 4)) == {"a": 2}
    assert index.match(prompt_digests([0, 1, 2, 3, 9, 9, 9, 9], 4)) == {"a": 1}


@pytest.mark.parametrize("params", [{}, {"cache_salt": "tenant"}])
def test_a_router_names_blocks_as_the_engine_does(params):
    d = driver()
    request = d.add("r", list(range(14)), **params)
    d.run()
    expected = tuple(key.digest for key in request.prefix_keys)
    assert prompt_digests(request.token_ids, 4, extra_keys(request))[: len(expected)] == expected
    assert len(expected) >= 3
    assert (prompt_digests(request.token_ids, 4)[0] == expected[0]) == (not params)


def test_one_event_a_run_of_blocks():
    d = driver()
    publisher, _ = follow(d)
    d.add("r", list(range(13)), max_tokens=1)
    d.run()
    one, two, three = prompt_digests(range(13), 4)
    (stored,) = publisher.take().events
    assert stored == BlockStored((one, two, three), None, "device")
    d.add("s", [*range(8), 50, 51, 52, 53, 54], max_tokens=1)
    d.run()
    four = prompt_digests([*range(8), 50, 51, 52, 53], 4)[-1]
    assert publisher.take().events == (BlockStored((four,), two, "device"),)
    d.kv.pool.reset()
    assert publisher.take().events == (AllBlocksCleared("device"),)
    for name, first in {"t": 60, "u": 61}.items():
        d.add(name, [first] * 9, max_tokens=1)
    d.run()
    expected = {BlockStored(prompt_digests([first] * 8, 4), None) for first in (60, 61)}
    assert set(publisher.take().events) == expected, "two prefixes are two runs"


def test_a_block_in_dram_is_reported_as_such():
    d = driver(num_blocks=6, dram=8)
    publisher, index = follow(d)
    d.add("r", list(range(9)), max_tokens=1)
    d.run()
    d.add("other", [70] * 24, max_tokens=1)  # takes all of the device
    d.run()
    batch = publisher.take()
    keys = prompt_digests(range(9), 4)
    removed = [e for e in batch.events if isinstance(e, BlockRemoved) and e.medium == "device"]
    assert set(keys) == {digest for event in removed for digest in event.block_hashes}
    index.apply(batch)
    assert index.match(keys) == {"a": 2}
    d.kv.close()
    index.apply(publisher.take())
    assert index.match(keys) == {}


def test_what_nobody_takes_is_given_up_and_leaves_a_gap():
    d = driver()
    publisher, index = follow(d, max_pending=8)
    index.apply(publisher.take())
    for i in range(6):
        d.add(f"r{i}", [i] * 13, max_tokens=1)
        d.run()
    index.apply(publisher.take())
    assert index.is_approximate("a") and index.snapshots_wanted() == ["a"]
    index.apply(publisher.snapshot())
    assert index.num_blocks("a") == len(digests_held(d)) and not index.is_approximate("a")


def test_a_publisher_of_an_engine_that_has_run_begins_with_what_it_holds():
    d = driver(dram=6)
    d.add("r", list(range(13)), max_tokens=1)
    d.run()
    publisher, index = follow(d)
    index.apply(publisher.take())
    assert index.match(prompt_digests(range(13), 4)) == {"a": 3} and not index.is_approximate("a")
    publisher.close()
    d.add("s", [80] * 9, max_tokens=1)
    d.run()
    assert publisher.take().events == ()


def test_one_publisher_at_a_time_and_the_newest():
    d = driver()
    first, second = KVEventPublisher(d.kv, "a"), KVEventPublisher(d.kv, "a")
    first.close()
    d.add("r", list(range(9)), max_tokens=1)
    d.run()
    assert (first.num_pending, second.num_pending) == (0, 2)
    second.close()
    assert d.kv.pool.watcher is None


def test_nothing_is_told_to_nobody():
    d = driver(dram=6)
    assert d.kv.pool.watcher is None and d.kv.tiers.dram.watcher is None
    publisher, _ = follow(d)
    assert d.kv.pool.watcher is publisher and d.kv.tiers.dram.watcher is publisher


def test_two_processes_of_one_name_have_epochs_in_order():
    first, second = (KVEventPublisher(driver().kv, "a").epoch for _ in range(2))
    assert first < second


# -- the wire

_HASHES = st.lists(st.binary(max_size=32), max_size=4).map(tuple)
_EVENTS = st.one_of(
    st.builds(BlockStored, _HASHES, st.none() | st.binary(max_size=32), st.sampled_from(MEDIA)),
    st.builds(BlockRemoved, _HASHES, st.sampled_from(MEDIA)),
    st.builds(AllBlocksCleared, st.none() | st.sampled_from(MEDIA)),
)


@given(
    st.builds(
        KVEventBatch,
        st.text(),
        st.integers(0, 2**63),
        st.integers(0, 2**63),
        st.lists(_EVENTS, max_size=4).map(tuple),
        st.booleans(),
    )
)
def test_a_batch_comes_through_the_wire_unchanged(batch):
    text = encode(batch)
    assert "\n" not in text
    assert decode(text) == decode(text.encode()) == batch


_GOOD = {"replica": "a", "epoch": 1, "sequence": 1, "snapshot": False, "events": []}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        '"text"',
        "[" * 100_000,
        *(json.dumps({k: v for k, v in _GOOD.items() if k != missing}) for missing in _GOOD),
        *(
            json.dumps({**_GOOD, **change})
            for change in (
                {"replica": 3},
                {"epoch": "1"},
                {"sequence": True},
                {"sequence": 1.5},
                {"snapshot": 0},
                {"events": None},
                {"events": ["x"]},
                {"events": [{"type": "BlockStored", "medium": "tape"}]},
                {"events": [{"type": "BlockStored", "medium": "dram", "block_hashes": ["ab"]}]},
                {"events": [{"type": "BlockRemoved", "medium": "dram", "block_hashes": ["xy"]}]},
                {"events": [{"type": "BlockRemoved", "medium": "dram", "block_hashes": [3]}]},
                {"events": [{"type": "Surprise", "medium": "dram", "block_hashes": []}]},
                {"events": [{"medium": "dram"}]},
            )
        ),
    ],
)
def test_what_is_no_batch_is_refused(text):
    assert decode(json.dumps(_GOOD)) == KVEventBatch("a", 1, 1)
    with pytest.raises(ValueError, match="not a batch of KV events"):
        decode(text)


def test_only_digests_go_over_the_wire():
    with pytest.raises(TypeError, match="only digests"):
        encode(KVEventBatch("a", 1, 1, (BlockStored((3,), None),)))


def test_make_request_and_keys_are_those_of_the_engine():
    """The driver's helper and `make_key` agree with `prompt_digests` on a prompt by hand."""
    request = make_request("r", [1, 2, 3, 4, 5])
    first = make_key(None, [1, 2], extra_keys(request))
    second = make_key(first, [3, 4], extra_keys(request))
    assert prompt_digests([1, 2, 3, 4, 5], 2) == (first.digest, second.digest)
