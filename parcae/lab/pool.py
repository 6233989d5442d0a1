"""Many small trainings side by side: one process a core, one thread a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TypeVar

import torch

J = TypeVar("J")
R = TypeVar("R")


def run_all(
    function: Callable[[J], R],
    jobs: Sequence[J],
    workers: int = 1,
    done: Callable[[J], None] = lambda job: None,
) -> list[R]:
    """[function(job) for job in jobs], each on one thread, on `workers` processes.

    function and jobs must be picklable when there is more than one worker. done: called in this
    process as each job ends, in whatever order. Raises `ValueError` for workers below 1.
    """
    if workers < 1:
        raise ValueError(f"jobs must be at least 1, got {workers}")
    results: dict[int, R] = {}
    if min(workers, len(jobs)) <= 1:
        for i, job in enumerate(jobs):
            results[i] = _alone(function, job)
            done(job)
    else:
        # spawn: a fork would copy torch's locked thread pool
        with ProcessPoolExecutor(min(workers, len(jobs)), mp_context=get_context("spawn")) as pool:
            waiting = {pool.submit(_alone, function, job): i for i, job in enumerate(jobs)}
            try:
                for future in as_completed(waiting):
                    results[waiting[future]] = future.result()
                    done(jobs[waiting[future]])
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return [results[i] for i in range(len(jobs))]


def _alone(function: Callable[[J], R], job: J) -> R:
    with one_thread():
        return function(job)


@contextmanager
def one_thread() -> Iterator[None]:
    """At this size more threads are slower, and change the last digits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
