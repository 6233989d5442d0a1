"""One probe a fault: a small look at the mechanism that the fault breaks, and at nothing else.

A probe passes on a healthy engine, fails with its fault, and does not care about any other: it
checks numbers, positions or tables where they are made, not the reply that comes of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from fakes import tiny_config, tiny_model

from minifer.engine import Engine
from minifer.execution.reference import reference_logits
from minifer.execution.sampler import SampleRow
from minifer.faults.matrix import build_engine
from minifer.faults.tools import converse
from minifer.kv.prefix_key import PrefixKey
from minifer.outputs import RequestOutput
from minifer.postprocessing.detokenizer import IncrementalDetokenizer
from minifer.postprocessing.guards.tool_loop import tool_loop
from minifer.postprocessing.stop_strings import StopStrings
from minifer.request import SamplingParams
from minifer.text.byte_tokenizer import byte_tokenizer

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]  # two full blocks of 4 and one token
PROBES: dict[str, tuple[Callable[[Engine], None], dict[str, Any]]] = {}


def probe(name: str, **options: Any) -> Callable[[Callable[[Engine], None]], None]:
    """Register a probe; options: of its engine (`loud`: a model with large attention scores)."""

    def register(function: Callable[[Engine], None]) -> None:
        PROBES[name] = (function, options)

    return register


def make_engine(loud: bool = False, **options: Any) -> Engine:
    """A tiny random model with a byte tokenizer; memory as after a day of service."""
    config = tiny_config(vocab_size=288)
    loaded = SimpleNamespace(
        model=tiny_model(config, std=1.5 if loud else 0.1),
        config=config,
        tokenizer=byte_tokenizer(),
        eos_token_ids=frozenset({7}),
        generation_defaults={},
    )
    return build_engine(loaded, **{"block_size": 4, "num_kv_blocks": 32, **options})


def add(engine: Engine, name: str, prompt: list[int] = PROMPT, max_tokens: int = 4, **params: Any):
    fields = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **params}
    engine.add_request(name, prompt, SamplingParams(**fields))


def finish(engine: Engine) -> dict[str, RequestOutput]:
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests:
        last |= {output.request_id: output for output in engine.step()}
    return last


def error(output: RequestOutput) -> str:
    answer = output.outputs[0]
    return str(answer.stop_reason) if answer.finish_reason == "error" else ""


@contextmanager
def watched(target: Any, method: str, see: Callable[..., None]):
    """Call `see(arguments …, result)` after each call of a method, outside of any fault."""
    original = getattr(target, method)

    def call(*args: Any) -> Any:
        result = original(*args)
        see(*args, result)
        return result

    setattr(target, method, call)
    yield
    setattr(target, method, original)


@probe("nan-row")
def _(engine: Engine) -> None:
    add(engine, "a", PROMPT, 20)
    assert "NaN" not in error(finish(engine)["a"])


@probe("unchecked-nan")
def _(engine: Engine) -> None:
    add(engine, "a")
    engine.step()
    (request,) = engine.scheduler.running
    (sampled,) = engine.sampler(torch.full((1, 288), torch.nan), [SampleRow(0, request, 0)])
    assert sampled.token_id == -1 and sampled.error == "logits hold NaN"


@probe("softmax-without-max", loud=True)
def _(engine: Engine) -> None:
    add(engine, "a")
    assert error(finish(engine)["a"]) == ""


@probe("wrong-script")
def _(engine: Engine) -> None:
    add(engine, "keeps block 0", [1, 2], 9)
    add(engine, "a", PROMPT, 1)
    model: Any = engine.runner.model  # type: ignore[attr-defined]
    expected = int(reference_logits(model, PROMPT)[-1].argmax())
    assert finish(engine)["a"].outputs[0].token_ids == [expected]


@probe("off-by-one-length", debug=True)
def _(engine: Engine) -> None:
    add(engine, "keeps block 0", [1, 2], 5)
    add(engine, "a", PROMPT[:5], 2)
    assert "NaN" not in error(finish(engine)["a"])


@probe("stale-after-reuse", num_kv_blocks=4)
def _(engine: Engine) -> None:
    for i in range(3):
        add(engine, f"{i}", [i, *PROMPT], 2)
        finish(engine)
    pool = engine.kv.pool
    findable = {block for _, block in pool.index._entries.values()}  # type: ignore[attr-defined]
    assert findable == {block.block_id for block in pool.blocks if block.key is not None}


@probe("lost-boundary-slot", debug=True)
def _(engine: Engine) -> None:
    add(engine, "a", PROMPT[:4], 3)
    assert "holds nothing" not in error(finish(engine)["a"])


@probe("padding-writes-slot-0")
def _(engine: Engine) -> None:
    """In the first layer a value depends on its token alone."""
    add(engine, "a", cache_salt="a")
    add(engine, "b", cache_salt="b")
    engine.step()
    a, b = (request.block_table[0] for request in engine.scheduler.running)
    values = engine.runner.kv.values[0]  # type: ignore[attr-defined]
    assert torch.allclose(values[a, 0], values[b, 0], atol=1e-4)


@probe("copy-on-write-skipped")
def _(engine: Engine) -> None:
    add(engine, "a", PROMPT, 4, n=2, temperature=1.0, seed=1)
    engine.step()
    engine.step()
    first, second = engine.scheduler.running
    assert first.block_table[-1] != second.block_table[-1]


@probe("hash-without-parent")
def _(engine: Engine) -> None:
    for name, start in (("a", 10), ("b", 20)):
        add(engine, name, [start] * 4 + PROMPT)
    engine.step()
    a, b = (request.prefix_keys[1] for request in engine.scheduler.running)
    assert a.token_ids == b.token_ids and a.digest != b.digest


@probe("one-byte-hash")
def _(engine: Engine) -> None:
    add(engine, "a")
    engine.step()
    key = engine.scheduler.running[0].prefix_keys[0]
    forged = PrefixKey(None, (8, 8, 8, 8), (), key.digest)
    assert engine.kv.pool.index.match([key]) and not engine.kv.pool.index.match([forged])


@probe("salt-ignored")
def _(engine: Engine) -> None:
    for tenant in ("alice", "bob"):
        add(engine, tenant, cache_salt=tenant)
    assert finish(engine)["bob"].num_cached_tokens == 0


@probe("one-token-is-decode")
def _(engine: Engine) -> None:
    add(engine, "a", [1, 2, 3], 8)
    add(engine, "b", PROMPT, 2)
    for _ in range(3):
        engine.step()
    add(engine, "c", [5], 1)
    found: list[tuple[int, int]] = []
    with watched(
        engine.kv,
        "prepare",
        lambda plan, step: found.append((step.token_ids[-1], step.positions[-1])),
    ):
        engine.step()
    assert found == [(5, 0)]


@probe("wrong-position-after-preemption", num_kv_blocks=8)
def _(engine: Engine) -> None:
    def see(plan: Any, step: Any) -> None:
        for entry, first in zip(plan.scheduled, step.query_start, strict=False):
            if entry.request.num_preemptions:
                said = step.positions[first : first + entry.num_new]
                right.append(said == list(range(entry.start, entry.end)))

    right: list[bool] = []
    for i in range(3):
        add(engine, f"{i}", [i, *PROMPT], 12)
    with watched(engine.kv, "prepare", see):
        finish(engine)
    assert right and all(right)


@probe("resumed-with-prompt-only", num_kv_blocks=8)
def _(engine: Engine) -> None:
    outputs: list[int] = []
    for i in range(3):
        add(engine, f"{i}", [i, *PROMPT], 12)
    with watched(
        engine.scheduler.waiting,
        "put_back",
        lambda victim, _: outputs.append(victim.num_output_tokens),
    ):
        finish(engine)
    assert outputs and all(outputs)


@probe("double-free-on-abort")
def _(engine: Engine) -> None:
    for name in ("stays", "leaves"):
        add(engine, name, PROMPT, 9)
    engine.step()
    try:
        engine.abort("leaves")
    except RuntimeError as broken:
        raise AssertionError(broken) from broken
    (stays,) = engine.scheduler.running
    assert [engine.kv.pool.blocks[block].ref_count for block in stays.block_table] == [1, 1, 1]


@probe("eos-ignored")
def _(engine: Engine) -> None:
    add(engine, "a", PROMPT, 4, ignore_eos=False, logit_bias={7: 1000})
    assert finish(engine)["a"].outputs[0].finish_reason == "stop"


@probe("shared-rng")
def _(engine: Engine) -> None:
    add(engine, "a", PROMPT, 9, temperature=1.0, seed=1)
    engine.step()
    (request,) = engine.scheduler.running
    rows = [SampleRow(i, request, i) for i in range(8)]
    logits = torch.zeros(8, 288)
    once, twice = (engine.sampler(logits, rows) for _ in range(2))
    assert once == twice


@probe("held-bytes-dropped")
def _(engine: Engine) -> None:
    detokenizer = IncrementalDetokenizer(engine.tokenizer.decode)  # type: ignore[union-attr]
    text = "né 👋!"
    assert "".join(map(detokenizer.push, text.encode())) + detokenizer.flush() == text


@probe("stop-string-leaks")
def _(engine: Engine) -> None:
    stops = StopStrings(["abc"])
    assert [stops.push(c) for c in "xab"] == ["x", "", ""]


@probe("tool-result-dropped")
def _(engine: Engine) -> None:
    assert tool_loop(converse(engine, lambda messages: None)) is None


@probe("offloaded-before-written", debug=True, kv_dram_bytes=2**20)
def _(engine: Engine) -> None:
    add(engine, "a", PROMPT, 1)
    finish(engine)
    tiers: Any = engine.kv.tiers
    assert tiers.stats.rejected == 0 and tiers.stats.stores["dram"].blocks == 2
