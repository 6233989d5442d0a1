"""What this machine can do at best: how fast it reads memory and multiplies matrices, measured.

`this_machine` gives both as a `Device`, so a machine nobody prints a data sheet for stands in the
same table, under the same roofline, as a GPU. The figures are those of torch with the threads it is
set to: the ceiling of this process, not of the board.

A buffer is read by passes an engine is made of, a matrix times a vector, a sum and a maximum; the
best pass counts, because a neighbour can only slow a pass down. Bandwidth falls with the size of
what is read: what fits a cache comes faster than memory delivers (`read_bandwidth` at several sizes
shows the steps). So the buffer of `this_machine` is larger than the last cache, and a small model
may beat a prediction made with it: its weights never leave the cache.
"""

from __future__ import annotations

import itertools
import math
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from minifer.perf.bench import machine
from minifer.perf.devices import Device
from minifer.perf.gpu.bandwidth import datasheet
from minifer.perf.gpu.timing import seconds_per_call

MIB = 2**20
_SMALLEST, _LARGEST = 128 * MIB, 512 * MIB  # of the buffer that stands for memory
_UNKNOWN_CACHE = 32 * MIB  # where the system does not say how large its last cache is
_MATRIX = {"cpu": (512, 1024), "cuda": (4096, 8192)}  # edges of square matrices; the best counts
# A CPU's buffer is read in turns of this many bytes, about a millisecond each: where others use the
# same cores, a long read is always interrupted, and some short one is not.
_SLICE_ROWS = 1024
_SLICE = 4 * 4096 * _SLICE_ROWS  # rows of 4096 float32
_SAMPLE_SECONDS = 1e-3  # calls shorter than this are timed several in a row
_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


def this_machine(*, seconds: float = 1.0, dtype: str = "float32", device: str = "auto") -> Device:
    """This machine as a `Device`, its rates measured; measured once a process for equal arguments.

    memory_bandwidth: bytes/s of reading a buffer of at least 128 MiB, four times the last cache
    where that is no more than 512 MiB, but no more than an eighth of memory. peak_flops: FLOP/s of
    a square matrix product in `dtype` ("float32", "bfloat16", "float16"). memory_bytes,
    on_chip_bytes (the last cache): as the system says. power_watts: the data sheet's for a GPU in
    `DEVICES`, the limit the system states for a CPU package, NaN where neither is known. device:
    "auto" takes the GPU where there is one.

    seconds: how long to measure, about; at least three passes of each. Torch's threads are part of
    what is measured. Raises `ValueError` for seconds that are not above 0, another dtype, or a
    device that is not here.
    """
    if not seconds > 0:
        raise ValueError(f"seconds must be above 0, got {seconds}")
    _check_dtype(dtype)
    return _measured(seconds, dtype, str(_find(device)), torch.get_num_threads())


def _check_dtype(dtype: str) -> None:
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")


@cache
def _measured(seconds: float, dtype: str, device_name: str, threads: int) -> Device:
    started = time.perf_counter()
    here = described(dtype, device_name, threads)
    read = reader(buffer_bytes(here), device_name)  # making a large buffer takes a while, too
    bandwidth = read(0.4 * seconds)
    left = seconds - (time.perf_counter() - started)
    flops = product_rate(here, dtype=dtype, seconds=min(0.4 * seconds, left), device=device_name)
    return replace(here, peak_flops=flops, memory_bandwidth=bandwidth)


def measured_again(
    here: Device, *, seconds: float = 0.6, dtype: str = "float32", device: str = "auto"
) -> Device:
    """`here` with the better of each of its rates and of a second measurement.

    A neighbour can only slow a machine down. So whoever compares a step with a ceiling measures the
    ceiling before and after, as the neighbours may have gone in between. Arguments as
    `this_machine`'s.
    """
    _check_dtype(dtype)
    half = seconds / 2
    bandwidth = read_bandwidth(buffer_bytes(here), seconds=half, device=device)
    flops = product_rate(here, dtype=dtype, seconds=half, device=device)
    return replace(
        here,
        memory_bandwidth=max(here.memory_bandwidth, bandwidth),
        peak_flops=max(here.peak_flops, flops),
    )


def buffer_bytes(here: Device) -> int:
    """What is read to stand for memory: see `this_machine`."""
    size = min(max(4 * here.on_chip_bytes, _SMALLEST), _LARGEST)
    return int(min(size, here.memory_bytes / 8)) if here.memory_bytes else int(size)


def product_rate(here: Device, *, dtype: str, seconds: float, device: str) -> float:
    """FLOP/s of square products that stand for the peak: the best size. As `this_machine`."""
    edges = _MATRIX["cuda" if here.num_sms is not None else "cpu"]
    each = seconds / len(edges)
    return max(matmul_rate(edge, dtype=dtype, seconds=each, device=device) for edge in edges)


def read_bandwidth(num_bytes: int, *, seconds: float = 0.1, device: str = "auto") -> float:
    """Bytes/s at which `num_bytes` are read again and again: the best of three passes or more.

    Bytes that fit a cache stay there. Raises `ValueError` for fewer than 4096 bytes.
    """
    if num_bytes < 4096:
        raise ValueError(f"num_bytes must be at least 4096, got {num_bytes}")
    return reader(num_bytes, device)(seconds)


def reader(
    num_bytes: int, device: str = "auto", passes: Sequence[Callable[[Tensor], object]] = ()
) -> Callable[[float], float]:
    """`read_bandwidth` with the buffer kept: a function of the seconds to measure.

    passes: further ways to read, which take the whole buffer; the fastest of all counts.
    """
    where = _find(device)
    columns = min(4096, num_bytes // 4096 * 4)
    rows = num_bytes // (4 * columns)
    if where.type == "cpu" and num_bytes > _SLICE:
        rows = rows // _SLICE_ROWS * _SLICE_ROWS
    matrix = torch.ones(rows, columns, device=where)  # written: every page is a page of its own
    vector = torch.ones(1, columns, device=where)
    parts = matrix.split(_SLICE_ROWS if rows > _SLICE_ROWS and where.type == "cpu" else rows)
    following = itertools.cycle(parts)
    calls = (
        lambda: torch.nn.functional.linear(vector, next(following)),
        lambda: next(following).sum(),
        lambda: next(following).amax(),
    )
    whole = [partial(read, matrix) for read in passes]

    def measure(seconds: float) -> float:
        best = parts[0].nbytes / _best_seconds(calls, seconds / (1 + len(whole)), where)
        for call in whole:
            once = _best_seconds((call,), seconds / (1 + len(whole)), where)
            best = max(best, matrix.nbytes / once)
        return best

    return measure


def matmul_rate(
    edge: int, *, dtype: str = "float32", seconds: float = 0.1, device: str = "auto"
) -> float:
    """FLOP/s of the product of two square matrices: the best of three products or more."""
    _check_dtype(dtype)
    where = _find(device)
    left, right = (torch.ones(edge, edge, dtype=_DTYPES[dtype], device=where) for _ in range(2))
    out = torch.empty_like(left)

    def product() -> Tensor:
        return torch.mm(left, right, out=out)

    return 2 * edge**3 / _best_seconds((product,), seconds, where)


def _best_seconds(
    calls: tuple[Callable[[], object], ...], seconds: float, device: torch.device
) -> float:
    """The fastest call of all, each called at least three times; they take turns."""
    best, repeats = math.inf, []
    for call in calls:  # the first call may be slow, the second says how many make a sample
        call()
        once = seconds_per_call(call, 1, device)
        repeats.append(max(1, int(_SAMPLE_SECONDS / max(once, 1e-7))))
        best = min(best, once)
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < 3 or time.perf_counter() < end:
        for call, times in zip(calls, repeats, strict=True):
            best = min(best, seconds_per_call(call, times, device))
        rounds += 1
    return best


def _find(name: str) -> torch.device:
    """Raises `ValueError` for a device that torch does not know or does not find here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name} needs a GPU, and torch finds none")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}")
    return device


def described(dtype: str, device_name: str, threads: int) -> Device:
    """This machine, all but the two rates, which are NaN. Arguments as `this_machine`'s."""
    device = _find(device_name)
    here = machine()
    chip = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    known = datasheet(chip.name) if chip is not None else None
    if chip is not None:
        power, source = known.power_watts if known else math.nan, "data sheet"
    else:
        power, source = _package_watts(), "package limit, as the system states it"
    cores = f"{here['cpu']}, {threads} of {here['cores']} cores"
    return Device(
        name=f"this machine: {chip.name if chip is not None else cores}",
        peak_flops=math.nan,
        memory_bandwidth=math.nan,
        memory_bytes=chip.total_memory if chip is not None else here["memory_bytes"] or 0,
        on_chip_bytes=chip.L2_cache_size if chip is not None else last_cache_bytes(),
        power_watts=power,
        source="measured here, minifer.perf.limit",
        date=f"{datetime.now(UTC):%Y-%m}",
        note=f"{dtype} products; power: {'not known' if math.isnan(power) else source}",
        num_sms=chip.multi_processor_count if chip is not None else None,
    )


def last_cache_bytes() -> int:
    """Bytes of the CPU's last cache; 32 MiB where the system does not say (a guess, on the large
    side of laptops). A virtual machine names its host's cache, of which it may get a part.
    """
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):  # "307200K"
            text = file.read_text().strip()
            sizes.append(int(text.rstrip("KM")) * (MIB if text.endswith("M") else 1024))
    if not sizes and platform.system() == "Darwin":
        for key in ("hw.l3cachesize", "hw.perflevel0.l2cachesize", "hw.l2cachesize"):
            with suppress(OSError, ValueError, subprocess.SubprocessError):
                command = ["sysctl", "-n", key]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                sizes.append(int(done.stdout))
    return max(sizes, default=_UNKNOWN_CACHE)


def _package_watts() -> float:
    """The long-term power limit of the CPU packages, NaN where the system does not tell."""
    watts = 0.0
    for zone in Path("/sys/class/powercap").glob("intel-rapl:[0-9]"):
        with suppress(OSError, ValueError):
            watts += int((zone / "constraint_0_power_limit_uw").read_text()) / 1e6
    return watts or math.nan
