"""Speculation changes how often the model is asked, and nothing else.

The truth is the slow twin of the whole engine, or an engine that does not draft.
"""

from __future__ import annotations

import functools
import json
import math
import random
from pathlib import Path

import pytest
from fakes import check_engine, run_engine, step_checked, tiny_config, tiny_engine, tiny_model
from speculating import Scripted, chi_square_fits, half_right, use, with_draft_model

from minifer.config import EngineConfig, ModelConfig
from minifer.engine import Engine
from minifer.events import ListSink
from minifer.execution.reference import reference_generate
from minifer.execution.speculation.proposer import SpeculationStats, check_draft
from minifer.llm import LLM
from minifer.postprocessing.hooks import HookVerdict
from minifer.request import OutputKind, SamplingParams
from minifer.weights.hf import config_to_hf

MAX_TOKENS = 14
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
EOS = 11


@functools.cache
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    shared = [rng.randrange(40) for _ in range(16)]
    again = [7, 8, 9, 10, 11, 12] * 3
    unrelated = [[rng.randrange(40) for _ in range(n)] for n in (1, 4, 5, 9, 22)]
    return [*unrelated, shared, [*shared, 5], [*shared[:9], 6, 6], again]


@functools.cache
def truth(config: ModelConfig | None = None) -> list[list[int]]:
    return [reference_generate(tiny_model(config), prompt, MAX_TOKENS) for prompt in prompts()]


def drafting(method: str, **options) -> Engine:
    """An engine that drafts: by n-grams, by its own model, by another one, or by heart."""
    config = options.get("config")
    if method == "ngram":
        return tiny_engine(speculative_method="ngram", prompt_lookup_min=1, **options)
    engine = tiny_engine(**options)
    if method == "heart":
        replies = {(str(i), 0): tokens for i, tokens in enumerate(truth(config))}
        return use(engine, half_right(replies, random.Random(1)))
    return with_draft_model(engine, 0 if method == "itself" else 1, config)


OPTIONS = [
    {},
    {"max_num_batched_tokens": 5},
    {"max_num_batched_tokens": 16, "max_prefill_chunk": 3, "num_speculative_tokens": 7},
    {"block_size": 1, "num_kv_blocks": 300},
    {"block_size": 3, "num_speculative_tokens": 1},
    {"block_size": 16, "num_kv_blocks": 40},
    {"max_num_seqs": 1},
    {"num_kv_blocks": 11},
    {"num_kv_blocks": 10, "max_num_batched_tokens": 9, "scheduling_policy": "lpm"},
    {"num_kv_blocks": 12, "scheduling_policy": "priority"},
]
CACHES = {"hash": {}, "radix": {"prefix_index": "radix"}, "off": {"enable_prefix_caching": False}}


def name(options: dict) -> str:
    return ",".join(f"{k}={v}" for k, v in options.items()) or "default"


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("method", ["ngram", "itself", "another", "heart"])
@pytest.mark.parametrize("options", OPTIONS, ids=name)
def test_case_141_tokens_do_not_depend_on_drafts(options, method, cache):
    check_tokens(drafting(method, **options, **CACHES[cache]), options, method, truth())


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("method", ["ngram", "itself", "another", "heart"])
@pytest.mark.parametrize("options", [OPTIONS[2], OPTIONS[3], OPTIONS[7]], ids=name)
def test_the_compiled_step_judges_drafts(options, method, cache):
    """Drafts are rows of one call, next to other requests' decodes and pieces of prompts."""
    config = tiny_config(head_dim=16)
    engine = drafting(method, config=config, backend="compiled", **options, **CACHES[cache])
    check_tokens(engine, options, method, truth(config))


def check_tokens(engine: Engine, options: dict, method: str, expected: list[list[int]]) -> None:
    for i, prompt in enumerate(prompts()):
        engine.add_request(str(i), prompt, GREEDY)
    last = run_engine(engine)
    assert [last[str(i)].outputs[0].token_ids for i in range(len(prompts()))] == expected
    stats = engine.speculation_stats
    if options.get("num_kv_blocks", 64) < 13:
        assert engine.scheduler.num_preemptions > 0, "this cache was meant to be too small"
    assert stats.num_drafts > 0
    if method in ("itself", "heart"):
        assert stats.num_accepted_tokens > 0
    if method in ("another", "heart"):
        assert stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize("acceptance", ["same_noise", "rejection"])
@pytest.mark.parametrize("temperature", [0, 0.9])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_case_142_a_model_that_drafts_for_itself_is_always_right(
    block_size, temperature, acceptance
):
    """Each token has its KV in the draft's cache: prompts, hits, the last draft, the bonus."""
    engine = with_draft_model(
        tiny_engine(block_size=block_size, num_kv_blocks=300, speculative_acceptance=acceptance), 0
    )
    params = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, seed=3)
    steps = engine.events.step
    for turn in range(2):  # the second time all prompts are hits
        for i, prompt in enumerate(prompts()):
            engine.add_request(f"{turn}/{i}", prompt, params)
        run_engine(engine)
        assert engine.events.step - steps <= 4  # 1 + 5 + 5 + 3 tokens
        steps = engine.events.step
    assert engine.kv.stats.num_hits > 0
    assert engine.speculation_stats.acceptance_rate == 1


def test_drafts_save_steps():
    engine = use(tiny_engine(), Scripted(lambda r: truth()[2][r.num_output_tokens :]))
    engine.add_request("x", prompts()[2], GREEDY)
    run_engine(engine)
    assert engine.events.step == 4  # 1 token, then 5, 5 and the last 3
    stats = engine.speculation_stats
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 10, 10)
    assert stats.num_accepted_tokens_per_pos == [3, 3, 2, 2]
    assert stats.acceptance_rate == 1
    assert stats.mean_acceptance_length == pytest.approx(13 / 3)


def test_statistics_of_nothing():
    assert (SpeculationStats().acceptance_rate, SpeculationStats().mean_acceptance_length) == (0, 1)


def test_drafts_are_never_more_than_can_be_used():
    """Not beyond max_tokens, nor beyond the model's length: the last token needs no draft."""
    proposer = Scripted(lambda request: [0] * 99)
    engine = use(tiny_engine(num_speculative_tokens=6, max_model_len=20), proposer)
    engine.add_request("x", [1], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    engine.add_request("y", [1] * 15, SamplingParams(temperature=0, max_tokens=None))
    last = run_engine(engine)
    assert max(proposer.asked) <= 3
    for request_id, prompt, count in (("x", [1], 4), ("y", [1] * 15, 5)):
        answer = last[request_id].outputs[0]
        assert answer.token_ids == reference_generate(tiny_model(), prompt, count)
        assert answer.finish_reason == "length"


# -- what ends a reply


def test_case_139_a_reply_is_cut_at_an_end_token_among_its_drafts():
    """Drafts 5, EOS, 9, all of them what the model would write."""
    model, prompt = tiny_model(), prompts()[4]
    reply = reference_generate(model, prompt, 9)
    end = reply[5]
    engine = use(tiny_engine(eos=(end,)), Scripted(lambda r: reply[r.num_output_tokens :]))
    engine.add_request("x", prompt, GREEDY)
    answer = run_engine(engine)["x"].outputs[0]
    assert answer.token_ids == reply[: reply.index(end) + 1]
    assert answer.finish_reason == "stop"
    assert engine.events.step <= 3


class EndsAt:
    """A hook that has seen enough after n tokens, and writes down what it saw."""

    def __init__(self, n: int) -> None:
        self.n, self.seen = n, []

    def on_token(self, token_id, text):
        self.seen.append(token_id)
        return HookVerdict(text, "enough" if len(self.seen) == self.n else None)

    def on_finish(self, text):
        return text


@pytest.mark.parametrize("n", [1, 2, 4, 6])
def test_a_hook_sees_each_token_once_and_none_after_the_end(n):
    hook, reply = EndsAt(n), truth()[2]
    engine = use(tiny_engine(), Scripted(lambda r: reply[r.num_output_tokens :]))
    engine.add_request("x", prompts()[2], GREEDY, hooks=[hook])
    answer = run_engine(engine)["x"].outputs[0]
    assert hook.seen == answer.token_ids == reply[:n]
    assert answer.finish_reason == "enough"


def test_each_token_of_a_step_is_reported_once():
    sink, reply = ListSink(), truth()[2]
    engine = use(tiny_engine(sinks=[sink]), Scripted(lambda r: reply[r.num_output_tokens :]))
    engine.add_request("x", prompts()[2], GREEDY)
    run_engine(engine)
    sampled = [e for e in sink.of("x") if e.name == "token.sampled"]
    first = len(prompts()[2])
    assert [e.data["token_id"] for e in sampled] == reply
    assert [e.token_range for e in sampled] == [
        (p, p + 1) for p in range(first, first + MAX_TOKENS)
    ]
    judged = [e for e in sink.of("x") if e.name == "draft.judged"]
    assert judged[0].token_range == (first + 1, first + 5)
    assert judged[0].data == {"token_ids": reply[1:5], "num_accepted": 4}


# -- blocks


def test_case_143_a_block_of_accepted_drafts_is_found_by_the_next_request():
    """P = 4, three drafts: the reply ends in the very step that filled its second block."""
    prompt, reply = [3, 1, 4, 1, 5], reference_generate(tiny_model(), [3, 1, 4, 1, 5], 5)
    engine = use(tiny_engine(num_speculative_tokens=3), Scripted(lambda r: reply[1:4]))
    engine.add_request("x", prompt, GREEDY.with_(max_tokens=5))
    run_engine(engine)
    assert engine.events.step == 2
    engine.add_request("y", [*prompt, *reply], GREEDY)
    assert run_engine(engine)["y"].num_cached_tokens == 8  # 5 + 3 accepted; without them 4


@pytest.mark.parametrize("wrong", range(5))
@pytest.mark.parametrize("length", range(1, 9))
def test_case_017_blocks_of_rejected_drafts_are_never_found(length, wrong):
    """Drafts that are wrong from any place on, at any distance from the end of a block."""
    prompt = [(7 * i) % 40 for i in range(length)]
    reply = reference_generate(tiny_model(), prompt, MAX_TOKENS)

    def guess(request):
        right = reply[request.num_output_tokens :][:4]
        return [t if i < wrong else (t + 1) % 40 for i, t in enumerate(right)]

    engine = use(tiny_engine(num_kv_blocks=6), Scripted(guess))
    engine.add_request("x", prompt, GREEDY)
    while engine.has_unfinished_requests:
        last = {o.request_id: o for o in step_checked(engine)}
        for request in engine.scheduler.running:
            held, computed = len(request.block_table), request.num_computed_tokens
            assert held == -(-computed // 4), "blocks that hold nothing are given back"
            assert not request.draft_token_ids
    assert last["x"].outputs[0].token_ids == reply
    known = {block.key for block in engine.kv.pool.blocks if block.key is not None}
    tokens = prompt + reply
    for key in known:
        chain = []
        while key is not None:
            chain = [*key.token_ids, *chain]
            key = key.parent
        assert chain == tokens[: len(chain)]


def test_rejected_drafts_evict_one_block_and_not_a_new_one_each_step():
    """What they needed for a moment is used again for the next ones."""
    engine = use(tiny_engine(num_kv_blocks=16), Scripted(lambda r: [39, 39, 39, 39]))
    cached = [list(range(8)), list(range(10, 18)), list(range(20, 28))]
    for i, prompt in enumerate(cached):
        engine.add_request(str(i), prompt, GREEDY.with_(max_tokens=1))
    run_engine(engine)
    free = [block for block in engine.kv.pool.blocks if block.key is not None]
    engine.add_request("x", [30], GREEDY.with_(max_tokens=16, ignore_eos=True))
    run_engine(engine)
    assert engine.speculation_stats.num_accepted_tokens < 20
    kept = [block for block in free if block.key is not None]
    assert len(kept) == len(free) == 6  # 5 blocks for x, 1 for drafts, 6 cached: there is room


def test_what_is_rejected_can_be_overwritten_by_a_fork():
    """Two branches of a sequence whose last block holds what rejected drafts left."""
    reply = truth()[2]
    wrong = [(t + 1) % 40 for t in reply]
    engine = use(tiny_engine(), Scripted(lambda r: wrong[r.num_output_tokens :]))
    engine.add_request("x", prompts()[2], GREEDY)
    for _ in range(4):
        step_checked(engine)
    engine.fork("x", "y")
    last = run_engine(engine)
    assert last["x"].outputs[0].token_ids == last["y"].outputs[0].token_ids == reply


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_an_abort_gives_everything_back(steps):
    engine = drafting("heart")
    for i, prompt in enumerate(prompts()):
        engine.add_request(str(i), prompt, GREEDY)
    for _ in range(steps):
        step_checked(engine)
    for request_id in list(engine._requests):
        engine.abort(request_id)
        check_engine(engine)
    assert engine.kv.pool.num_free == engine.kv.pool.num_blocks


@pytest.mark.parametrize("method", ["ngram", "another", "heart"])
@pytest.mark.parametrize(
    "point", ["runner.forward", "proposer.propose", "kv.allocate_drafts", "kv.roll_back"]
)
def test_a_step_with_drafts_can_be_interrupted(monkeypatch, point, method):
    engine = drafting(method, num_kv_blocks=30)
    for i, prompt in enumerate(prompts()):
        engine.add_request(str(i), prompt, GREEDY)
    step_checked(engine)
    part, attribute = engine, point
    while "." in attribute:
        first, attribute = attribute.split(".", 1)
        part = getattr(part, first)
    call, calls = getattr(part, attribute), 0

    def interrupted(*args, **kwargs):
        nonlocal calls
        calls += 1
        result = call(*args, **kwargs)
        if calls == 3:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(part, attribute, interrupted)
    last, caught = {}, 0
    while engine.has_unfinished_requests:
        try:
            last.update((o.request_id, o) for o in step_checked(engine))
        except KeyboardInterrupt:
            caught += 1
            check_engine(engine)
    assert caught == 1
    hit = {i for i, o in last.items() if o.outputs[0].finish_reason == "error"}
    assert len(hit) <= (point == "kv.roll_back")  # whose reply was being written
    for i, tokens in enumerate(truth()):
        assert str(i) in hit or last[str(i)].outputs[0].token_ids == tokens


def test_a_proposer_that_breaks_ends_the_requests_of_its_step_and_no_other():
    engine, proposer = tiny_engine(max_num_seqs=2), Scripted(lambda r: [1])
    use(engine, proposer)
    for i in range(3):
        engine.add_request(str(i), prompts()[i], GREEDY)
    step_checked(engine)
    propose, proposer.propose = proposer.propose, lambda step: 1 / 0
    ended = step_checked(engine)
    proposer.propose = propose
    assert {o.outputs[0].finish_reason for o in ended} == {"error"}
    last = run_engine(engine)
    assert last["2"].outputs[0].token_ids == truth()[2]


# -- above temperature 0


def replies_of(engine: Engine, temperature: float, seeds: range, length: int = 6, **params):
    """Replies to one prompt, one for each seed."""
    asked = SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, **params)
    last = {}
    for start in range(seeds.start, seeds.stop, 50):
        for seed in range(start, min(start + 50, seeds.stop)):
            engine.add_request(str(seed), [7, 8, 7, 8, 7], asked.with_(seed=seed))
        last.update(run_engine(engine))
    return [last[str(seed)].outputs[0].token_ids for seed in seeds]


SMALL = tiny_config(vocab_size=6)


@pytest.mark.parametrize("method", ["another", "ngram"])
def test_with_the_same_noise_each_reply_is_the_one_without_drafts(method):
    plain = replies_of(tiny_engine(), 1.0, range(40))
    if method == "another":
        engine = with_draft_model(tiny_engine(), 1)
    else:
        engine = tiny_engine(speculative_method="ngram", prompt_lookup_min=1)
    assert replies_of(engine, 1.0, range(40)) == plain
    stats = engine.speculation_stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize("params", [{}, {"top_k": 4}, {"top_p": 0.8}], ids=str)
@pytest.mark.parametrize("method", ["another", "guesses"])
def test_rejection_keeps_the_distribution(method, params):
    """Pairs of tokens, drafted and not, against those of an engine that does not draft."""
    options = {"config": SMALL, "debug": False, "speculative_acceptance": "rejection"}
    engine = tiny_engine(**options)
    if method == "another":
        with_draft_model(engine, 1, SMALL)
    else:
        use(engine, Scripted(lambda r: [(r.seed + r.num_output_tokens) % 6, 2, 3]))
    draws, asked = 3000, SamplingParams(temperature=1.5, max_tokens=3, ignore_eos=True, **params)
    counts: dict[tuple[int, ...], int] = {}
    for start in range(0, draws, 60):
        for seed in range(start, start + 60):
            engine.add_request(str(seed), [1, 2, 3], asked.with_(seed=seed))
        for output in run_engine_fast(engine).values():
            pair = tuple(output.outputs[0].token_ids[1:])
            counts[pair] = counts.get(pair, 0) + 1
    assert engine.speculation_stats.num_accepted_tokens > 0
    expected = pair_probabilities([1, 2, 3], asked)
    assert set(counts) <= set(expected)
    assert chi_square_fits(counts, expected)


def run_engine_fast(engine):
    last = {}
    while engine.has_unfinished_requests:
        last.update((o.request_id, o) for o in engine.step())
    return last


def pair_probabilities(prompt, params) -> dict[tuple[int, int], float]:
    """P(second and third token), summed over the first: from the model's own logits."""
    from minifer.execution.reference import reference_logits
    from minifer.execution.sampler_reference import reference_probabilities

    model = tiny_model(SMALL)

    def after(tokens):
        request = fake_request(prompt, tokens, params)
        logits = reference_logits(model, [*prompt, *tokens])[-1].tolist()
        return reference_probabilities(logits, request)

    result: dict[tuple[int, int], float] = {}
    for a, p in after([]).items():
        for b, q in after([a]).items():
            for c, r in after([a, b]).items():
                result[b, c] = result.get((b, c), 0.0) + p * q * r
    return result


def fake_request(prompt, tokens, params):
    from fakes import make_request

    request = make_request("r", prompt)
    request.params = params
    request.token_ids += tokens
    return request


@pytest.mark.parametrize("acceptance", ["same_noise", "rejection"])
def test_a_draft_model_that_computes_nan_is_only_wrong(acceptance):
    """Its drafts are token 0, and were drawn from nothing: accepted as often as token 0 is due."""
    engine = with_draft_model(tiny_engine(speculative_acceptance=acceptance), 1)
    broken = tiny_model(tiny_config(), 1)
    engine.proposer.runner.model = lambda *args: broken(*args) * math.nan
    engine.proposer.runner.model.logits = broken.logits
    replies = replies_of(engine, 1.0, range(60))
    stats = engine.speculation_stats
    assert all(len(reply) == 6 for reply in replies)
    assert stats.num_draft_tokens > 500 and stats.acceptance_rate < 0.2
    if acceptance == "same_noise":
        assert replies == replies_of(tiny_engine(), 1.0, range(60))


@pytest.mark.parametrize("method", ["ngram", "another", "heart"])
def test_deltas_of_several_tokens_add_up_to_the_reply(method):
    engine, parts = drafting(method), {}
    asked = GREEDY.with_(output_kind=OutputKind.DELTA, logprobs=1)
    for i, prompt in enumerate(prompts()):
        engine.add_request(str(i), prompt, asked)
    while engine.has_unfinished_requests:
        for output in step_checked(engine):
            (one,) = output.outputs
            assert len(one.token_ids) == len(one.logprobs) >= 1
            assert all(t in scores for t, scores in zip(one.token_ids, one.logprobs, strict=True))
            parts.setdefault(output.request_id, []).append(one.token_ids)
    assert any(len(tokens) > 1 for deltas in parts.values() for tokens in deltas) or (
        method == "another"
    )
    for i, tokens in enumerate(truth()):
        assert [t for delta in parts[str(i)] for t in delta] == tokens


# -- what is refused


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"speculative_method": "medusa"}, "speculative_method must be one of none, ngram"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be an integer of at least 1"),
        ({"prompt_lookup_min": 5}, r"prompt_lookup_min must be at most prompt_lookup_max \(4\)"),
        ({"speculative_method": "draft"}, "needs speculative_model, a name or a path, got None"),
        ({"speculative_model": "x"}, 'speculative_model needs speculative_method="draft"'),
        ({"speculative_model": Path("x")}, "got 'x' with \"none\""),
        ({"speculative_num_loops": 2}, 'speculative_num_loops needs speculative_method="loops"'),
        ({"speculative_acceptance": "typical"}, "speculative_acceptance must be one of same_noise"),
        (
            {"speculative_method": "draft", "speculative_model": "x", "kv_dram_bytes": 10**6},
            "keeps KV of its own, which kv_dram_bytes and kv_disk_path do not store",
        ),
        (
            {
                "speculative_method": "ngram",
                "loop_kv_policy": "terminal",
                "enable_prefix_caching": False,
            },
            'speculative_method must be "none" with loop_kv_policy=terminal',
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        EngineConfig(**options)


def test_a_plain_model_has_no_loops_to_draft_with():
    with pytest.raises(ValueError, match="needs a loop model such as parcae-tiny"):
        tiny_engine(speculative_method="loops")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"speculative_method": "loops"}, "needs a loop model such as parcae-tiny"),
        ({"speculative_method": "draft", "speculative_model": "parcae-tiny"}, "'parcae-tiny' "),
        ({"max_num_loops": 2}, "max_num_loops needs a loop model"),
    ],
)
def test_a_model_without_the_option_is_refused_before_weights_are_read(tmp_path, options, sentence):
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(tiny_config())))
    for build in (LLM, Engine.from_pretrained):
        with pytest.raises(ValueError, match=sentence):
            build(str(tmp_path), **options)


def test_an_engine_that_is_given_a_runner_is_given_a_proposer():
    parts = tiny_engine()
    config = EngineConfig(speculative_method="draft", speculative_model="minifer-tiny")
    with pytest.raises(ValueError, match="needs a model that the engine loads itself"):
        Engine(config, parts.runner, parts.limits)


def test_a_draft_model_must_fit_to_its_target():
    target = tiny_config()
    with pytest.raises(ValueError, match="vocabulary of 40 tokens, 'd' has 41"):
        check_draft("d", tiny_config(vocab_size=41), target, 128)
    with pytest.raises(ValueError, match="must know 128 positions, 'd' knows 64"):
        check_draft("d", tiny_config(max_position_embeddings=64), target, 128)
    check_draft("d", tiny_config(max_position_embeddings=64, num_layers=1), target, 64)
    with pytest.raises(ValueError, match="a plain transformer, 'parcae-tiny' is a loop model"):
        Engine.from_pretrained(
            "minifer-tiny", speculative_method="draft", speculative_model="parcae-tiny"
        )


def test_a_draft_models_kv_is_part_of_what_a_block_costs():
    budget = {"kv_cache_bytes": 10**6, "max_num_seqs": 500}
    alone = Engine.from_pretrained("minifer-tiny", **budget)
    both = Engine.from_pretrained(
        "minifer-tiny", speculative_method="draft", speculative_model="minifer-tiny", **budget
    )
    assert both.kv.pool.num_blocks == alone.kv.pool.num_blocks // 2
