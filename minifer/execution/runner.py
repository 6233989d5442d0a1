"""Stages 3 and 4: one forward pass over whatever the plan holds, prefill and decode together."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from minifer.config import EngineConfig, ModelConfig, with_engine_loops
from minifer.execution.backend import Backend, TorchBackend
from minifer.execution.forward_batch import ForwardBatch
from minifer.execution.kv_storage import KVStorage
from minifer.execution.sampler import Picked
from minifer.kernels.mode import prepare
from minifer.kv.step_input import StepInput
from minifer.weights.quantized import quantized_weights

GIB = 1024**3


class Runner(Protocol):
    """What the engine needs of a model: tests and simulations bring their own."""

    def forward(self, step: StepInput) -> Tensor | Picked:
        """Logits float32 [R, V] of the rows the step asks for, or where `step.greedy` is set what
        is largest in each."""
        ...


class ModelRunner:
    """A model, its KV storage and a back end.

    model: `model(batch, kv, backend)` → hidden [T, D]; `model.logits(hidden, backend)` → [R, V].
    """

    def __init__(
        self, model: Any, config: ModelConfig, engine: EngineConfig, num_blocks: int
    ) -> None:
        parameter = next(model.parameters())
        self.model = model
        self.device = parameter.device
        self.backend = make_backend(engine.backend, str(self.device))
        self._float32_logits = engine.float32_logits
        self._debug = engine.debug
        heads, C = config.num_kv_heads, config.head_dim
        shape = (config.num_kv_slots, num_blocks, engine.block_size, heads, C)
        try:
            self.kv = KVStorage(*shape, parameter.dtype, parameter.device, engine.debug)
        except RuntimeError as error:  # torch's out of memory
            raise ValueError(
                f"num_kv_blocks must fit into memory, got {num_blocks}: {error}"
            ) from error

    @torch.inference_mode()
    def forward(self, step: StepInput) -> Tensor | Picked:
        """Move blocks, write this step's KV, attend, project to logits."""
        self.move_blocks(step)
        on_gpu = self.device.type == "cuda"
        with torch.cuda.device(self.device) if on_gpu else nullcontext():
            logits = self._logits(step)  # kernels are launched on the current GPU
        if self._debug:
            self.kv.check_guard_bands()
        return logits

    def move_blocks(self, step: StepInput) -> None:
        """What happens to whole blocks before a step writes into them; twice is once.

        Loads come after the copies: a block may be copied from, given up and loaded into, all in
        one plan.
        """
        if step.blocks_moved:
            return
        step.blocks_moved = True
        self.kv.copy_blocks(step.block_copies)
        self.kv.poison(step.block_poison)
        started = time.perf_counter()
        self.kv.write_blocks(step.block_loads)
        step.load_seconds = time.perf_counter() - started

    def _logits(self, step: StepInput) -> Tensor | Picked:
        """The model itself; all blocks are where they should be."""
        batch = ForwardBatch.of(step, self.device)
        hidden = self.model(batch, self.kv, self.backend)
        rows = hidden[batch.logits_rows]
        return self.model.logits(rows, self.backend, float32=self._float32_logits)


def prepare_backend(config: EngineConfig) -> None:
    """Make this process ready for `config.backend` before weights are loaded: nobody should wait
    for them to learn that kernels cannot run here, or not with this model, or that an option
    needs another one. Raises `ValueError` saying what to do."""
    _check_model_options(config)
    if config.backend == "torch":
        return
    if config.backend == "compiled":
        from minifer.execution.backends.compiled import prepare_compiled

        prepare_compiled(config)
        return
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cpu") or torch.cuda.is_available():
        prepare(device)  # of a device that is not there, loading tells
        if config.backend == "megakernel":
            from minifer.execution.backends.megakernel import tile_of
            from minifer.weights.resolve import read_config

            tile_of(read_config(config.model))


def _check_model_options(config: EngineConfig) -> None:
    """Of options that not every model has: those of loops, and of drafts that a model makes."""
    if config.speculative_method in ("none", "ngram") and (
        config.max_num_loops is None and config.loop_kv_policy == "full"
    ):
        return  # any model will do, none is looked for
    from minifer.execution.speculation.proposer import check_speculation
    from minifer.weights.resolve import read_config

    check_speculation(config, with_engine_loops(read_config(config.model), config))


def make_backend(name: str, device: str) -> Backend:
    """The back end of a name. Raises `ValueError` where it cannot run on `device`."""
    if name == "triton":
        prepare(device)  # before anything imports triton
        from minifer.execution.backends.triton_backend import TritonBackend

        return TritonBackend(device)
    return TorchBackend()


def make_runner(
    model: Any, config: ModelConfig, engine: EngineConfig, num_blocks: int
) -> ModelRunner:
    """The runner of `engine.backend`, or of several ranks. Raises `ValueError` where it cannot run
    this model here. `close_runner` ends it."""
    if engine.tensor_parallel_size > 1:
        from minifer.execution.parallel.runner import parallel_runner

        return parallel_runner(model, engine, num_blocks)
    if engine.backend in ("triton", "megakernel"):
        for name, weight in quantized_weights(model):  # loaded for another back end
            raise ValueError(
                f"{name} must not be quantised for backend={engine.backend}, got {weight}: load "
                "the model with quantize=none, or use backend=torch"
            )
    if engine.backend == "megakernel":
        from minifer.execution.backends.megakernel import MegakernelRunner

        return MegakernelRunner(model, config, engine, num_blocks)
    if engine.backend == "compiled":
        from minifer.execution.backends.compiled import compiled_runner

        return compiled_runner(model, config, engine, num_blocks)
    if config.loop is not None:
        from minifer.execution.loops.runner import LoopedRunner

        return LoopedRunner(model, config, engine, num_blocks)
    return ModelRunner(model, config, engine, num_blocks)


def close_runner(runner: Runner) -> None:
    """End what a runner has started: the processes of its other ranks, if it has any."""
    close = getattr(runner, "close", None)
    if close is not None:
        close()


def num_kv_blocks(
    config: ModelConfig,
    engine: EngineConfig,
    dtype: torch.dtype,
    device: str,
    draft: ModelConfig | None = None,
) -> int:
    """How many blocks the pool gets.

    `num_kv_blocks` if set, else what fits into `kv_cache_bytes` (default: min(1 GiB, 40 % of free
    memory) on a CPU, 90 % of free memory on a GPU), but never more than `max_num_seqs` requests
    of the model's full length could fill. A block holds a draft model's KV too. With several ranks
    the bytes are of each rank, whose blocks hold its own heads; on one device they share what is
    free. Raises `ValueError` when not one block fits.
    """
    if engine.num_kv_blocks is not None:
        return engine.num_kv_blocks
    held, sharing = config, 1
    if engine.tensor_parallel_size > 1:
        from minifer.execution.parallel.loading import places
        from minifer.execution.parallel.shard import Shard, shard_config

        held = shard_config(config, Shard(0, engine.tensor_parallel_size))
        devices = places(engine.device, engine.tensor_parallel_size)
        sharing = devices.count(devices[0])
    per_block = sum(
        KVStorage.bytes_per_block(
            model.num_kv_slots, engine.block_size, model.num_kv_heads, model.head_dim, dtype
        )
        for model in (held, draft)
        if model is not None
    )
    budget = engine.kv_cache_bytes
    if budget is None:
        if device.startswith("cuda"):
            budget = int(0.9 * torch.cuda.mem_get_info(device)[0])
        else:
            budget = min(GIB, int(0.4 * free_memory()))
        budget //= sharing
    if budget < per_block:
        raise ValueError(
            f"kv_cache_bytes must hold at least one block of {per_block} bytes, got {budget}"
        )
    length = engine.max_model_len or config.max_position_embeddings
    return min(budget // per_block, engine.max_num_seqs * -(-length // engine.block_size))


def free_memory() -> int:
    """Bytes a new allocation can get without swapping; 2 GiB where the system does not say."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return 2 * GIB
