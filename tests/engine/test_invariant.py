"""The invariant of the book.

In float32 at temperature 0 a request's tokens are the same whatever the token budget, block size,
chunk size, cache on or off, preemption, batch order or back end. The truth is the slow twin: one
request, no cache, every token from scratch.
"""

from __future__ import annotations

import functools
import random

import pytest
from fakes import run_engine, tiny_config, tiny_engine, tiny_model

from minifer.execution.backends import compiled
from minifer.execution.reference import reference_generate
from minifer.request import SamplingParams

LENGTHS = [1, 3, 4, 5, 8, 9, 13, 16, 22]
MAX_TOKENS = 9
# The compiled step wants heads of 16; steps of more than 12 rows go through torch here.
CONFIGS = {"torch": tiny_config(), "compiled": tiny_config(head_dim=16)}
MAX_ROWS = 12


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    shared = [rng.randrange(40) for _ in range(16)]
    unrelated = [[rng.randrange(40) for _ in range(n)] for n in LENGTHS]
    return [*unrelated, shared, shared, [*shared, 5], [*shared[:9], 6, 6]]


@functools.cache
def truth(backend: str) -> list[list[int]]:
    model = tiny_model(CONFIGS[backend])
    return [reference_generate(model, prompt, MAX_TOKENS) for prompt in prompts()]


def answers(backend: str, order: list[int], **options) -> tuple[list[list[int]], object]:
    engine = tiny_engine(config=CONFIGS[backend], backend=backend, **options)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    for i in order:
        engine.add_request(str(i), prompts()[i], params)
    last = run_engine(engine)
    return [last[str(i)].outputs[0].token_ids for i in sorted(order)], engine


@pytest.fixture
def both_paths(monkeypatch):
    monkeypatch.setattr(compiled, "MAX_ROWS", MAX_ROWS)


@pytest.mark.parametrize("backend", CONFIGS)
@pytest.mark.parametrize("order", ["given", "reversed", "shuffled"])
@pytest.mark.parametrize("index", ["hash", "radix", None])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 16, "max_prefill_chunk": 3},
        {"block_size": 1, "num_kv_blocks": 300},
        {"block_size": 3},
        {"block_size": 16, "num_kv_blocks": 40},
        {"max_num_seqs": 1},
        {"num_kv_blocks": 9},
        {"num_kv_blocks": 8, "max_num_batched_tokens": 7, "scheduling_policy": "lpm"},
        {"num_kv_blocks": 10, "scheduling_policy": "priority"},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "default",
)
@pytest.mark.usefixtures("both_paths")
def test_tokens_do_not_depend_on_how_they_were_computed(options, index, order, backend):
    caching = {"enable_prefix_caching": index is not None, "prefix_index": index or "hash"}
    arrival = list(range(len(prompts())))
    if order == "reversed":
        arrival.reverse()
    if order == "shuffled":
        random.Random(1).shuffle(arrival)
    tokens, engine = answers(backend, arrival, **options, **caching)
    assert tokens == truth(backend)
    if options.get("num_kv_blocks", 64) < 12:
        assert engine.scheduler.num_preemptions > 0, "this cache was meant to be too small"
    if index and not options:
        assert engine.kv.stats.num_hits > 0, "the shared prefix was meant to hit"


@pytest.mark.parametrize("index", ["hash", "radix"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 9, "max_num_batched_tokens": 9, "scheduling_policy": "sjf"},
        {"num_kv_blocks": 8, "max_num_batched_tokens": 5, "scheduling_policy": "srpt"},
        {"num_kv_blocks": 9, "scheduling_policy": "mlfq", "mlfq_quantum": 4},
        {"num_kv_blocks": 8, "max_num_seqs": 3, "scheduling_policy": "vtc"},
        {"num_kv_blocks": 10, "max_num_batched_tokens": 12, "enable_chunked_prefill": False},
    ],
    ids=lambda options: options.get("scheduling_policy", "whole prompts"),
)
def test_tokens_do_not_depend_on_the_discipline(options, index):
    arrival = list(range(len(prompts())))
    random.Random(2).shuffle(arrival)
    tokens, engine = answers("torch", arrival, prefix_index=index, **options)
    assert tokens == truth("torch")
    assert engine.scheduler.num_preemptions > 0, "this cache was meant to be too small"


@pytest.mark.parametrize("backend", CONFIGS)
def test_alone_equals_together(backend):
    for i in range(len(prompts())):
        (tokens,), _ = answers(backend, [i])
        assert tokens == truth(backend)[i]
