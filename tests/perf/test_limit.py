"""What this machine can do: the arithmetic of it, with times that are given."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from minifer.perf import limit
from minifer.perf.limit import (
    MIB,
    last_cache_bytes,
    matmul_rate,
    measured_again,
    read_bandwidth,
    this_machine,
)


@pytest.fixture
def one_millisecond(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Every call takes 1 ms, but for those that the test lists: they come first."""
    listed: list[float] = []

    def seconds(call: object, repeats: int, device: object) -> float:
        call()  # type: ignore[operator]
        return listed.pop(0) if listed else 1e-3

    monkeypatch.setattr(limit, "seconds_per_call", seconds)
    monkeypatch.setattr(limit, "_SMALLEST", MIB)
    monkeypatch.setattr(limit, "_LARGEST", MIB)
    monkeypatch.setitem(limit._MATRIX, "cpu", (64,))
    limit._measured.cache_clear()
    yield listed
    limit._measured.cache_clear()


def test_rates_are_bytes_and_flops_over_seconds(one_millisecond: list[float]) -> None:
    here = this_machine(seconds=1e-6, device="cpu")
    assert here.memory_bandwidth == pytest.approx(MIB / 1e-3)
    assert here.peak_flops == pytest.approx(2 * 64**3 / 1e-3)
    assert here.ridge_point == pytest.approx(2 * 64**3 / MIB)


@pytest.mark.parametrize("num_bytes", [4096, 10_000, 3 * 4096, 100_000])
def test_the_best_pass_counts_over_the_bytes_really_read(
    one_millisecond: list[float], num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_millisecond += [5e-3, 4e-3, 1e-3, 5e-4, 2e-3]
    made = []
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *a, **k: made.append(ones(*a, **k)) or made[-1])
    rate = read_bandwidth(num_bytes, seconds=1e-6, device="cpu")
    assert rate == pytest.approx(made[0].nbytes / 5e-4)
    assert 0.6 * num_bytes < made[0].nbytes <= num_bytes


def test_a_large_buffer_is_read_part_by_part(
    one_millisecond: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit, "_SLICE_ROWS", 64)
    monkeypatch.setattr(limit, "_SLICE", 64 * 16_384)
    seen: list[int] = []
    linear = torch.nn.functional.linear

    def watched(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(weight.data_ptr())
        return linear(x, weight)

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    # Rows of 16,384 bytes: four parts of 64 rows, and 10 rows that no part needs.
    rate = read_bandwidth(266 * 16_384, seconds=1e-6, device="cpu")
    assert rate == pytest.approx(64 * 16_384 / 1e-3)
    assert len(set(seen)) > 2  # one after the other, the sums in between


def test_a_rate_is_of_its_dtype(one_millisecond: list[float]) -> None:
    assert matmul_rate(8, dtype="bfloat16", seconds=1e-6, device="cpu") == 2 * 8**3 / 1e-3
    assert "bfloat16 product" in this_machine(seconds=1e-6, dtype="bfloat16", device="cpu").note


def test_the_better_of_two_measurements_stays(one_millisecond: list[float]) -> None:
    here = this_machine(seconds=1e-6, device="cpu")
    slow = replace(here, memory_bandwidth=1.0, peak_flops=1e30)
    best = measured_again(slow, seconds=1e-6, device="cpu")
    assert (best.memory_bandwidth, best.peak_flops) == (here.memory_bandwidth, 1e30)


def test_it_is_measured_once_for_equal_arguments(one_millisecond: list[float]) -> None:
    assert this_machine(seconds=1e-6, device="cpu") is this_machine(seconds=1e-6, device="cpu")


def test_what_the_system_does_not_say_is_not_a_number(one_millisecond: list[float]) -> None:
    here = this_machine(seconds=1e-6, device="cpu")
    assert here.power_watts > 0 or math.isnan(here.power_watts)
    assert here.source.startswith("measured here")
    assert here.on_chip_bytes == last_cache_bytes() >= 4096


@pytest.mark.parametrize(
    ("cache_mib", "memory_mib", "expected_mib"),
    [(8, 16_384, 128), (64, 16_384, 256), (300, 16_384, 512), (300, 1024, 128), (300, 0, 512)],
)
def test_the_buffer_is_several_caches_and_a_small_part_of_memory(
    cache_mib: int, memory_mib: int, expected_mib: int
) -> None:
    here = limit.described("float32", "cpu", 1)
    here = replace(here, on_chip_bytes=cache_mib * MIB, memory_bytes=memory_mib * MIB)
    assert limit.buffer_bytes(here) == expected_mib * MIB


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seconds": 0}, "seconds must be above 0, got 0"),
        ({"seconds": math.nan}, "seconds must be above 0, got nan"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ({"device": "tpu9"}, "device must be auto, cpu or cuda, got 'tpu9'"),
        ({"device": "meta"}, "device must be auto, cpu or cuda, got 'meta'"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        this_machine(**arguments)  # type: ignore[arg-type]


def test_too_few_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="num_bytes must be at least 4096, got 4095"):
        read_bandwidth(4095)
