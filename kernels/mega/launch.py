"""Starting the megakernel: the tensors it works on, its tile sizes, and one launch a step.

A `Megakernel` is one compiled kernel and one schedule: for a model, a batch and a number of splits.
It copies no weights: the kernel is given their addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minifer.config import ModelConfig
from minifer.kernels.aot import AotCase
from minifer.kernels.checks import FLOATS, check_same, check_tensor
from minifer.kernels.compat import (
    COMPILE_OPTIONS,
    INTERPRETED,
    launch_options,
    num_programs_at_once,
)
from minifer.kernels.mega.isa import COUNTER_STRIDE, DecodeShape, Op, buffers
from minifer.kernels.mega.kernel import kernel
from minifer.kernels.mega.schedule import Schedule, assign, build
from minifer.kernels.mega.shapes import MODELS, decode_shape
from minifer.kernels.mega.tiles import Tiles, constants, stages_for
from minifer.kernels.mega.weights import Weights, check_alignment, pointers

_DRAWS = {"seeds": "SEED", "indices": "INDEX", "temperatures": "TEMPERATURE"}
NVIDIA = not INTERPRETED.value and torch.version.hip is None


class MegakernelError(RuntimeError):
    """A launch in which a program waited longer than its patience: a fault of the schedule, or
    programs that were not all resident."""


@dataclass(frozen=True)
class MegakernelOptions:
    """What can be switched, each without touching the schedule.

    prefetch_bytes: of an instruction's weights, asked for into L2 while it waits, 0 for none.
    prefetch_registers: load its first weight tile while it waits. epochs: never zero the counters,
    count launches instead. advance: the step leaves the next one's input behind, so that launches
    can follow each other without the host. write_logits: fill LOGITS. sample: honour temperatures
    (otherwise every request is greedy). trace: leave timestamps. patience: failed polls after
    which a program stops waiting: some seconds on a GPU, if a poll takes a microsecond (a guess).
    Prefetches and timestamps are NVIDIA's; in the interpreter they do nothing.
    """

    prefetch_bytes: int = 65536 if NVIDIA else 0
    prefetch_registers: bool = NVIDIA
    epochs: bool = False
    advance: bool = False
    write_logits: bool = True
    sample: bool = False
    trace: bool = False
    patience: int = 10_000 if INTERPRETED.value else 4_000_000

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ValueError(f"patience must be at least 1, got {self.patience}")
        if self.prefetch_bytes < 0:
            raise ValueError(f"prefetch_bytes must be at least 0, got {self.prefetch_bytes}")


def resident_programs(device: torch.device) -> int:
    """How many programs can wait for each other: one a streaming multiprocessor of a GPU (eight
    warps with 200 registers a thread leave no room for a second). In the interpreter one, for
    there a program runs to its end before the next begins."""
    return num_programs_at_once(device)


def _check_caches(
    keys: Sequence[Tensor], values: Sequence[Tensor], shape: DecodeShape, like: Tensor
) -> list[Tensor]:
    """Keys and values of layer 0, of layer 1, … Raises `ValueError` for what does not fit."""
    if not len(keys) == len(values) == shape.layers:
        raise ValueError(
            f"keys and values must have {shape.layers} layers, got {len(keys)} and {len(values)}"
        )
    caches = [tensor for pair in zip(keys, values, strict=True) for tensor in pair]
    for i, cache in enumerate(caches):
        name = f"{'keys' if i % 2 == 0 else 'values'} of layer {i // 2}"
        size = (None, None, shape.kv_heads, shape.head_dim)
        check_tensor(name, cache, size, FLOATS, like)
        check_tensor(name, cache, caches[0].shape, FLOATS, like)
        check_alignment(name, cache)
    check_same("dtype of the caches", {str(i): cache.dtype for i, cache in enumerate(caches)})
    return caches


class Megakernel:
    """One decode step for up to `batch` requests, any number of times.

    config: the model's sizes. keys, values: one [N, P, K, C] tensor a layer. rope: float32
    [positions, C], cos and then sin of every position that can occur. splits: S, a power of two.
    max_blocks: width of the block tables. num_programs: at most what can be resident, by default
    all of it. schedule: instead of the default one, for these sizes. capacity: how many tokens
    GENERATED holds for each request. Raises `ValueError` for a model without instructions, sizes
    that do not fit, and weights of mixed dtypes or misaligned.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        rope: Tensor,
        *,
        batch: int = 1,
        splits: int = 1,
        max_blocks: int = 1,
        tile: int = 16,
        num_programs: int | None = None,
        options: MegakernelOptions | None = None,
        schedule: Schedule | None = None,
        tiles: Tiles | None = None,
        capacity: int = 1,
    ) -> None:
        self.shape = shape = decode_shape(config, batch, splits, tile)
        self.options = options or MegakernelOptions()
        self.device = device = weights.embedding.device
        weights.check(shape)
        check_tensor("rope", rope, (None, shape.head_dim), (torch.float32,), weights.embedding)
        caches = _check_caches(keys, values, shape, rope)
        self.block_size = caches[0].shape[1]
        for name, number in (("max_blocks", max_blocks), ("capacity", capacity)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")

        resident = resident_programs(device)
        if schedule is None:
            count = resident if num_programs is None else min(num_programs, resident)
            schedule = assign(build(shape, count), count)
        if schedule.shape != shape:
            raise ValueError(f"schedule must be for {shape}, got {schedule.shape}")
        self.schedule, self.num_programs = schedule, len(schedule.queues)
        self.tiles = tiles or (
            Tiles.for_interpreter(shape, schedule)
            if INTERPRETED.value
            else Tiles.for_gpu(shape, weights.embedding.dtype, stages_for(device), not NVIDIA)
        )
        self._keep = (weights, caches, rope)  # the kernel knows only their addresses
        self._tensors = self._allocate(max_blocks, capacity)
        self._constants = self._make_constants(weights.embedding.dtype, caches[0].dtype, config)

    def _allocate(self, max_blocks: int, capacity: int) -> dict[str, Any]:
        """The kernel's first arguments, in its order."""
        B, device = self.shape.batch, self.device
        weights, caches, rope = self._keep
        packed = self.schedule.packed()
        programs, longest = len(packed), len(packed[0])
        marks = (programs, longest, 3) if self.options.trace else (1,)

        def ints(*size: int, fill: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(size, fill, dtype=dtype, device=device)

        state = {"EPOCH", "TOKEN", "POSITION", "INDEX"}
        handed = {
            name: torch.zeros(size, device=device)
            for name, size in buffers(self.shape, self.schedule.head_slots).items()
            if name not in state and not name[1:].isdigit()  # K3, V3: the caches
        }
        handed["BEST_ID"] = handed["BEST_ID"].int()
        return {
            "INSTRUCTIONS": torch.tensor(packed, dtype=torch.int32, device=device),
            "COUNTERS": ints(max(1, len(self.schedule.counters)) * COUNTER_STRIDE),
            "EPOCH": ints(1, 1, fill=1),
            "ERRORS": ints(programs),
            "MARKS": ints(*marks, dtype=torch.int64),
            "WEIGHTS": weights.addresses(),
            "CACHES": pointers(caches),
            "ROPE": rope,
            "TABLES": ints(B, max_blocks),
            "TOKEN": ints(B, 1),
            "POSITION": ints(B, 1, fill=-1),
            "INDEX": ints(B, 1),
            "SEED": ints(B, dtype=torch.int64),
            "TEMPERATURE": torch.zeros(B, device=device),
            "GENERATED": ints(B, capacity, fill=-1),
            **handed,
            "longest": longest,
            "max_blocks": max_blocks,
            "capacity": capacity,
            "limit": min(rope.shape[0], max_blocks * self.block_size),
            "patience": self.options.patience,
        }

    def _make_constants(
        self, dtype: torch.dtype, cache: torch.dtype, config: ModelConfig
    ) -> dict[str, Any]:
        options = self.options
        return {
            **constants(
                self.shape, self.tiles, dtype, cache, config.rms_norm_eps, self.block_size,
                self.schedule.head_slots, INTERPRETED.value,
            ),
            "PREFETCH_BYTES": options.prefetch_bytes,
            "PREFETCH_REGISTERS": options.prefetch_registers,
            "EPOCHS": options.epochs,
            "ADVANCE": options.advance,
            "WRITE_LOGITS": options.write_logits,
            "SAMPLE": options.sample,
            "TRACE": options.trace,
        }  # fmt: skip

    # -- a step

    def set_step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        *,
        seeds: Sequence[int] | None = None,
        indices: Sequence[int] | None = None,
        temperatures: Sequence[float] | None = None,
    ) -> None:
        """The next step's requests, at most `batch`: what each reads, where it stands, where its
        context lies. Rows that are left over are padding: position −1.

        seeds, indices, temperatures: of the draws; 0 by default. Raises `ValueError` for numbers
        that do not fit.
        """
        count, rest = len(tokens), self.shape.batch - len(tokens)
        needed = self._check_step(tokens, positions, block_tables)
        self._put("TOKEN", [*tokens] + [0] * rest)
        self._put("POSITION", [*positions] + [-1] * rest)
        tables = [[*table[:needed]] + [0] * (needed - len(table)) for table in block_tables]
        self._tensors["TABLES"][:count, :needed] = torch.tensor(tables, dtype=torch.int32)
        for name, values in (
            ("seeds", [(seed + 2**63) % 2**64 - 2**63 for seed in seeds or [0] * count]),
            ("indices", indices or [0] * count),
            ("temperatures", temperatures or [0.0] * count),
        ):
            if len(values) != count:
                raise ValueError(f"{name} must hold {count} requests, got {len(values)}")
            self._put(_DRAWS[name], [*values] + [0] * rest)

    def _check_step(
        self, tokens: Sequence[int], positions: Sequence[int], tables: Sequence[Sequence[int]]
    ) -> int:
        """How many blocks the longest context has. Raises `ValueError` for what does not fit."""
        count, B, P = len(tokens), self.shape.batch, self.block_size
        if not 1 <= count <= B:
            raise ValueError(f"tokens must hold 1 to {B} requests, got {count}")
        for name, given in (("positions", positions), ("block_tables", tables)):
            if len(given) != count:
                raise ValueError(f"{name} must hold {count} requests, got {len(given)}")
        for name, numbers, limit in (
            ("tokens", tokens, self.shape.vocab),
            ("positions", positions, self._tensors["ROPE"].shape[0]),
        ):
            if not all(0 <= number < limit for number in numbers):
                raise ValueError(f"{name} must lie in [0, {limit}), got {list(numbers)}")
        num_blocks = self._keep[1][0].shape[0]
        for position, table in zip(positions, tables, strict=True):
            if position // P >= len(table):
                raise ValueError(
                    f"block_tables must hold a block for position {position}, got {len(table)} "
                    f"blocks of {P}"
                )
            used = table[: position // P + 1]
            for block in (min(used), max(used)):
                if not 0 <= block < num_blocks:
                    raise ValueError(
                        f"block_tables must name blocks in [0, {num_blocks}), got {block}"
                    )
        width = self._tensors["max_blocks"]
        needed = max(positions) // P + 1
        if needed > width:
            raise ValueError(f"block_tables must have at most {width} blocks, got {needed}")
        return needed

    def _put(self, name: str, values: Sequence[Any]) -> None:
        tensor = self._tensors[name]
        tensor.copy_(torch.tensor(values, dtype=tensor.dtype).view(tensor.shape))

    def launch(self) -> None:
        """One step; nothing comes back to the host, so it can be captured in a CUDA graph."""
        if not self.options.epochs:
            self._tensors["COUNTERS"].zero_()
        if INTERPRETED.value:
            kernel[(self.num_programs,)](**self.kernel_args())
            return
        with torch.cuda.device(self.device):
            kernel[(self.num_programs,)](
                **self.kernel_args(),
                **launch_options(self.tiles.warps, self.tiles.stages),
                launch_cooperative_grid=True,  # refused, rather than hung, where not all fit
            )

    def check(self) -> None:
        """Wait for the launches so far. Raises `MegakernelError` when a program gave up in one of
        them; the counters are as new afterwards."""
        errors = self._tensors["ERRORS"].tolist()
        failed = {program: at - 1 for program, at in enumerate(errors) if at}
        if not failed:
            return
        program = min(failed, key=lambda p: (failed[p], p))
        message = self._explain(program, failed[program])
        self.reset()
        raise MegakernelError(f"{message}; {len(failed)} of {self.num_programs} programs gave up")

    def _explain(self, program: int, at: int) -> str:
        item = self.schedule.queues[program][at]
        stands = int(self._tensors["COUNTERS"][item.wait * COUNTER_STRIDE])
        return (
            f"program {program} gave up at its instruction {at}, {Op(item.op).name} of layer "
            f"{item.layer}, waiting for {self.schedule.counters[item.wait]} ≥ {item.target}, "
            f"which stands at {stands}, after {self.options.patience} polls"
        )

    def reset(self) -> None:
        """Counters, epoch and errors as before the first launch."""
        self._tensors["COUNTERS"].zero_()
        self._tensors["ERRORS"].zero_()
        self._tensors["EPOCH"].fill_(1)

    # -- what others look at

    @property
    def logits(self) -> Tensor:
        """float32 [B, V] of the last step; overwritten by the next."""
        return self._tensors["LOGITS"]

    @property
    def tokens(self) -> Tensor:
        """int32 [B]: the tokens that the last step picked."""
        return self._tensors["TOKEN"][:, 0]

    @property
    def generated(self) -> Tensor:
        """int32 [B, capacity], with `advance`: the token of each output index, −1 for none yet."""
        return self._tensors["GENERATED"]

    @property
    def marks(self) -> Tensor:
        """int64 [programs, longest, 3], with `trace`: nanoseconds; 0 where there is nothing."""
        return self._tensors["MARKS"]

    def kernel_args(self) -> dict[str, Any]:
        """Every argument of `kernel`, by name and in its order."""
        return {**self._tensors, **self._constants}

    def buffers_by_name(self) -> dict[str, Tensor]:
        """The tensors behind `isa.buffers`: each [rows, columns], but `K3` and `V3`, which are the
        whole caches [N, P, K, C]: request b's row of them lies at `new_slots()[b]`."""
        names = buffers(self.shape, self.schedule.head_slots)
        caches = self._keep[1]
        found = {f"{'KV'[i % 2]}{i // 2}": cache for i, cache in enumerate(caches)}
        return {name: found[name] if name in found else self._tensors[name] for name in names}

    def new_slots(self) -> list[int]:
        """The flat KV slot (block · P + offset) that each request's step writes, −1 for none."""
        positions, tables = (
            self._tensors["POSITION"][:, 0].tolist(),
            self._tensors["TABLES"].tolist(),
        )
        P = self.block_size
        return [
            table[p // P] * P + p % P if p >= 0 else -1
            for p, table in zip(positions, tables, strict=True)
        ]


def aot_cases() -> list[AotCase]:
    """The kernel as it would be launched for Llama 1B and SmolLM2: batches 1, 4 and 16, with
    weights in bfloat16; prefetching into L2 is an NVIDIA instruction."""
    stages = {("sm_90", "sm_100"): 4, ("sm_80",): 3, ("gfx942",): 2}
    return [
        _aot_case(model, batch, splits, num_stages, targets)
        for model in ("llama-1b", "smollm2-135m")
        for batch, splits in ((1, 4), (4, 2), (16, 1))
        for targets, num_stages in stages.items()
    ]


def _aot_case(
    model: str, batch: int, splits: int, num_stages: int, targets: tuple[str, ...]
) -> AotCase:
    shape = decode_shape(MODELS[model], batch, splits)
    nvidia = targets != ("gfx942",)
    tiles = Tiles.for_gpu(shape, torch.bfloat16, num_stages, not nvidia)
    fixed = {
        **constants(
            shape, tiles, torch.bfloat16, torch.bfloat16, MODELS[model].rms_norm_eps, 16, 132, False
        ),
        "PREFETCH_BYTES": 65536 if nvidia else 0,
        "PREFETCH_REGISTERS": nvidia,
        "EPOCHS": True,
        "ADVANCE": True,
        "WRITE_LOGITS": True,
        "SAMPLE": batch == 4,
        "TRACE": nvidia and batch == 4,
    }
    integers = ("INSTRUCTIONS", "COUNTERS", "EPOCH", "ERRORS", "TABLES", "TOKEN", "POSITION")
    types = dict.fromkeys((*integers, "INDEX", "GENERATED", "BEST_ID"), "*i32")
    types |= dict.fromkeys(("MARKS", "WEIGHTS", "CACHES", "SEED"), "*i64")
    types |= dict.fromkeys(("longest", "max_blocks", "capacity", "limit", "patience"), "i32")
    signature = {n: types.get(n, "*fp32") for n in kernel.arg_names if n not in fixed}
    return AotCase(
        f"{model} batch {batch}, {splits} splits, {num_stages} stages",
        kernel,
        signature,
        fixed,
        tiles.warps,
        tiles.stages,
        tuple(name for name, kind in signature.items() if kind.startswith("*")),
        targets=targets,
        options=COMPILE_OPTIONS,
    )
