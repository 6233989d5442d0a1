"""A loop model drafts for itself with fewer of its loops: replies are those of all its loops."""

from __future__ import annotations

import random

import pytest
from fakes import run_engine, step_checked, tiny_config, tiny_model
from loop_fakes import loop_engine, twin_tokens
from speculating import Scripted, use

from minifer.engine import Engine
from minifer.execution.runner import ModelRunner
from minifer.execution.speculation.draft_model import DraftModelProposer
from minifer.loops import LOOP_BATCHING
from minifer.request import SamplingParams

MAX_TOKENS = 9
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
DEPTHS = [1, 2, 3, 4, 8, 8, 6, 8]
OPTIONS = [
    {},
    {"max_num_batched_tokens": 7},
    {"block_size": 1, "num_kv_blocks": 300},
    {"block_size": 3, "max_num_seqs": 3},
    {"num_kv_blocks": 9},
    {"kv_dram_bytes": 1 << 20, "num_kv_blocks": 9, "kv_load_policy": "always"},
]


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    shared = [rng.randrange(40) for _ in range(12)]
    own = [[rng.randrange(40) for _ in range(n)] for n in (1, 4, 5, 9, 13)]
    return [*own, shared, [*shared, 5], [*shared[:9], 6, 6]]


def truth(policy: str) -> list[list[int]]:
    pairs = zip(prompts(), DEPTHS, strict=True)
    return [twin_tokens(prompt, depth, MAX_TOKENS, policy) for prompt, depth in pairs]


def run(engine: Engine, params: SamplingParams = GREEDY):
    queue, last = list(range(len(DEPTHS))), {}
    while queue or engine.has_unfinished_requests:
        for i in queue[:3]:
            engine.add_request(str(i), prompts()[i], params.with_(num_loops=DEPTHS[i]))
        del queue[:3]
        last.update((output.request_id, output) for output in step_checked(engine))
    return [last[str(i)].outputs[0] for i in range(len(DEPTHS))]


@pytest.mark.parametrize("policy", ["full", "first-3"])
@pytest.mark.parametrize("batching", LOOP_BATCHING)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_do_not_depend_on_drafts_of_fewer_loops(options, batching, policy):
    more = {"loop_batching": batching, "loop_kv_policy": policy}
    engine = loop_engine(speculative_method="loops", speculative_num_loops=3, **options, **more)
    outputs = run(engine)
    assert [o.token_ids for o in outputs] == truth(policy)
    for output, depth in zip(outputs, DEPTHS, strict=True):
        assert output.num_loops == [depth] * MAX_TOKENS
    stats = engine.speculation_stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize("batching", LOOP_BATCHING)
@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_tokens_of_a_loop_model_do_not_depend_on_other_drafts(method, batching):
    engine = loop_engine(
        loop_batching=batching,
        num_kv_blocks=14,
        **({"speculative_method": "ngram", "prompt_lookup_min": 1} if method == "ngram" else {}),
    )
    if method == "draft":
        blocks, config = engine.kv.pool.num_blocks, tiny_config()
        runner = ModelRunner(tiny_model(), config, engine.config, blocks)
        use(engine, DraftModelProposer(runner, rejection=False))
    assert [o.token_ids for o in run(engine)] == truth("full")
    assert engine.speculation_stats.num_draft_tokens > 0


def test_seven_of_eight_loops_draft_what_eight_write_and_requests_as_shallow_do_not_draft():
    engine = loop_engine(speculative_method="loops", speculative_num_loops=7)
    run(engine)
    assert engine.speculation_stats.acceptance_rate > 0.5
    engine = loop_engine(speculative_method="loops", speculative_num_loops=2)
    for i in range(2):
        engine.add_request(str(i), prompts()[i], GREEDY.with_(num_loops=DEPTHS[i]))
    run_engine(engine)
    assert engine.speculation_stats.num_drafts == 0


def test_a_token_that_leaves_early_leaves_early_with_drafts_too():
    params = GREEDY.with_(exit_threshold=0.01)
    plain = run(loop_engine(), params)
    assert len({n for o in plain for n in o.num_loops}) > 3
    for batching in LOOP_BATCHING:
        engine = loop_engine(speculative_method="loops", loop_batching=batching)
        outputs = run(engine, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
        assert [o.num_loops for o in outputs] == [o.num_loops for o in plain]


def test_with_the_same_noise_each_reply_is_the_one_without_drafts():
    params = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, seed=5)
    plain = [o.token_ids for o in run(loop_engine(), params)]
    engine = loop_engine(speculative_method="loops", speculative_num_loops=4)
    assert [o.token_ids for o in run(engine, params)] == plain


def test_case_039_a_preempted_request_keeps_no_drafts():
    """It is thrown out while its three drafts are between two loops."""
    proposer = Scripted(lambda request: [1, 2, 3])
    engine = use(loop_engine(loop_batching="continuous", scheduling_policy="priority"), proposer)
    engine.add_request("low", prompts()[3], GREEDY.with_(num_loops=8, priority=1))
    step_checked(engine)
    engine.add_request("fast", prompts()[0], GREEDY.with_(num_loops=1, priority=1))
    for _ in range(3):
        step_checked(engine)
    low = engine._requests["low"]
    assert low.suspended is not None and low.draft_token_ids == [1, 2, 3]
    engine.scheduler._preempt(low, engine.scheduler.schedule())
    assert low.draft_token_ids == [] and low.block_table == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"speculative_num_loops": 8}, r"speculative_num_loops must be below max_num_loops \(8\)"),
        ({"max_num_loops": 1}, r"speculative_num_loops must be below max_num_loops \(1\), got 1"),
    ],
)
def test_drafts_must_be_cheaper_than_tokens(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        loop_engine(speculative_method="loops", **options)


def test_the_engine_knows_how_many_loops_it_ran_for_drafts():
    """One request, two drafts of two loops each: 2 + 2 iterations to draft, 3 · 8 to judge."""
    options = {"speculative_num_loops": 2, "num_speculative_tokens": 2}
    engine = loop_engine(speculative_method="loops", **options)
    engine.add_request("x", prompts()[2], GREEDY)
    step_checked(engine)
    before = engine.runner.stats.token_loops
    step_checked(engine)
    assert engine.runner.stats.token_loops - before == 2 + 2 + 3 * 8
