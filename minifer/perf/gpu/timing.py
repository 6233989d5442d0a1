"""How long a call takes on a device, and what it launches there.

A GPU runs behind the program that feeds it, so its time is read from events in its own stream; on a
CPU the wall clock is the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

_HOST_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cuGraphLaunch")


def seconds_per_call(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds of one of `repeats` calls in a row. Blocks until the device has finished them."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - started) / repeats
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1e3 / repeats  # events count milliseconds


def captured(call: Callable[[], Any], warmup: int = 2) -> tuple[Callable[[], None], Any]:
    """`call` as a CUDA graph: (replay, what the captured call returned; a replay refills it).

    The call first runs `warmup` times beside the capture, so that whatever it compiles, caches or
    copies from the host is done. Raises `RuntimeError` where the call reads from the device.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    return graph.replay, outputs


@dataclass(frozen=True)
class Launches:
    """host: launches the program makes a call (a graph is one). kernels: what the device runs.
    other: copies and fills on the device."""

    host: float
    kernels: float
    other: float


def count_launches(
    call: Callable[[], object], device: torch.device, calls: int = 3
) -> Launches | None:
    """Averages of `calls` calls, by torch's profiler; None on a CPU, where nothing is launched."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            call()
        torch.cuda.synchronize(device)
    events = [(e.name, e.device_type.name == "CUDA") for e in profiler.events()]
    return tally(events, calls)


def tally(events: Iterable[tuple[str, bool]], calls: int) -> Launches:
    """Events by (name, did it run on the device), as the profiler names them."""
    host = kernels = other = 0
    for name, on_device in events:
        if on_device and name.startswith(("Memcpy", "Memset")):
            other += 1
        elif on_device:
            kernels += 1
        elif name.startswith(_HOST_LAUNCHES):
            host += 1
    return Launches(host / calls, kernels / calls, other / calls)
