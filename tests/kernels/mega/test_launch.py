"""What a megakernel is made of, what it refuses, and what it says when a program gives up."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable

import pytest
import torch
from lone_ops import CONFIG, D, L, Lone, rope_table, weights
from triton.runtime import interpreter

from minifer.kernels.aot_report import compile_kernels
from minifer.kernels.mega.isa import Instruction, Op, buffers
from minifer.kernels.mega.kernel import kernel
from minifer.kernels.mega.launch import Megakernel, MegakernelError, MegakernelOptions
from minifer.kernels.mega.mutants import mutate
from minifer.kernels.mega.schedule import Schedule, assign, build
from minifer.kernels.mega.shapes import decode_shape
from minifer.kernels.mega.tiles import Tiles
from minifer.kernels.mega.verify import verify

CACHE = (6, 4, 2, 16)


def make(config=CONFIG, parts=None, keys=None, rope=None, **options) -> Megakernel:
    keys = [torch.zeros(CACHE) for _ in range(L)] if keys is None else keys
    return Megakernel(
        config,
        weights(torch.float32) if parts is None else parts,
        keys,
        [torch.zeros(CACHE) for _ in range(L)],
        rope_table() if rope is None else rope,
        **options,
    )


def test_the_kernels_arguments_are_complete_and_in_order():
    arguments = make(batch=2).kernel_args()
    assert list(arguments) == list(inspect.signature(kernel.fn).parameters)


@pytest.mark.parametrize(("batch", "splits"), [(1, 1), (4, 2)])
def test_every_buffer_of_the_isa_has_a_tensor_of_its_shape(batch, splits):
    machine = make(batch=batch, splits=splits)
    expected = buffers(machine.shape, machine.schedule.head_slots)
    tensors = machine.buffers_by_name()
    assert set(tensors) == set(expected)
    for name, size in expected.items():
        assert tuple(tensors[name].shape) == (CACHE if name[1:].isdigit() else size), name


def test_nothing_of_the_model_is_copied():
    parts = weights(torch.float32)
    keys = [torch.zeros(CACHE) for _ in range(L)]
    arguments = make(parts=parts, keys=keys).kernel_args()
    flat = [tensor for layer in parts.layers for tensor in layer]
    flat += [parts.embedding, parts.norm, parts.head]
    assert arguments["WEIGHTS"].tolist() == [tensor.data_ptr() for tensor in flat]
    assert arguments["CACHES"].tolist()[::2] == [key.data_ptr() for key in keys]


def test_in_the_interpreter_one_program_does_everything():
    machine = make(num_programs=7)
    assert machine.num_programs == 1
    assert machine.schedule.num_instructions == len(machine.schedule.queues[0])


def misplaced(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, 4 bytes beside a multiple of 16."""
    room = torch.empty(tensor.numel() + 5)
    start = next(i for i in range(5) if room[i:].data_ptr() % 16 == 4)
    return room[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


def with_norm(change: Callable[[torch.Tensor], torch.Tensor]):
    parts = weights(torch.float32)
    return dataclasses.replace(parts, norm=change(parts.norm))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": dataclasses.replace(CONFIG, qkv_bias=True)}, "no instruction for qkv_bias"),
        ({"config": dataclasses.replace(CONFIG, qk_norm=True)}, "no instruction for qk_norm"),
        (
            {"config": dataclasses.replace(CONFIG, sliding_windows=(None, 8))},
            "no instruction for sliding_windows",
        ),
        ({"batch": 17}, "batch must be at most 16 for a megakernel, got 17"),
        ({"splits": 3}, "splits must be a power of two, got 3"),
        ({"max_blocks": 0}, "max_blocks must be at least 1, got 0"),
        ({"capacity": 0}, "capacity must be at least 1, got 0"),
        ({"num_programs": 0}, "num_programs must be at least 1, got 0"),
        ({"parts": with_norm(lambda x: x[:-1])}, r"norm must have shape \[48\], got \[47\]"),
        ({"parts": with_norm(lambda x: x.half())}, "dtype must be the same for all"),
        ({"parts": with_norm(misplaced)}, "norm must start at a multiple of 16 bytes"),
        (
            {"parts": dataclasses.replace(weights(torch.float32), layers=[])},
            "weights must have 2 layers, got 0",
        ),
        ({"keys": [torch.zeros(CACHE)] * 1}, "keys and values must have 2 layers, got 1 and 2"),
        (
            {"keys": [torch.zeros(6, 4, 2, 8)] * 2},
            r"keys of layer 0 must have shape \[any, any, 2, 16\], got \[6, 4, 2, 8\]",
        ),
        ({"keys": [misplaced(torch.zeros(CACHE))] * 2}, "keys of layer 0 must start at a multiple"),
        ({"keys": [torch.zeros(CACHE).half()] * 2}, "dtype of the caches must be the same"),
        ({"rope": torch.zeros(9, 8)}, r"rope must have shape \[any, 16\], got \[9, 8\]"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_a_schedule_must_be_for_this_step():
    other = build(decode_shape(CONFIG, batch=2), 1)
    with pytest.raises(ValueError, match="schedule must be for DecodeShape"):
        make(schedule=assign(other, 1))


@pytest.mark.parametrize("bad", [{"patience": 0}, {"prefetch_bytes": -1}])
def test_options_are_checked(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be at least"):
        MegakernelOptions(**bad)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [], []), "tokens must hold 1 to 2 requests, got 0"),
        (([1] * 3, [0] * 3, [[0]] * 3), "tokens must hold 1 to 2 requests, got 3"),
        (([1, 1], [0], [[0]]), "positions must hold 2 requests, got 1"),
        (([80], [0], [[0]]), r"tokens must lie in \[0, 80\), got \[80\]"),
        (([-1], [0], [[0]]), r"tokens must lie in \[0, 80\), got \[-1\]"),
        (([1], [64], [[0] * 17]), r"positions must lie in \[0, 64\), got \[64\]"),
        (([1], [4], [[0]]), "block_tables must hold a block for position 4, got 1 blocks of 4"),
        (([1], [12], [[0] * 4]), "block_tables must have at most 3 blocks, got 4"),
        (([1], [3], [[6]]), r"block_tables must name blocks in \[0, 6\), got 6"),
    ],
)
def test_a_step_is_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(batch=2, max_blocks=3).set_step(*arguments)


def test_draws_must_have_one_number_a_request():
    with pytest.raises(ValueError, match="seeds must hold 1 requests, got 2"):
        make().set_step([1], [0], [[0]], seeds=[1, 2])


def test_a_step_forgets_the_requests_before_it():
    machine = make(batch=4, max_blocks=3)
    machine.set_step([5, 6, 7], [9, 3, 0], [[1, 2, 3], [4], [5]], temperatures=[1.0, 1.0, 1.0])
    assert machine.new_slots() == [13, 19, 20, -1]
    machine.set_step([8], [4], [[5, 0]])
    assert machine.new_slots() == [0, -1, -1, -1]
    assert machine.kernel_args()["TEMPERATURE"].tolist() == [0.0] * 4


# -- a program that waits for nothing


def stuck(patience: int = 5) -> Lone:
    """The second instruction waits for two arrivals, and there is one."""
    items = [
        Instruction(Op.EMBED, signal=1, amount=1),
        Instruction(Op.QKV, 1, 0, 2, wait=1, target=2),
        Instruction(Op.QKV, 1, 2, 4, wait=0, target=1),
    ]
    return Lone(items, options=MegakernelOptions(patience=patience))


@pytest.mark.parametrize(
    "name",
    [
        *("target-too-high", "swapped-waits", "waits-for-itself", "missing-signal"),
        *("producer-behind-consumer", "split-count-mismatch"),
    ],
)
def test_every_fault_that_hangs_ends_in_an_error(name):
    """Also after an earlier launch, with counters that count on."""
    sound = assign(build(decode_shape(CONFIG, 2, 2), 2), 1)
    options = MegakernelOptions(patience=3, epochs=True)
    machine = make(batch=2, splits=2, schedule=mutate(name, sound), options=options)
    for _ in range(2):
        machine.launch()
        with pytest.raises(MegakernelError, match="program 0 gave up at its instruction"):
            machine.check()


def test_after_a_reset_steps_are_counted_from_the_first():
    """Targets grow with the epoch, so counters at 0 need the first one."""
    machine = make(options=MegakernelOptions(patience=3, epochs=True))
    for _ in range(2):
        machine.set_step([1], [0], [[0]])
        machine.launch()
        machine.check()
        assert machine.buffers_by_name()["EPOCH"].item() == 2
        machine.reset()


def test_a_barrier_of_all_warps_ends_every_instruction(monkeypatch):
    """Also of those that signal nobody: the next one of the queue may need no wait."""
    barriers = []
    monkeypatch.setattr(
        interpreter.interpreter_builder, "create_barrier", lambda: barriers.append(1), raising=False
    )
    graph = build(decode_shape(CONFIG), 1)
    alone = tuple(
        item._replace(wait=-1, target=0, signal=-1, amount=0) for item in graph.instructions
    )
    schedule = Schedule(graph.shape, (alone,), (), graph.head_slots)
    assert verify(schedule).ok
    make(schedule=schedule).launch()
    assert len(barriers) >= len(alone)


def test_a_program_that_waits_in_vain_gives_up_and_says_where():
    lone = stuck()
    lone.machine.launch()
    with pytest.raises(MegakernelError) as caught:
        lone.machine.check()
    assert str(caught.value) == (
        "program 0 gave up at its instruction 1, QKV of layer 1, waiting for two ≥ 2, which stands "
        "at 1, after 5 polls; 1 of 1 programs gave up"
    )
    lone.machine.check()  # told once
    lone.machine.launch()
    with pytest.raises(MegakernelError):
        lone.machine.check()


def test_after_giving_up_a_program_waits_no_more():
    """It runs to its end, so that the grid does: X is there, though nobody signalled."""
    lone = stuck()
    lone.machine.launch()
    assert lone.buffers["X"].shape == (1, D)
    assert lone.buffers["Q"][0, 16:64].isfinite().all()  # tiles 1 to 3


# -- compile time


def test_a_gpus_tile_is_16_kib_of_weights():
    shape = decode_shape(CONFIG)
    for dtype in (torch.bfloat16, torch.float32):
        tiles = Tiles.for_gpu(shape, dtype)
        assert tiles.rows * tiles.block_k * dtype.itemsize == 16384
        assert tiles.group == 16, "rows that a tensor core takes, though fewer heads share keys"


def test_schedules_without_work_are_run():
    shape = decode_shape(CONFIG)
    machine = make(schedule=Schedule(shape, ((),), (), 1), options=MegakernelOptions(epochs=True))
    machine.launch()
    machine.check()
    assert machine.buffers_by_name()["EPOCH"].item() == 1


@pytest.mark.slow
def test_what_the_compiler_makes_of_llama_1b_on_an_h100():
    """No register spilled; and in each product weights are asked for before the wait: into L2, and
    the first tile, 16 bytes a load, into registers. Then three tiles are on their way at a time."""
    report = compile_kernels(["sm_90"], ["mega llama-1b batch 1,*"], keep=("ptx",))
    (row,) = report.kernels
    assert not row.error
    assert row.spills == 0 and row.stack_bytes == 0
    assert row.shared_bytes <= row.shared_limit
    text = row.asm["ptx"]
    last_prefetch_to_wait = r"prefetch\.global\.L2((?:(?!prefetch\.global).)*?)acquire"
    before_waits = re.findall(last_prefetch_to_wait, text, re.DOTALL)
    assert len(before_waits) == 5
    for part in before_waits:  # what others write is asked for after the wait
        kinds = set(re.findall(r"ld\.global[\w.:]*|cp\.async[\w.]*|st\.global[\w.]*", part))
        assert all("evict_first" in kind or kind.startswith("ld.global.gpu.") for kind in kinds)
    order = re.findall(
        r"prefetch\.global\.L2|ld\.global\S*evict_first\S*v4|acquire|cp\.async\.cg", text
    )
    kinds = [kind for kind, _ in itertools.groupby(re.sub(r"ld\S*", "load", x) for x in order)]
    product = ["prefetch.global.L2", "load", "acquire", "cp.async.cg"]
    assert kinds[:20] == product * 5
    assert text.count(".release.") == 1
