"""A decode step of request A for the megakernel's machines, on a CPU: what they are given, and what
came out of them.

The step is A's first: its prompt lies in the cache, its first new token is read. The truth is the
slow twin, a forward pass over the whole text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from minifer.course.example import TRIO, tiny

if TYPE_CHECKING:
    from torch import Tensor

    from minifer.kernels.cosim.simulate import CosimResult, Interleaving
    from minifer.kernels.mega.isa import DecodeShape, Op
    from minifer.kernels.mega.schedule import Schedule

P = 8  # positions of a block
TABLE = (4, 1, 3)  # of A's blocks: anywhere in the pool
NUM_BLOCKS = 6


@dataclass(frozen=True)
class Step:
    """tokens: A's text, the new token last. keys, values: caches [N, P, K, C] before the step, NaN
    where nothing was written. logits: float32 [V], the slow twin's."""

    tokens: tuple[int, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    logits: Tensor

    @property
    def position(self) -> int:
        return len(self.tokens) - 1

    def error(self, logits: Tensor) -> float:
        """The largest difference of a logit; infinite where one is no number."""
        import torch

        difference = (logits.float() - self.logits).abs()
        return float(difference.nan_to_num(nan=torch.inf).max())


@dataclass(frozen=True)
class Watched:
    """A run in the co-simulator. token: what the step picked. error: of its logits."""

    result: CosimResult
    token: int
    error: float

    @property
    def verdict(self) -> str:
        """What was found, and whether the numbers are right all the same."""
        if self.result.deadlock:
            return "deadlock"
        buffers = sorted({race.buffer for race in self.result.races})
        races = f"races on {' and '.join(buffers)}" if buffers else "no race"
        logits = "right" if self.error < 1e-4 else "wrong"
        token = "right" if self.token == int(step_of_a().logits.argmax()) else "wrong"
        return f"{races}; logits {logits}, token {token}"


def tiny_shape(splits: int = 1, batch: int = 1) -> DecodeShape:
    """minifer-tiny's decode step."""
    from minifer.kernels.mega.shapes import decode_shape

    return decode_shape(tiny().config, batch, splits)


def edited(schedule: Schedule, op: Op, **words: int) -> Schedule:
    """The schedule with other words in one instruction: the first of a kind, queue by queue.

    Raises `StopIteration` where there is none of the kind.
    """
    program, place = next(
        (program, place)
        for program, queue in enumerate(schedule.queues)
        for place, item in enumerate(queue)
        if item.op == op
    )
    queues = [list(queue) for queue in schedule.queues]
    queues[program][place] = queues[program][place]._replace(**words)
    return replace(schedule, queues=tuple(map(tuple, queues)))


@cache
def step_of_a() -> Step:
    """The step, the same at every call: change nothing in it."""
    import torch

    from minifer.execution.backend import TorchBackend
    from minifer.execution.forward_batch import ForwardBatch
    from minifer.execution.kv_storage import KVStorage
    from minifer.execution.reference import reference_logits

    loaded = tiny()
    model, config = loaded.model, loaded.config
    prompt = loaded.tokenizer.encode(TRIO["A"][0])
    sizes = (config.num_kv_slots, NUM_BLOCKS, P, config.num_kv_heads, config.head_dim)
    kv, T = KVStorage(*sizes, torch.float32), len(prompt)
    for tensor in (*kv.keys, *kv.values):
        tensor.fill_(torch.nan)
    slots = [TABLE[t // P] * P + t % P for t in range(T)]
    batch = ForwardBatch.build(prompt, list(range(T)), slots, [0, T], [T], [TABLE], [T - 1], P)
    with torch.inference_mode():
        model(batch, kv, TorchBackend())
        first = int(reference_logits(model, prompt)[-1].argmax())
        truth = reference_logits(model, [*prompt, first])[-1]
    plain = [tensor.clone() for tensor in (*kv.keys, *kv.values, truth)]
    keys, values = plain[: len(kv.keys)], plain[len(kv.keys) : -1]
    return Step((*prompt, first), tuple(keys), tuple(values), plain[-1])


def run_reference(schedule: Schedule, seed: int | None = None) -> Tensor:
    """Logits [V] of the step by the reference machine, which checks every access: a random program
    moves each time, None: the first that can. Raises `ScheduleError` for a schedule that stops."""
    import torch

    from minifer.kernels.mega.reference_vm import Inputs, ReferenceMachine

    step = step_of_a()
    model: Any = tiny().model
    positions = torch.tensor([step.position])
    cos, sin = model.rotary(positions)
    inputs = Inputs(
        weights=model.state_dict(),
        eps=tiny().config.rms_norm_eps,
        tokens=torch.tensor([step.tokens[-1]]),
        positions=positions,
        keys=[tensor.clone() for tensor in step.keys],
        values=[tensor.clone() for tensor in step.values],
        block_tables=torch.tensor([TABLE]),
        cos=cos,
        sin=sin,
    )
    machine = ReferenceMachine(schedule, inputs)
    machine.run(seed)
    return machine.logits[0]


def watch(schedule: Schedule, how: Interleaving | None = None) -> Watched:
    """The Triton kernel itself, all programs of the schedule interleaved, every access watched.

    Where a step has written nothing yet lie numbers of the size that an older step may have left.
    Raises `ValueError` where Triton's interpreter is off, as it is beside a GPU.
    """
    import torch

    from minifer.execution.backends.megakernel import weights_of
    from minifer.kernels.mega.launch import Megakernel
    from minifer.kernels.mega.watched_step import cosimulate_step

    step, loaded = step_of_a(), tiny()
    model: Any = loaded.model
    rope = torch.cat(model.rotary(torch.arange(len(TABLE) * P)), dim=1).contiguous()
    kernel = Megakernel(
        loaded.config,
        weights_of(model),
        [tensor.clone() for tensor in step.keys],
        [tensor.clone() for tensor in step.values],
        rope,
        max_blocks=len(TABLE),
        splits=schedule.shape.splits,
        schedule=schedule,
    )
    generator = torch.Generator().manual_seed(0)
    for name, buffer in kernel.buffers_by_name().items():
        if buffer.is_floating_point() and not name[1:].isdigit():  # K3, V3 are the caches
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
    kernel.set_step([step.tokens[-1]], [step.position], [TABLE])
    result = cosimulate_step(kernel, how)
    return Watched(result, int(kernel.tokens[0]), step.error(kernel.logits[0]))
