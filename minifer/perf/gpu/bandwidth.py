"""The memory's speed as measured, to hold against the datasheet's.

A decode step reads nearly all its bytes and writes few, so two ceilings are measured: a copy, which
is what others report, and a pass that only reads. Buffers are several times larger than any cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from minifer.perf.devices import DEVICES, Device
from minifer.perf.gpu.timing import seconds_per_call

MIB = 2**20
GPU_SIZES = (512 * MIB, 1024 * MIB, 4096 * MIB)
CPU_SIZES = (32 * MIB,)
_REPEATS, _SAMPLES = 4, 5


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second, the best of all sizes and samples. samples: "copy 512 MiB" → its best."""

    copy: float
    read: float
    samples: Mapping[str, float] = field(default_factory=dict)


def measure_bandwidth(
    device: torch.device, sizes: tuple[int, ...] | None = None, samples: int = _SAMPLES
) -> Bandwidth:
    """A copy counts what it reads and what it writes. A size that does not fit is left out.

    Raises `RuntimeError` when none fits.
    """
    if sizes is None:
        sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    best: dict[str, float] = {}
    for size in sizes:
        try:
            source = torch.ones(size // 4, dtype=torch.float32, device=device)
            target = torch.empty_like(source)
        except torch.OutOfMemoryError:
            continue
        matrix, vector = source.view(-1, 4096), source[:4096].clone()
        calls: dict[str, tuple[int, Callable[[], object]]] = {
            "copy": (2 * size, partial(target.copy_, source)),
            "read, sum": (size, source.sum),
            "read, matrix · vector": (size, partial(torch.mv, matrix, vector)),
        }
        for name, (moved, call) in calls.items():
            call()
            times = [seconds_per_call(call, _REPEATS, device) for _ in range(samples)]
            best[f"{name}, {size // MIB} MiB"] = moved / min(times)
        del source, target, matrix, vector, calls
    if not best:
        raise RuntimeError(f"no buffer of {sizes} bytes fits on {device}")
    return Bandwidth(
        copy=max(value for name, value in best.items() if name.startswith("copy")),
        read=max(value for name, value in best.items() if name.startswith("read")),
        samples=best,
    )


def datasheet(accelerator: str | None) -> Device | None:
    """The maker's figures for a chip as torch names it ("NVIDIA H200"); None if not listed."""
    for device in DEVICES.values():
        if re.search(rf"\b{device.name.split('-')[0]}\b", accelerator or ""):
            return device
    return None
