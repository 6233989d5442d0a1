"""Faults that read or write the wrong slot of the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from torch import Tensor

from minifer.engine import Engine
from minifer.faults.registry import Fault, Source, github, patched
from minifer.faults.scenes import OTHER, QUESTIONS, SHARED, ask, written
from minifer.kv.step_input import StepInput
from minifer.scheduling.plan import SchedulePlan


@contextmanager
def off_by_one_length(engine: Engine) -> Iterator[None]:
    """The kernel's loop over a decode's context says `<=` where it means `<`."""
    runner: Any = engine.runner
    forward = runner.forward

    def faulty(step: StepInput) -> Tensor:
        for row, (first, end) in enumerate(pairwise(step.query_start)):
            length, capacity = step.seq_lens[row], len(step.block_tables[row]) * step.block_size
            if end - first == 1 and length < capacity:
                step.seq_lens[row] += 1
        logits: Tensor = forward(step)
        return logits

    with patched(runner, forward=faulty):
        yield


@contextmanager
def stale_after_reuse(engine: Engine) -> Iterator[None]:
    """A block that is handed out anew can still be found under what it held before."""
    pool = engine.kv.pool
    unpublish = pool.unpublish

    def faulty(block_id: int, event: str = "kv.block_unpublished") -> None:
        if event == "kv.block_evicted":
            pool.blocks[block_id].key = None  # and the index is not told
        else:
            unpublish(block_id, event)

    with patched(pool, unpublish=faulty):
        yield


@contextmanager
def lost_boundary_slot(engine: Engine) -> Iterator[None]:
    """A prompt that ends exactly at the end of a block: its last token's KV is not written."""
    prepare = engine.kv.prepare

    def faulty(plan: SchedulePlan) -> StepInput:
        step = prepare(plan)
        for entry, end in zip(plan.scheduled, step.query_start[1:], strict=True):
            if not entry.is_decode and entry.end % step.block_size == 0:
                step.slot_mapping[end - 1] = -1
        return step

    with patched(engine.kv, prepare=faulty):
        yield


@contextmanager
def padding_writes_slot_0(engine: Engine) -> Iterator[None]:
    """The batch is padded by one row, as for a captured graph; the row writes to slot 0."""
    runner: Any = engine.runner
    forward = runner.forward

    def faulty(step: StepInput) -> Tensor:
        step.token_ids.append(0)
        step.positions.append(0)
        step.slot_mapping.append(0)
        step.query_start.append(step.query_start[-1] + 1)
        step.seq_lens.append(1)
        step.block_tables.append([0])
        logits: Tensor = forward(step)
        return logits

    with patched(runner, forward=faulty):
        yield


@contextmanager
def copy_on_write_skipped(engine: Engine) -> Iterator[None]:
    """Sequences that share their last block all write into it."""
    pool = engine.kv.pool

    def refs(block_id: int) -> int:
        return min(1, pool.blocks[block_id].ref_count)

    with patched(engine.kv, _refs=refs):
        yield


def _recycled(engine: Engine) -> str:
    """Replies in memory that others have used before."""
    ask(engine, *(SHARED + question for question in QUESTIONS), cache_salt="before")
    return "\n".join(map(written, ask(engine, *QUESTIONS, max_tokens=60)))


def _evicted_and_back(engine: Engine) -> str:
    """The same question again, after others have taken its blocks."""
    question = SHARED + QUESTIONS[1]
    ask(engine, question)
    ask(engine, *(f"{i} " + question for i in range(6)))
    return written(ask(engine, question)[0])


def _whole_blocks(engine: Engine) -> str:
    """A prompt of exactly four blocks."""
    return written(ask(engine, OTHER)[0])


def _two_users(engine: Engine) -> str:
    return "\n".join(map(written, ask(engine, *QUESTIONS[:2])))


def _two_samples(engine: Engine) -> str:
    return written(ask(engine, QUESTIONS[0], n=3, temperature=0.8, seed=1)[0])


FAULTS = (
    Fault(
        name="off-by-one-length",
        title="Attention reads one slot too many",
        mechanism="The context has L tokens, the kernel reads L + 1. The slot after the last one "
        "holds what the block's last user has left there, or nothing. Where the numbers are "
        "plausible they are one more voice among hundreds; where they are large they win, and "
        "once a foreign token is drawn the model goes on in its spirit.",
        symptom="Mostly nothing: the reply stays fluent, and now and then it is another one. With "
        "large leftovers garbage, or another language. Poisoned memory makes it fail at once.",
        sources=(
            github("microsoft/onnxruntime-genai", 2354, "decode at L + 1 reads a recycled block"),
            github("vllm-project/vllm", 43961, "GSM8K falls from 0.91 to 0.01 as the cache fills"),
            github("vllm-project/vllm", 47305, "kernels read past the length of the sequence"),
        ),
        detectors=("poison", "replay", "canary"),
        inject=off_by_one_length,
        scene=_recycled,
        options={"num_kv_blocks": 60},
    ),
    Fault(
        name="stale-after-reuse",
        title="A reused block is still found",
        mechanism="A block is evicted and handed to another request, but its entry in the prefix "
        "index stays. Who asks for the old prefix hits the block and reads the other request's "
        "keys and values as its own beginning.",
        symptom="After the cache has been full once, a prompt that was answered well before gets "
        "a reply about something else.",
        sources=(
            github(
                "vllm-project/vllm",
                43961,
                "right in a fresh process, wrong once the cache has been full",
            ),
            github("sgl-project/sglang", 24527, "a page is reused while its old user writes"),
            github("awslabs/keys_values", 140, "a ring buffer is corrupt after it has been full"),
        ),
        detectors=("pool-invariants", "replay"),
        inject=stale_after_reuse,
        scene=_evicted_and_back,
        options={"num_kv_blocks": 24},
    ),
    Fault(
        name="lost-boundary-slot",
        title="The last slot of a block is not written",
        mechanism="A prompt whose computed part ends exactly with a block takes another path, and "
        "on it the last token's keys and values are not stored. Every later token reads a hole.",
        symptom="One prompt in sixteen gets a worse reply, the same one each time: fluent, wrong, "
        "and right again when a letter is added to the prompt.",
        sources=(
            github("tenstorrent/tt-metal", 54413, "zeros in the cache at certain prompt lengths"),
        ),
        detectors=("shadow-kv", "replay", "canary"),
        inject=lost_boundary_slot,
        scene=_whole_blocks,
    ),
    Fault(
        name="padding-writes-slot-0",
        title="A padding row writes into a real block",
        mechanism="A captured graph runs with fixed batch sizes, so the batch is filled up with "
        "rows of nobody. Their slot is 0, and slot 0 is the first of block 0, which belongs to "
        "somebody.",
        symptom="Whoever owns block 0 has another first token than they sent. All others are fine.",
        sources=(
            github("huggingface/transformers", 46765, "padding writes NaN to the slot it reads"),
            github("vllm-project/vllm", 57156, "dummy batches poison block 0"),
        ),
        detectors=("replay", "canary"),
        inject=padding_writes_slot_0,
        scene=_two_users,
    ),
    Fault(
        name="copy-on-write-skipped",
        title="Sequences write into a block they share",
        mechanism="n replies to one prompt share its blocks, the last one half full. Whoever "
        "writes first must copy it. Without the copy all of them write their next token into the "
        "same slot, and read whose was last.",
        symptom="n > 1: all replies but one lose their thread after a few words.",
        sources=(
            Source(
                "Kwon et al.: PagedAttention (SOSP 2023), section 4.4",
                "https://arxiv.org/abs/2309.06180",
            ),
        ),
        detectors=("shadow-kv", "pool-invariants"),
        inject=copy_on_write_skipped,
        scene=_two_samples,
    ),
)
