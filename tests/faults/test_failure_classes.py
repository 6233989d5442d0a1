"""F-05 to F-08 and F-15: classes of faults that reached users, on the healthy engine."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fakes import run_engine, step_checked, tiny_engine, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from minifer.execution.reference import reference_generate
from minifer.kv.step_input import StepInput
from minifer.request import SamplingParams
from minifer.scheduling.plan import SchedulePlan

P = 4  # block size of `tiny_engine`


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def prompt(i: int, length: int) -> list[int]:
    return [(7 * i + 3 * j * j + j) % 40 for j in range(length)]


@pytest.mark.parametrize("prefix_index", ["hash", "radix"])
def test_f05_the_same_prompts_get_the_same_tokens_however_full_the_cache_was(
    prefix_index: str,
) -> None:
    """vllm-project/vllm#43961: GSM8K fell from 0.91 to 0.01 once the pool had been used up."""
    engine = tiny_engine(num_kv_blocks=12, prefix_index=prefix_index)
    prompts = [prompt(i, 5 + 3 * i) for i in range(6)]
    expected = [reference_generate(tiny_model(), ids, 8) for ids in prompts]
    for epoch in range(4):
        for i, ids in enumerate(prompts):
            engine.add_request(f"{epoch}-{i}", ids, greedy(8))
        outputs = run_engine(engine)
        tokens = [outputs[f"{epoch}-{i}"].outputs[0].token_ids for i in range(len(prompts))]
        assert tokens == expected, f"epoch {epoch}"


def padded(step: StepInput, rows: int, trash_block: int) -> StepInput:
    """The same step in "graph mode": rows of nobody, which write nowhere and read the trash."""
    for _ in range(rows):
        step.token_ids.append(0)
        step.positions.append(0)
        step.slot_mapping.append(-1)
        step.query_start.append(step.query_start[-1] + 1)
        step.seq_lens.append(1)
        step.block_tables.append([trash_block])
    return step


def decode_step(engine: Any) -> StepInput:
    """Three decodes of different lengths, laid out and not yet run."""
    for i in range(3):
        engine.add_request(f"{i}", prompt(i, 5 + i), greedy(4))
    engine.step()
    plan = engine.scheduler.schedule()
    assert plan.is_decode and len(plan.scheduled) == 3
    return engine.kv.prepare(plan)


def test_f06_padding_rows_change_nobody_and_write_nothing() -> None:
    """huggingface/transformers#46765: padding wrote NaN into the slot that it read itself."""
    trash, found = 15, []
    for rows, content in ((0, 0.0), (5, 0.0), (5, math.nan)):
        engine = tiny_engine(num_kv_blocks=16, debug=False)
        kv: Any = engine.runner.kv  # type: ignore[attr-defined]
        for tensor in (*kv.keys, *kv.values):
            tensor.zero_()
            tensor[trash] = content
        step = padded(decode_step(engine), rows, trash)
        logits = engine.runner.forward(step)
        assert all(
            torch.equal(tensor[trash], torch.full_like(tensor[trash], content))
            or bool(tensor[trash].isnan().all())
            for tensor in (*kv.keys, *kv.values)
        )
        found.append((logits, [tensor[:trash].clone() for tensor in (*kv.keys, *kv.values)]))
    (bare, bare_kv), (zeros, zeros_kv), (nans, nans_kv) = found
    assert torch.equal(zeros, nans)
    assert all(torch.equal(a, b) for a, b in zip(zeros_kv, nans_kv, strict=True))
    # A matrix product of 3 rows may add in another order than one of 8.
    torch.testing.assert_close(bare, zeros, rtol=1e-5, atol=1e-5)
    for a, b in zip(bare_kv, zeros_kv, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, None])
def test_f07_every_prompt_length_around_a_block_in_chunks_of_every_kind(chunk: int | None) -> None:
    """tenstorrent/tt-metal#54413: slots lost at certain prompt lengths, the reply stays fluent."""
    engine = tiny_engine(max_prefill_chunk=chunk, num_kv_blocks=64)
    for length in range(1, 4 * P + 2):
        ids = prompt(length, length)
        engine.add_request(f"{length}", ids, greedy(5))
    outputs = run_engine(engine)
    for length in range(1, 4 * P + 2):
        expected = reference_generate(tiny_model(), prompt(length, length), 5)
        assert outputs[f"{length}"].outputs[0].token_ids == expected, length


@settings(max_examples=25, deadline=None)
@given(
    when=st.sets(st.integers(1, 30), max_size=6),
    who=st.integers(0, 2),
    caching=st.booleans(),
    chunk=st.sampled_from([None, 3]),
)
def test_f08_preemption_at_any_moment_changes_no_token(
    when: set[int], who: int, caching: bool, chunk: int | None
) -> None:
    """vllm-ascend#11334 and vllm#16832; and vllm-gaudi#1794: equal tokens, three times the work."""
    engine = tiny_engine(enable_prefix_caching=caching, max_prefill_chunk=chunk)
    prompts = [prompt(i, 3 + 4 * i) for i in range(3)]
    for i, ids in enumerate(prompts):
        engine.add_request(f"{i}", ids, greedy(10))
    outputs, computed, lost, step = {}, 0, 0, 0
    while engine.has_unfinished_requests:
        step += 1
        running = engine.scheduler.running
        if step in when and running:
            victim = running[who % len(running)]
            lost += victim.num_computed_tokens
            engine.scheduler._preempt(victim, SchedulePlan(step))
        outputs |= {output.request_id: output for output in step_checked(engine)}
        computed += engine.num_step_tokens
    needed = 0
    for i, ids in enumerate(prompts):
        expected = reference_generate(tiny_model(), ids, 10)
        assert outputs[f"{i}"].outputs[0].token_ids == expected
        needed += len(ids) + len(expected) - 1
    assert needed <= computed <= needed + lost
    if caching:  # full blocks are found again, unless others have taken them
        assert computed - needed <= P * sum(o.metrics.num_preemptions for o in outputs.values())


def first_logits(engine: Any, names: list[str]) -> torch.Tensor:
    """The logits of "a"'s second token, decoded in a batch with the others."""
    for i, name in enumerate(names):
        engine.add_request(name, prompt(3 if name == "a" else i, 9), greedy(4))
    engine.step()
    step = engine.kv.prepare(engine.scheduler.schedule())
    return engine.runner.forward(step)[names.index("a")]


def test_f15_what_is_the_same_to_the_bit_and_what_is_not() -> None:
    """float32 on a CPU. The same batch gives the same bits; another batch the same to rounding.

    A product of one row takes another path through the library than one of many, so bits may
    differ; whether they do depends on the machine, so only the bound is asserted. This is the
    whole of "non-determinism" at temperature 0 (Thinking Machines, September 2025).
    """
    alone, again = (first_logits(tiny_engine(), ["a"]) for _ in range(2))
    assert torch.equal(alone, again)
    pair, other_pair = (first_logits(tiny_engine(), ["a", b]) for b in ("b", "c"))
    assert torch.equal(pair, other_pair)  # who the neighbour is does not matter, even to the bit
    crowd = first_logits(tiny_engine(), [*"bcdefg", "a"])
    for batch in (pair, crowd):
        torch.testing.assert_close(batch, alone, rtol=0, atol=1e-4)
        assert int(batch.argmax()) == int(alone.argmax())
