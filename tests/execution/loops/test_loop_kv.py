"""What a loop model's requests leave in KV blocks, and who may find it."""

from __future__ import annotations

import pytest
from fakes import check_engine, run_engine, step_checked
from loop_fakes import loop_engine, twin_tokens

from minifer.events import ListSink
from minifer.request import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=5)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
TIERS = {"kv_dram_bytes": 1 << 20, "kv_load_policy": "always"}


def ask(engine, name: str, prompt=PROMPT, **wishes):
    """One request, alone; its output."""
    engine.add_request(name, prompt, GREEDY.with_(**wishes))
    return run_engine(engine)[name]


def findable(engine) -> list:
    return [block.key for block in engine.kv.pool.blocks if block.key is not None]


# -- the prefix key


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_a_prefix_is_shared_at_one_depth_and_at_no_other(index):
    engine = loop_engine(prefix_index=index)
    cached = {}
    for name, depth in (("a", 4), ("b", 8), ("c", 4), ("d", 8), ("e", 3)):
        output = ask(engine, name, num_loops=depth)
        cached[name] = output.num_cached_tokens
        assert output.outputs[0].token_ids == twin_tokens(PROMPT, depth, 5)
    assert cached == {"a": 0, "b": 0, "c": 12, "d": 12, "e": 0}


def test_no_depth_is_the_default_depth():
    engine = loop_engine()
    ask(engine, "a")
    assert ask(engine, "b", num_loops=8).num_cached_tokens == 12


def test_the_key_of_a_block_names_depth_and_policy():
    keys = set()
    for policy in ("full", "first-2", "first-3"):
        for depth in (2, 4):
            engine = loop_engine(loop_kv_policy=policy)
            ask(engine, "a", num_loops=depth)
            (first,) = {key.digest for key in findable(engine) if key.parent is None}
            keys.add(first)
    assert len(keys) == 6


def test_a_salt_separates_requests_of_one_depth():
    engine = loop_engine()
    found = [
        ask(engine, f"{i}", num_loops=4, cache_salt=salt).num_cached_tokens
        for i, salt in enumerate(["a", None, "b", "a", None])
    ]
    assert found == [0, 0, 0, 12, 12]


# -- early exit


@pytest.mark.parametrize("batched", [64, 5])
def test_generated_tokens_that_left_early_are_not_shared(batched):
    engine = loop_engine(max_num_batched_tokens=batched)
    early = ask(engine, "a", exit_threshold=0.9, max_tokens=9).outputs[0]
    assert min(early.num_loops) < 8 and early.num_loops[0] == 8
    computed = [*PROMPT, *early.token_ids]
    assert len(findable(engine)) == len(PROMPT) // 4
    assert ask(engine, "b", computed).num_cached_tokens == 12
    # What was computed in full may not be taken by one that would have left early either.
    exact = ask(engine, "c", max_tokens=9).outputs[0].token_ids
    assert ask(engine, "d", [*PROMPT, *exact], max_tokens=1).num_cached_tokens == 20
    assert ask(engine, "e", PROMPT, exit_threshold=0.9).num_cached_tokens == 12


def test_a_preempted_request_that_leaves_early_takes_no_block_beyond_its_prompt():
    """Blocks with its very tokens are there, of a request that runs every loop."""
    alone = ask(loop_engine(), "x", exit_threshold=0.9, max_tokens=20).outputs[0]
    sink = ListSink()
    engine = loop_engine(num_kv_blocks=40, sinks=[sink])
    engine.add_request("x", PROMPT, GREEDY.with_(exit_threshold=0.9, max_tokens=20))
    while len(engine._requests["x"].token_ids) < len(PROMPT) + 8:
        step_checked(engine)
    same = list(engine._requests["x"].token_ids)
    engine.add_request("full", same, GREEDY.with_(max_tokens=1))
    while "full" in engine._requests:
        step_checked(engine)
    request = engine._requests["x"]
    plan = type("Plan", (), {"scheduled": [], "preempted": []})()
    engine.scheduler._preempt(request, plan)
    assert len(engine.kv.find_cached(request)) == len(PROMPT) // 4
    answer = run_engine(engine)["x"].outputs[0]
    assert (answer.token_ids, answer.num_loops) == (alone.token_ids, alone.num_loops)
    hits = [e.token_range for e in sink.of("x") if e.name == "kv.prefix_hit"]
    assert hits == [(0, 12)]


# -- tokens in the middle of their loops


def suspend(engine, name: str, depth: int = 8, prompt=PROMPT):
    """A request that a shallow one has left in the middle of its loops."""
    engine.add_request("shallow", [7, 7], GREEDY.with_(num_loops=1, max_tokens=9))
    engine.add_request(name, prompt, GREEDY.with_(num_loops=depth))
    step_checked(engine)
    request = engine._requests[name]
    assert request.suspended is not None and request.num_computed_tokens == 0
    return request


def test_blocks_of_suspended_tokens_cannot_be_found():
    engine = loop_engine()
    request = suspend(engine, "deep")
    assert len(request.block_table) == 4
    assert findable(engine) == []
    engine.abort("deep")
    check_engine(engine)
    assert findable(engine) == []
    other = ask(engine, "other", num_loops=8)
    assert other.num_cached_tokens == 0
    assert other.outputs[0].token_ids == twin_tokens(PROMPT, 8, 5)


def test_a_branch_of_a_suspended_request_begins_its_token_again():
    engine = loop_engine()
    request = suspend(engine, "deep")
    engine.fork("deep", "branch")
    check_engine(engine)
    assert engine._requests["branch"].block_table == []
    while request.num_computed_tokens < len(PROMPT) or request.suspended is None:
        step_checked(engine)
    engine.fork("deep", "second")
    branch = engine._requests["second"]
    shared = -(-request.num_computed_tokens // 4)
    assert branch.block_table == request.block_table[:shared]
    last = run_engine(engine)
    expected = twin_tokens(PROMPT, 8, 5)
    for name in ("deep", "branch", "second"):
        assert last[name].outputs[0].token_ids == expected
        assert last[name].outputs[0].num_loops == [8] * 5


def test_a_step_that_fails_ends_the_suspended_and_leaves_nothing(monkeypatch):
    engine = loop_engine()
    suspend(engine, "deep")
    monkeypatch.setattr(engine.runner, "_leave", lambda rows: 1 / 0)
    step_checked(engine)
    monkeypatch.undo()
    assert not engine.has_unfinished_requests and findable(engine) == []
    assert ask(engine, "again").outputs[0].token_ids == twin_tokens(PROMPT, 8, 5)


def test_an_interrupted_step_lets_the_suspended_begin_again(monkeypatch):
    engine = loop_engine()
    request = suspend(engine, "deep")

    def interrupt(step):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.runner, "forward", interrupt)
    with pytest.raises(KeyboardInterrupt):
        step_checked(engine)
    monkeypatch.undo()
    assert request.suspended is None and request.block_table == []
    assert run_engine(engine)["deep"].outputs[0].token_ids == twin_tokens(PROMPT, 8, 5)


@pytest.mark.parametrize("policy", ["terminal", "cyclic-2"])
def test_a_prompt_whose_kv_is_overwritten_waits_for_room_for_all_of_it(policy):
    options = {"max_num_batched_tokens": 16, "enable_prefix_caching": False}
    engine = loop_engine(loop_kv_policy=policy, **options)
    for name in ("a", "b"):  # together they are more than one step takes
        engine.add_request(name, PROMPT, GREEDY)
    last = run_engine(engine)
    for name in ("a", "b"):
        assert last[name].outputs[0].token_ids == twin_tokens(PROMPT, 8, 5, policy)


# -- tiers


def test_blocks_of_shallow_requests_are_stored_whatever_lay_in_the_other_iterations():
    """Debug mode fills unused memory with NaN, and a tier refuses a block with NaN in it."""
    engine = loop_engine(num_kv_blocks=8, **TIERS)
    expected = {}
    for depth in (2, 8, 1):
        expected[depth] = twin_tokens(PROMPT, depth, 5)
        assert ask(engine, f"a{depth}", num_loops=depth).outputs[0].token_ids == expected[depth]
    for i in range(3):  # pushes the blocks out of the device
        ask(engine, f"p{i}", [i, *PROMPT, *PROMPT], num_loops=3)
    tiers = engine.kv.tiers.stats
    assert tiers.rejected == 0 and tiers.stores["dram"].blocks >= 12
    for depth in (1, 2, 8):
        before = tiers.hits["dram"]
        assert ask(engine, f"b{depth}", num_loops=depth).outputs[0].token_ids == expected[depth]
        assert tiers.hits["dram"] == before + 12


@pytest.mark.parametrize("policy", ["full", "first-3"])
def test_what_is_stored_of_iterations_that_did_not_run_is_zero(policy):
    engine = loop_engine(loop_kv_policy=policy, **TIERS)
    ask(engine, "deep", PROMPT[::-1])
    ask(engine, "shallow", num_loops=2)
    first = next(b for b in engine.kv.pool.blocks if b.key and b.key.token_ids == (3, 1, 4, 1))
    config = engine.runner.loop
    for slot in range(config.num_kv_slots):
        unused = config.prelude + 2 * config.core <= slot < config.coda_slot
        for tensor in (engine.runner.kv.keys, engine.runner.kv.values):
            assert bool((tensor[slot][first.block_id] == 0).all()) == unused, slot


@pytest.mark.parametrize(
    ("changes", "shared"),
    [({}, True), ({"max_num_loops": 9}, False), ({"loop_kv_policy": "first-2"}, False)],
    ids=["same", "max_num_loops", "policy"],
)
def test_blocks_on_disk_belong_to_one_depth_limit_and_policy(tmp_path, changes, shared):
    options = {"kv_disk_path": tmp_path, "kv_load_policy": "always"}
    with loop_engine(**options) as engine:
        ask(engine, "a", num_loops=2)
        assert engine.kv.tiers.flush()
    with loop_engine(**options, **changes) as engine:
        output = ask(engine, "b", num_loops=2)
    assert output.num_cached_tokens == (12 if shared else 0)
    policy = changes.get("loop_kv_policy", "full")
    assert output.outputs[0].token_ids == twin_tokens(PROMPT, 2, 5, policy)


def test_the_time_of_a_prefill_is_that_of_all_its_steps():
    """Two steps of one second: 13 prompt tokens and two of a shallow request, not 26 + 2."""
    engine = loop_engine(**TIERS, debug=False)
    now = [0.0]
    engine.events.clock = lambda: now[0]
    prepare = engine.kv.prepare

    def slow(plan):
        step = prepare(plan)
        now[0] += 1.0
        return step

    engine.kv.prepare = slow
    engine.add_request("shallow", [7], GREEDY.with_(num_loops=2, max_tokens=2))
    engine.add_request("deep", PROMPT, GREEDY.with_(num_loops=4, max_tokens=4))
    observed = []
    engine.kv.tiers.observe_step = lambda tokens, seconds: observed.append((tokens, seconds))
    run_engine(engine)
    # The rest are decode steps, whose speed says nothing about prefill.
    assert [tokens for tokens, _ in observed] == [1, 14]
    assert [seconds for _, seconds in observed] == pytest.approx([1, 1], abs=1e-2)
