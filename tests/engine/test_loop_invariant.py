"""The invariant of the book, for loop models: tokens do not depend on how they were computed.

Every request has a depth of its own. The truth is the slow twin: one request, every token from
scratch, through all of its iterations, no blocks.
"""

from __future__ import annotations

import functools
import random

import pytest
from fakes import run_engine, step_checked
from loop_fakes import loop_engine, twin_logits, twin_tokens

from minifer.loops import LOOP_BATCHING
from minifer.request import SamplingParams

MAX_TOKENS = 5
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
LENGTHS = [1, 3, 4, 5, 8, 9, 13, 22]
# Of the four prompts that begin alike, two have the same depth: they may share, the others not.
DEPTHS = [1, 2, 3, 4, 5, 6, 7, 8, 3, 3, 8, 3]
CACHES = {"hash": {}, "radix": {"prefix_index": "radix"}, "off": {"enable_prefix_caching": False}}


@functools.cache
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    shared = [rng.randrange(40) for _ in range(12)]
    unrelated = [[rng.randrange(40) for _ in range(n)] for n in LENGTHS]
    return [*unrelated, shared, shared, [*shared, 5], [*shared[:9], 6, 6]]


@functools.cache
def truth(policy: str = "full") -> list[list[int]]:
    return [
        twin_tokens(prompt, depth, MAX_TOKENS, policy)
        for prompt, depth in zip(prompts(), DEPTHS, strict=True)
    ]


def answers(order: list[int], arrivals: int | None = None, **options):
    """Tokens of all requests; they arrive in `order`, at once or a few before each step."""
    engine = loop_engine(**options)
    queue, last = list(order), {}
    while queue or engine.has_unfinished_requests:
        now = queue[: arrivals or len(queue)]
        del queue[: len(now)]
        for i in now:
            engine.add_request(str(i), prompts()[i], GREEDY.with_(num_loops=DEPTHS[i]))
        last.update((output.request_id, output) for output in step_checked(engine))
    for i in order:
        answer = last[str(i)].outputs[0]
        assert answer.num_loops == [DEPTHS[i]] * len(answer.token_ids)
    return [last[str(i)].outputs[0].token_ids for i in sorted(order)], engine


OPTIONS = [
    {},
    {"max_num_batched_tokens": 5},
    {"max_num_batched_tokens": 16, "max_prefill_chunk": 3},
    {"block_size": 1, "num_kv_blocks": 300},
    {"block_size": 3, "max_num_seqs": 3},
    {"max_num_seqs": 1},
    {"num_kv_blocks": 9},
    {"num_kv_blocks": 8, "max_num_batched_tokens": 7, "scheduling_policy": "lpm"},
    {"num_kv_blocks": 10, "scheduling_policy": "priority"},
    {"kv_dram_bytes": 1 << 20, "num_kv_blocks": 9, "kv_load_policy": "always"},
]


def name(options: dict) -> str:
    return ",".join(f"{k}={v}" for k, v in options.items()) or "default"


def run_options(options, cache, batching, policy, arrivals, seed):
    order = list(range(len(prompts())))
    random.Random(seed).shuffle(order)
    more = {"loop_batching": batching, "loop_kv_policy": policy}
    tokens, engine = answers(order, arrivals, **options, **CACHES[cache], **more)
    assert tokens == truth(policy)
    if options.get("num_kv_blocks", 64) < 11:
        assert engine.scheduler.num_preemptions > 0, "this cache was meant to be too small"
    return engine


BATCHING = list(LOOP_BATCHING)
WITHOUT_TIERS = [o for o in OPTIONS if "kv_dram_bytes" not in o]
# A prompt must fit into one step where KV is overwritten.
WHOLE_PROMPTS = [o for o in WITHOUT_TIERS if o.get("max_num_batched_tokens", 22) >= 22]


@pytest.mark.parametrize(("number", "options"), list(enumerate(OPTIONS)), ids=lambda o: str(o)[:40])
def test_tokens_do_not_depend_on_how_they_were_computed(number, options):
    run_options(
        options, ["hash", "radix", "off"][number % 3], BATCHING[number // 3 % 3], "full", 2, 0
    )


@pytest.mark.parametrize("policy", ["first-1", "first-3"])
def test_the_first_iterations_kv_answers_like_its_slow_twin(policy):
    for seed, options in enumerate(OPTIONS[int(policy[-1]) :: 4]):
        run_options(options, ["hash", "radix"][seed % 2], BATCHING[seed % 3], policy, 2, seed)


@pytest.mark.parametrize("policy", ["terminal", "cyclic-3"])
def test_overwritten_kv_answers_like_its_slow_twin(policy):
    for seed, options in enumerate(WHOLE_PROMPTS[policy == "terminal" :: 2]):
        run_options(options, "off", BATCHING[seed % 3], policy, 2, seed)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "first-1", "first-3", "first-9"])
@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("options", OPTIONS, ids=name)
def test_all_of_it(options, batching, policy):
    for seed, cache in enumerate(CACHES):
        if "kv_dram_bytes" not in options or cache != "off":
            run_options(options, cache, batching, policy, seed or None, seed)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["terminal", "cyclic-2", "cyclic-3", "cyclic-9"])
@pytest.mark.parametrize("batching", BATCHING)
def test_all_of_it_overwritten(batching, policy):
    for seed, options in enumerate(WHOLE_PROMPTS):
        run_options(options, "off", batching, policy, seed % 3 or None, seed)


def test_prompts_are_scored_in_the_middle_of_other_loops():
    """`prompt_logprobs` of chunks that are suspended: each position once, and right."""
    engine = loop_engine(max_num_batched_tokens=7)
    asked = GREEDY.with_(prompt_logprobs=0)
    for i, depth in enumerate(DEPTHS):
        engine.add_request(str(i), prompts()[i], asked.with_(num_loops=depth))
    last = run_engine(engine)
    for i, depth in enumerate(DEPTHS):
        prompt = prompts()[i]
        scores = twin_logits(prompt, depth).log_softmax(-1)
        got = last[str(i)].prompt_logprobs
        assert len(got) == len(prompt) and got[0] is None
        for p in range(1, len(prompt)):
            expected = float(scores[p - 1, prompt[p]])
            assert got[p][prompt[p]].logprob == pytest.approx(expected, abs=1e-4)
        assert last[str(i)].outputs[0].token_ids == truth()[i]


@pytest.mark.parametrize("threshold", [None, 0.01])
def test_n_answers_of_one_prompt_are_those_of_one_at_a_time(threshold):
    """Tokens, and how many loops each of them took."""
    params = SamplingParams(
        temperature=1.0, seed=5, max_tokens=9, num_loops=8, exit_threshold=threshold
    )
    engine = loop_engine()
    engine.add_request("deep", prompts()[6], GREEDY)
    engine.add_request("many", prompts()[5], params.with_(n=3))
    last = run_engine(engine)
    for index, answer in enumerate(last["many"].outputs):
        alone = loop_engine()
        alone.add_request("x", prompts()[5], params.with_(seed=5 + index))
        (expected,) = run_engine(alone)["x"].outputs
        assert answer.token_ids == expected.token_ids
        assert answer.num_loops == expected.num_loops
    assert len({tuple(answer.token_ids) for answer in last["many"].outputs}) == 3
    loops = {tuple(answer.num_loops) for answer in last["many"].outputs}
    assert loops == {(8,) * 9} if threshold is None else len(loops) == 3


def test_policies_differ():
    """Or the tests above would compare nothing."""
    answers = [truth(p) for p in ("full", "first-1", "first-3", "terminal", "cyclic-3")]
    assert all(a != b for i, a in enumerate(answers) for b in answers[:i])
