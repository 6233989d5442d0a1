"""Faults of the tiers below the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from minifer.engine import Engine
from minifer.faults.registry import Fault, github, patched
from minifer.faults.scenes import OTHER, QUESTIONS, SHARED, ask, written
from minifer.kv.step_input import StepInput
from minifer.scheduling.plan import SchedulePlan


@contextmanager
def offloaded_before_written(engine: Engine) -> Iterator[None]:
    """Full blocks are copied to the tier when the step is planned, not when it has run."""
    kv, prepare = engine.kv, engine.kv.prepare

    def faulty(plan: SchedulePlan) -> StepInput:
        step = prepare(plan)
        if kv.tiers is not None:
            for entry in plan.scheduled:
                kv.tiers.store([kv.pool.blocks[block] for block in entry.allocation.published])
        return step

    with patched(kv, prepare=faulty):
        yield


def _evicted_and_loaded(engine: Engine) -> str:
    """The same question again, after its blocks have left the device and come back."""
    question = SHARED + QUESTIONS[1]
    ask(engine, question)
    ask(engine, *(f"{i} " + OTHER for i in range(6)))
    return written(ask(engine, question)[0])


FAULTS = (
    Fault(
        name="offloaded-before-written",
        title="A block is offloaded before it is written",
        mechanism="The copy to the tier below and the forward pass are not ordered: the copy is "
        "started when the block is allocated and its hash known. What is stored under the hash is "
        "what the block's last user has left in it. As long as the block stays on the device "
        "nobody notices; from the tier it comes back wrong, also after a restart.",
        symptom="A prompt that was answered well gets nonsense hours later, when the cache has "
        "been full in between. It is right again as soon as the tier is emptied.",
        sources=(
            github("vllm-project/vllm", 45704, "a block is offloaded before its step has run"),
            github("vllm-project/vllm", 31341, "a race between offloading and reuse"),
            github("ikawrakow/ik_llama.cpp", 2083, "rows corrupted by an elided synchronisation"),
        ),
        detectors=("tier-check", "replay"),
        inject=offloaded_before_written,
        scene=_evicted_and_loaded,
        options={
            "num_kv_blocks": 24,
            "kv_dram_bytes": 64 * 2**20,
            "kv_load_policy": "always",
        },
    ),
)
