"""What the ranks of one model say to each other: sums, and parts that rank 0 collects.

A process group of torch.distributed of our own, not the process's default one: that can exist
once, and a process may have several engines. `gloo` is used where ranks share a device (all CPUs,
or one GPU for trying things out), and moves bytes through sockets of the loopback interface; with
a GPU for each rank NCCL moves them from GPU to GPU.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Group:
    """Rank `rank` of `size`, connected later by `connect`.

    seconds: spent in its operations since the start, most of it waiting for the slowest rank.
    Every operation raises `RuntimeError` when a rank is gone, or has not come to the same
    operation in time.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.seconds = 0.0
        self._ranks: Any = None
        self._own_gpus = False

    def connect(self, store: dist.Store, timeout: float, own_gpus: bool = False) -> None:
        """Meet the other ranks; returns when all are there.

        store: where they find each other's addresses. timeout: seconds of waiting for another
        rank, now and in every later operation. own_gpus: each rank has its own, so NCCL is used.
        Raises `RuntimeError` when they do not come.
        """
        patience = timedelta(seconds=timeout)
        store.set_timeout(patience)
        if own_gpus:
            # By default NCCL ends the whole process when a rank is gone. Waiting for each
            # operation turns that into an exception, and costs the overlap with what follows.
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = patience
            self._ranks = nccl(store, self.rank, self.size, options)
        else:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = patience
            options._devices = [gloo.create_device(hostname="127.0.0.1")]
            self._ranks = gloo(store, self.rank, self.size, options)
        self._own_gpus = own_gpus

    @property
    def connected(self) -> bool:
        return self._ranks is not None

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks of x, the same on each; x itself is overwritten."""
        if self.size == 1:
            return x
        started = time.perf_counter()
        if self._own_gpus or x.device.type == "cpu":
            _wait(self._connected().allreduce([x]))
        else:
            through = x.cpu()
            _wait(self._connected().allreduce([through]))
            x.copy_(through)
        self.seconds += time.perf_counter() - started
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """On rank 0 x of every rank, in their order; nothing elsewhere. Shapes must agree."""
        if self.size == 1:
            return [x]
        started = time.perf_counter()
        sent = x if self._own_gpus else x.cpu()
        options = dist.GatherOptions()
        options.rootRank = 0
        parts = [[torch.empty_like(sent) for _ in range(self.size)]] if self.rank == 0 else []
        _wait(self._connected().gather(parts, [sent], options))
        self.seconds += time.perf_counter() - started
        return [part.to(x.device) for part in parts[0]] if parts else []

    def _connected(self) -> Any:
        if self._ranks is None:
            raise RuntimeError(
                f"rank {self.rank} of {self.size} is not connected: the engine needs "
                f"tensor_parallel_size={self.size}, and ends the group when it is closed"
            )
        return self._ranks

    def close(self) -> None:
        """Leave: whoever waits for this rank gets an error. Safe to call twice."""
        self._ranks = None


def _wait(work: Any) -> None:
    """Until an operation is done; an error is told in one sentence, without a place in C++."""
    try:
        work.wait()
    except RuntimeError as error:
        said = re.sub(r"^\[\S+\] ", "", str(error)).partition(". ")[0]
        raise RuntimeError(f"the other ranks do not answer: {said}") from error


def in_threads(size: int, work: Callable[[Group], T], timeout: float = 60.0) -> list[T]:
    """`work(group)` of every rank, each on a thread of this process; results by rank.

    For notebooks and tests: the same operations, over the same library, without processes.
    """
    store = dist.HashStore()

    def run(rank: int) -> T:
        group = Group(rank, size)
        try:
            group.connect(store, timeout)
            return work(group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
