"""A step that several ranks take together: the runner of `tensor_parallel_size` above 1.

Rank 0 is the engine's own process. Scheduling, block tables and sampling are its alone; a block
has the same number on every rank, and each holds its own heads' keys and values there. So a step's
input is all that the others must be told, and the logits are all that comes back.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from minifer.config import EngineConfig
from minifer.execution.forward_batch import ForwardBatch
from minifer.execution.parallel.layers import ParallelTransformer
from minifer.execution.parallel.loading import own_gpus, places
from minifer.execution.parallel.messages import encoded, step_message
from minifer.execution.parallel.ranks import PATIENCE, RankError, Ranks
from minifer.execution.runner import ModelRunner
from minifer.execution.sampler import Picked
from minifer.kv.step_input import StepInput


class RankRunner(ModelRunner):
    """One rank's part of a step, with KV storage for its own heads."""

    def __init__(self, model: ParallelTransformer, engine: EngineConfig, num_blocks: int) -> None:
        super().__init__(model, model.config, engine, num_blocks)

    def _logits(self, step: StepInput) -> Tensor | Picked:
        """What the step asks for, on rank 0; elsewhere nothing of use."""
        batch = ForwardBatch.of(step, self.device)
        rows = self.model(batch, self.kv, self.backend)[batch.logits_rows]
        if step.greedy:
            return Picked(*self.model.largest(rows, self.backend, self._float32_logits))
        logits: Tensor = self.model.logits(rows, self.backend, self._float32_logits)
        return logits


class ParallelRunner(RankRunner):
    """Rank 0, which starts the others, tells them each step, and ends them (`close`).

    A step is taken by all ranks or the engine is lost: who has missed an all-reduce would add its
    next one to the wrong sum. After any error inside a step every later one raises `RankError` at
    once. Ctrl-C waits for the end of the step.

    On a CPU the ranks share the cores: each gets an equal number of threads.
    """

    def __init__(self, model: ParallelTransformer, engine: EngineConfig, num_blocks: int) -> None:
        self._lost: str | None = None
        self._group = model.group
        size, timeout = self._group.size, engine.distributed_timeout_seconds
        devices = places(engine.device, size)
        self._threads_before = torch.get_num_threads()
        threads = min(self._threads_before, max(1, _num_cores() // size))
        orders = [order_for(rank, model, engine, devices, num_blocks) for rank in range(1, size)]
        self.ranks = Ranks(orders, timeout, {"OMP_NUM_THREADS": str(threads)})
        try:
            super().__init__(model, engine, num_blocks)
            self.ranks.meet(self._group, timeout, own_gpus(devices))
        except BaseException:
            self.close()
            raise
        torch.set_num_threads(threads)

    @property
    def lost(self) -> str | None:
        """Why no step can succeed any more; None while all ranks are there. Any thread may ask."""
        ended = self.ranks.ended() if self._lost is None else []
        return _sentence(ended) if ended else self._lost

    def forward(self, step: StepInput) -> Tensor | Picked:
        """As `ModelRunner.forward`, by all ranks. Raises `RankError` when one is lost."""
        if self._lost is not None:
            raise RankError(self._lost)
        message = encoded(step_message(step))
        before = self._group.seconds
        with interrupts_held():
            try:
                self.ranks.tell(message)
                result = super().forward(step)
            except Exception as error:
                own = f"rank 0 of {self._group.size} failed with {type(error).__name__}: {error}"
                self._lost = _sentence(self.ranks.fates() or [own])
                self._let_go()
                raise RankError(self._lost) from error
            except BaseException:
                self._lost = _sentence(["a step was cut off"])
                self._let_go()
                raise
        step.work = {"collective_us": round(1e6 * (self._group.seconds - before))}
        return result

    def _let_go(self, patience: float = 0.0) -> None:
        self._group.close()
        self.ranks.close(patience)

    def close(self) -> None:
        """End the other ranks, after some seconds by force. Safe to call twice."""
        self._let_go(PATIENCE)
        torch.set_num_threads(self._threads_before)


def _sentence(causes: list[str]) -> str:
    return f"{'; '.join(causes)}; a part of the model is lost with it: start the engine again"


def order_for(
    rank: int,
    model: ParallelTransformer,
    engine: EngineConfig,
    devices: list[str],
    num_blocks: int,
) -> dict[str, Any]:
    """What a rank must know to build its runner, as JSON-ready data."""
    return {
        "rank": rank,
        "size": model.group.size,
        "timeout": engine.distributed_timeout_seconds,
        "own_gpus": own_gpus(devices),
        "engine": {
            "model": str(model.source),
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "device": devices[rank],
            "backend": engine.backend,
            "block_size": engine.block_size,
            "num_kv_blocks": num_blocks,
            "float32_logits": engine.float32_logits,
            "debug": engine.debug,
        },
    }


def parallel_runner(model: Any, engine: EngineConfig, num_blocks: int) -> ParallelRunner:
    """Rank 0's runner for its part of a model. Raises `ValueError` for a model that is not one, and
    on Windows."""
    size = engine.tensor_parallel_size
    if os.name != "posix":
        raise ValueError(
            f"tensor_parallel_size must be 1 on {sys.platform}, got {size}: Linux and macOS let a "
            "process inherit a socket"
        )
    if not isinstance(model, ParallelTransformer) or model.group.size != size:
        held = f"in {model.group.size} parts" if isinstance(model, ParallelTransformer) else "whole"
        raise ValueError(
            f"tensor_parallel_size={size} needs a model that was loaded in {size} parts, got one "
            f"{held}: LLM and Engine.from_pretrained load it so (minifer.assembly.load)"
        )
    if model.group.connected:
        raise ValueError("model must not be in use by another engine: load it again")
    return ParallelRunner(model, engine, num_blocks)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C takes effect at the end of the block. Only the main thread ever gets one."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    pressed: list[tuple[Any, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: pressed.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pressed:
            handler(*pressed[0])


def _num_cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
