"""The invariant of the book, for loop models: tokens do not depend on how they were computed.

Every request has a depth of its own. The truth is the slow twin: one request, every token from
scratch, through all of its iterations, no blocks.
"""

from __future__ import annotations

import functools
import random

import pytest
from fakes import step_checked
from loop_fakes import loop_engine, twin_tokens

from minifer.request import SamplingParams

MAX_TOKENS = 7
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
    if "kv_dram_bytes" in options and cache == "off":
        pytest.skip("tiers need a prefix cache")
    order = list(range(len(prompts())))
    random.Random(seed).shuffle(order)
    more = {"loop_batching": batching, "loop_kv_policy": policy}
    tokens, engine = answers(order, arrivals, **options, **CACHES[cache], **more)
    assert tokens == truth(policy)
    if options.get("num_kv_blocks", 64) < 11:
        assert engine.scheduler.num_preemptions > 0, "this cache was meant to be too small"
    return engine


@pytest.mark.parametrize("batching", ["continuous", "lockstep"])
@pytest.mark.parametrize("options", OPTIONS, ids=name)
def test_tokens_do_not_depend_on_how_they_were_computed(options, batching):
    for seed, cache in enumerate(CACHES):
        if "kv_dram_bytes" not in options or cache != "off":
            run_options(options, cache, batching, "full", seed or None, seed)


@pytest.mark.parametrize("policy", ["first-1", "first-3", "first-9"])
def test_the_first_iterations_kv_answers_like_its_slow_twin(policy):
    for seed, (options, cache) in enumerate(zip(OPTIONS, [*CACHES] * 4, strict=False)):
        if "kv_dram_bytes" not in options or cache != "off":
            run_options(options, cache, "continuous", policy, 2, seed)


@pytest.mark.parametrize("policy", ["terminal", "cyclic-2", "cyclic-3", "cyclic-9"])
def test_overwritten_kv_answers_like_its_slow_twin(policy):
    for seed, options in enumerate(OPTIONS):
        if "kv_dram_bytes" not in options and options.get("max_num_batched_tokens", 22) >= 22:
            for batching in ("continuous", "lockstep"):
                run_options(options, "off", batching, policy, 2, seed)


def test_policies_differ():
    """Or the tests above would compare nothing."""
    answers = [truth(p) for p in ("full", "first-1", "first-3", "terminal", "cyclic-3")]
    assert all(a != b for i, a in enumerate(answers) for b in answers[:i])
