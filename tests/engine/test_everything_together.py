"""Everything at once: tiers, grammars, hooks, forks, drafts, aborts, Ctrl-C, broken steps.

Whatever happens around it, a reply that comes to its end is the reply of a plain engine that has
nothing else to do; one that is cut off is its beginning. At the end nothing is left behind.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fakes import check_engine, run_engine, tiny_config, tiny_engine

from minifer.engine import Engine
from minifer.outputs import RequestOutput
from minifer.postprocessing.guards.safety import SafetyHook, WordListCheck
from minifer.request import SamplingParams
from minifer.sampling_params import RepetitionDetection
from minifer.structured_output import StructuredOutput
from minifer.text.byte_tokenizer import byte_tokenizer

pytest.importorskip("llguidance")

EOS = 257
BLOCK = 2 * 2 * 4 * 2 * 16 * 4  # bytes: K and V, layers, P, K, C, float32
CONFIG = tiny_config(vocab_size=288, max_position_embeddings=256, head_dim=16)
TOKENIZER = byte_tokenizer()
NUM_REQUESTS = 40
STEMS = ["", "the quick brown ", "the quick brown fox jumps ", "abcabcabcabcabc"]
STRUCTURES = [
    StructuredOutput(regex="[a-f]{3,30}"),
    StructuredOutput(choice=["alpha", "alphabet soup", "beta"]),
    StructuredOutput(json_object=True),
]
Wish = tuple[list[int], SamplingParams, bool]  # prompt, parameters, is the text checked?


class BrokenStepError(Exception):
    pass


def wish(rng: random.Random) -> Wish:
    """A prompt, often with a beginning that others share."""
    tail = "".join(rng.choice("abcd xyz") for _ in range(rng.randint(1, 20)))
    fields: dict[str, Any] = {
        "temperature": rng.choice([0, 0.8, 1.3]),
        "top_p": rng.choice([1.0, 0.9]),
        "repetition_penalty": rng.choice([1.0, 1.2]),
        "logit_bias": rng.choice([None, {97: 2.0, EOS: 3.0}]),
        "bad_words": rng.choice([(), ("ab", "q")]),
        "stop": rng.choice([(), ("a", "zz"), ("e f",)]),
        "include_stop_str_in_output": rng.random() < 0.3,
        "max_tokens": rng.choice([1, 9, 20, 40]),
        "min_tokens": rng.choice([0, 0, 1]),
        "ignore_eos": rng.random() < 0.2,
        "prompt_logprobs": rng.choice([None, None, None, 1]),
        "seed": rng.randrange(2**40),
        "priority": rng.randrange(3),
        "cache_salt": rng.choice([None, None, "a"]),
        "structured": rng.choice([None, None, *STRUCTURES]),
        "repetition_detection": rng.choice([None, RepetitionDetection(6, 3)]),
    }
    if fields["temperature"]:
        fields["n"] = rng.choice([1, 1, 2, 3])
    prompt = TOKENIZER.encode(rng.choice(STEMS) + tail)
    return prompt, SamplingParams(**fields), rng.random() < 0.4


def add(engine: Engine, name: str, wish: Wish) -> None:
    prompt, params, checked = wish
    hooks = [SafetyHook([WordListCheck(["b", "dd"], whole_word=False)])] if checked else []
    engine.add_request(name, prompt, params, hooks=hooks)


def plain_engine() -> Engine:
    options = {"enable_prefix_caching": False, "num_kv_blocks": 64}
    return tiny_engine(config=CONFIG, tokenizer=TOKENIZER, eos=(EOS,), **options)


def make_unreliable(engine: Engine, rng: random.Random) -> None:
    """The disk is slow, forgets, and raises what nobody expects of it."""
    disk = engine.kv.tiers.disk
    read, write = disk.read, disk.write

    def perhaps(what, *args):
        if (luck := rng.random()) < 0.05:
            raise BrokenStepError
        if luck < 0.2:
            time.sleep(rng.random() / 200)
        return None if luck > 0.95 else what(*args)

    disk.read = lambda key: perhaps(read, key)
    disk.write = lambda key, payload: perhaps(write, key, payload)


class Bomb:
    """Raises once, when a part of the engine is called or has done its work."""

    PARTS = ("runner.forward", "kv.prepare", "kv.allocate", "kv.pool.acquire", "kv.count_lookup")
    PARTS += ("scheduler.schedule", "scheduler.advance", "postprocessor.accept", "kv.store")

    def __init__(self, engine: Engine) -> None:
        self.error: type[BaseException] | None = None
        self.where, self.late = "", False
        for path in self.PARTS:
            part: Any = engine
            for name in path.split(".")[:-1]:
                part = getattr(part, name)
            self._wire(part, path)

    def _wire(self, part: Any, path: str) -> None:
        name = path.split(".")[-1]
        method = getattr(part, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.late:
                self._explode(path)
            result = method(*args, **kwargs)
            self._explode(path)
            return result

        setattr(part, name, call)

    def _explode(self, path: str) -> None:
        if self.error is not None and self.where == path:
            error, self.error = self.error, None
            raise error

    def set(self, rng: random.Random) -> None:
        self.error = rng.choice([KeyboardInterrupt, BrokenStepError])
        self.where, self.late = rng.choice(self.PARTS), rng.random() < 0.5


def live(engine: Engine, rng: random.Random) -> tuple[dict[str, Wish], dict[str, RequestOutput]]:
    """Serve, and misbehave; what was asked, and the last output of each."""
    asked: dict[str, Wish] = {}
    last: dict[str, RequestOutput] = {}
    bomb, num_forks = Bomb(engine), 0
    for _ in range(5000):
        if len(asked) - num_forks < NUM_REQUESTS:
            if rng.random() < 0.6:
                asked[name := f"r{len(asked)}"] = wish(rng)
                add(engine, name, asked[name])
        elif not engine.has_unfinished_requests:
            return asked, last
        running = [name for name in engine._requests if asked[name][1].n == 1]
        if running and rng.random() < 0.05:
            name = rng.choice(running)
            engine.fork(name, f"f{len(asked)}", seed=asked[name][1].seed)
            asked[f"f{len(asked)}"] = asked[name]
            num_forks += 1
        if engine._requests and rng.random() < 0.04:
            output = engine.abort(rng.choice(list(engine._requests)))
            last[output.request_id] = output
        if rng.random() < 0.1:
            bomb.set(rng)
        with suppress(KeyboardInterrupt, BrokenStepError):
            last.update((output.request_id, output) for output in engine.step())
        bomb.error = None
        check_engine(engine)
    raise AssertionError("no end in sight")


OPTIONS: list[dict[str, Any]] = [
    {"prefix_index": "hash", "kv_dram_bytes": BLOCK, "max_prefill_chunk": 9},
    {"prefix_index": "radix", "scheduling_policy": "priority", "kv_dram_bytes": 12 * BLOCK},
    {"prefix_index": "radix", "scheduling_policy": "lpm", "kv_load_timeout": 0.003},
    {"prefix_index": "hash", "speculative_method": "ngram", "prompt_lookup_min": 1},
    {"prefix_index": "radix", "backend": "compiled", "kv_dram_bytes": 12 * BLOCK},
    {"backend": "compiled", "speculative_method": "ngram", "prompt_lookup_min": 1},
]


@pytest.mark.parametrize("seed", range(len(OPTIONS)))
def test_everything_together(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    threads = set(threading.enumerate())
    common = {"num_kv_blocks": 40, "max_num_seqs": 6, "max_num_batched_tokens": 20}
    common |= {"kv_disk_path": str(tmp_path), "kv_disk_bytes": 400 * BLOCK}
    common |= {"kv_load_policy": "always", "kv_dram_bytes": 4 * BLOCK, "kv_load_timeout": 0.5}
    options = {**common, **OPTIONS[seed]}
    engine = tiny_engine(config=CONFIG, tokenizer=TOKENIZER, eos=(EOS,), **options)
    make_unreliable(engine, random.Random(seed))
    asked, last = live(engine, rng)

    engine.kv.tiers.flush()
    dram, prefetcher = engine.kv.tiers.dram, engine.kv.tiers._prefetcher
    while prefetcher._reading:  # given up by all, and still being read
        engine.kv.collect()
        time.sleep(0.001)
    assert not prefetcher._waits
    assert dram.reserved == 0
    assert not any(block.pinned for block in dram)
    engine.close()
    assert set(threading.enumerate()) <= threads
    assert not list(tmp_path.rglob("*.tmp"))

    engine = plain_engine()
    plain: dict[int, RequestOutput] = {}  # a fork has its parent's wish
    num_whole = 0
    for name, asked_for in asked.items():
        if id(asked_for) not in plain:
            add(engine, name, asked_for)
            plain[id(asked_for)] = run_engine(engine)[name]
        for got in last[name].outputs:
            truth = plain[id(asked_for)].outputs[got.index]
            if got.finish_reason == "abort" or got.stop_reason == "KeyboardInterrupt":
                assert got.token_ids == truth.token_ids[: len(got.token_ids)]
            elif "BrokenStepError" not in str(got.stop_reason):
                assert (got.token_ids, got.text) == (truth.token_ids, truth.text)
                assert got.finish_reason == truth.finish_reason
                num_whole += 1
    assert num_whole > NUM_REQUESTS // 2
