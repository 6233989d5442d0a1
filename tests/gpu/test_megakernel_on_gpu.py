"""The megakernel where it belongs: on all multiprocessors at once, many steps, and broken."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from minifer.execution.backends.megakernel import weights_of
from minifer.kernels.mega.launch import (
    Megakernel,
    MegakernelError,
    MegakernelOptions,
    resident_programs,
)
from minifer.kernels.mega.mutants import mutate
from minifer.kernels.mega.schedule import Schedule, assign, build
from minifer.kernels.mega.shapes import decode_shape
from minifer.perf.gpu.cell import Cell, DecodeCase, DenseBackend, build_case
from minifer.perf.gpu.report import TRACE, environment
from minifer.perf.gpu.rungs import mega_rope
from minifer.perf.gpu.timing import captured
from minifer.perf.timeline.model import chrome_trace, from_timestamps

SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {"prefetch_bytes": 0, "prefetch_registers": False},
    "prefetch": {"prefetch_bytes": 65536, "prefetch_registers": True},
    "epochs": {"prefetch_bytes": 65536, "prefetch_registers": True, "epochs": True},
    "grid": {"prefetch_bytes": 0, "prefetch_registers": False},
}


def make_case(device: torch.device, batch: int = 1) -> DecodeCase:
    """Four layers and 900 tokens on a GPU, one layer and 20 tokens in the interpreter."""
    context, layers = (900, None) if device.type == "cuda" else (20, 1)
    return build_case(Cell("minifer-tiny", batch, context, layers), device, num_probes=1)


def schedule_of(case: DecodeCase, sync: str = "counters", splits: int = 2) -> Schedule:
    programs = resident_programs(case.device)
    shape = decode_shape(case.cell.config, case.cell.batch, splits)
    return assign(build(shape, programs), programs, sync=sync)


def machine_of(case: DecodeCase, schedule: Schedule, **options: Any) -> Megakernel:
    machine = Megakernel(
        case.cell.config,
        weights_of(case.model),
        case.kv.keys,
        case.kv.values,
        mega_rope(case.model, case.cell.config.max_position_embeddings),
        batch=case.cell.batch,
        splits=schedule.shape.splits,
        max_blocks=case.batch.block_tables.shape[1],
        schedule=schedule,
        options=MegakernelOptions(**{"patience": 20_000, **options}),
        capacity=64,
    )
    machine.set_step(
        case.probes[0].tolist(), case.batch.positions.tolist(), case.batch.block_tables.tolist()
    )
    return machine


def forget(case: DecodeCase) -> None:
    case.forget()
    case.batch.token_ids.copy_(case.probes[0])


@pytest.mark.parametrize("switches", SWITCHES)
@torch.no_grad()
def test_many_steps_on_a_full_grid(device: torch.device, switches: str) -> None:
    """The same step again and again gives the same bits, and torch's logits."""
    case = make_case(device)
    sync = "grid" if switches == "grid" else "counters"
    machine = machine_of(case, schedule_of(case, sync), **SWITCHES[switches])
    token = machine.kernel_args()["TOKEN"]
    forget(case)
    expected = case.step(DenseBackend())[0].clone()
    first = None
    for _ in range(300 if device.type == "cuda" else 2):
        forget(case)
        token.copy_(case.probes[0][:, None])
        machine.launch()
        logits = machine.logits.clone()
        first = logits if first is None else first
        assert torch.equal(logits, first)
    machine.check()
    torch.testing.assert_close(first, expected, rtol=0, atol=0.02)  # torch's are bfloat16
    assert machine.tokens.tolist() == first.argmax(-1).tolist()


@torch.no_grad()
def test_steps_that_follow_each_other_need_no_host(device: torch.device) -> None:
    """With `advance`, launches in a row decode what steps one by one decode."""
    steps = 24 if device.type == "cuda" else 2
    case = make_case(device)
    machine = machine_of(case, schedule_of(case), advance=True, epochs=True)
    forget(case)
    for _ in range(steps):
        machine.launch()
    machine.check()
    in_a_row = machine.generated[:, :steps].tolist()

    single = machine_of(case, schedule_of(case), epochs=True)
    forget(case)
    tokens, positions = case.probes[0].tolist(), case.batch.positions.tolist()
    tables, one_by_one = case.batch.block_tables.tolist(), []
    for step in range(steps):
        single.set_step(tokens, [p + step for p in positions], tables)
        single.launch()
        tokens = single.tokens.tolist()
        one_by_one.append(tokens)
    single.check()
    assert in_a_row == [list(row) for row in zip(*one_by_one, strict=True)]


@torch.no_grad()
def test_a_cooperative_launch_is_captured(gpu: torch.device) -> None:
    """A replay decodes what a launch decodes."""
    case = make_case(gpu)
    machine = machine_of(case, schedule_of(case))
    token = machine.kernel_args()["TOKEN"]
    forget(case)
    machine.launch()
    machine.check()
    expected = machine.logits.clone()
    replay, _ = captured(machine.launch)
    for _ in range(10):
        forget(case)
        token.copy_(case.probes[0][:, None])
        machine.logits.fill_(-1.0)
        replay()
        assert torch.equal(machine.logits, expected)
    machine.check()


HANGING = (
    "target-too-high",
    "missing-signal",
    *(
        pytest.param(name, marks=pytest.mark.slow)  # in the interpreter; on a GPU all run
        for name in ("waits-for-itself", "producer-behind-consumer", "split-count-mismatch")
    ),
)


@pytest.mark.parametrize("mutant", HANGING)
@torch.no_grad()
def test_a_broken_schedule_raises(device: torch.device, mutant: str) -> None:
    """It would hang; instead it says where it gave up, and the next launch is as new."""
    case = make_case(device)
    sound = schedule_of(case)
    patience = 20_000 if device.type == "cuda" else 20
    forget(case)
    broken = machine_of(case, mutate(mutant, sound), patience=patience)
    broken.launch()
    with pytest.raises(MegakernelError, match="gave up at its instruction"):
        broken.check()
    machine = machine_of(case, sound)
    forget(case)
    machine.launch()
    machine.check()
    assert bool(torch.isfinite(machine.logits).all())


@torch.no_grad()
def test_timestamps_become_a_timeline(gpu: torch.device, results) -> None:
    """Of Llama-1B's step: every instruction has three rising times. Left as a Chrome trace."""
    case = build_case(Cell("llama-1b", 1, 512), gpu, num_probes=1)
    schedule = schedule_of(case)
    machine = machine_of(case, schedule, trace=True, **SWITCHES["prefetch"])
    for _ in range(3):  # the last of them is warm
        forget(case)
        machine.launch()
    machine.check()
    timeline = from_timestamps(machine.marks, schedule, case.cell.context)
    assert len(timeline.spans) == schedule.num_instructions
    trace = chrome_trace([timeline]) | {"otherData": {"measured": True, **environment()}}
    (results / TRACE).write_text(json.dumps(trace), encoding="utf-8")
