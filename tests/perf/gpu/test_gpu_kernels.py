"""Kernels one by one, and the memory's speed, without a GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minifer.kernels.mega.shapes import MODELS
from minifer.kernels.registry import KERNELS
from minifer.perf.costs import OpCost
from minifer.perf.devices import DEVICES
from minifer.perf.gpu.bandwidth import Bandwidth, datasheet, measure_bandwidth
from minifer.perf.gpu.kernel_cases import groups
from minifer.perf.gpu.kernels import (
    KernelCase,
    bench_kernels,
    copies_to_be_cold,
    relative_errors,
    run_case,
    table,
)
from minifer.perf.gpu.timing import Launches, count_launches, seconds_per_call, tally

CPU = torch.device("cpu")
BANDWIDTH = Bandwidth(1e9, 2e9)


def case(name: str, call, outputs=None) -> KernelCase:
    """Doubling, as a kernel: `call` is tried on 100 numbers."""
    options = {} if outputs is None else {"outputs": outputs}
    numbers = torch.randn(100, generator=torch.Generator().manual_seed(0)).bfloat16()
    return KernelCase(
        name, lambda: (numbers.clone(),), call, lambda x: x * 2, OpCost(name, 100, 400), **options
    )


def raises(x: Tensor) -> Tensor:
    raise RuntimeError("out of shared memory")


@pytest.mark.parametrize(
    ("call", "status", "reason"),
    [
        (lambda x: x * 2, "ok", "interpreter"),
        (lambda x: x * 2.1, "wrong", "off by 0.05"),
        (lambda x: x * torch.nan, "wrong", "off by nan"),
        (lambda x: x[:-1] * 2, "failed", r"\[99\] instead of \[100\]"),
        (raises, "failed", "out of shared memory"),
    ],
)
def test_a_kernel_is_compared_before_it_is_timed(call, status: str, reason: str) -> None:
    row = run_case(case("double", call), CPU, 1e9, None)
    assert row.status == status and row.seconds is None
    assert row.reason is not None
    assert re.search(reason, row.reason)


@pytest.mark.parametrize("factor", [torch.inf, torch.nan])
def test_what_is_no_number_is_no_number_in_the_file_either(tmp_path: Path, factor: float) -> None:
    """JSON has neither: a kernel that overflows must not take the others' rows with it."""
    numbers = torch.ones(3)
    both = KernelCase(
        "both", lambda: (numbers,), lambda x: x * factor, lambda x: x * factor, OpCost("x", 9, 36)
    )
    cases = [case("alone", lambda x: x * factor), both, case("sound", lambda x: x * 2)]
    out = tmp_path / "k.json"
    bench_kernels({"all": lambda: iter(cases)}, CPU, BANDWIDTH, {}, out, lambda text: None)
    rows = json.loads(out.read_text())["rows"]
    assert [row["status"] for row in rows] == ["wrong", "wrong", "ok"]
    assert [row["error"] for row in rows[:2]] == [None, None]


def test_no_cache_holds_all_copies_of_a_small_kernels_data() -> None:
    """L2 caches have up to 126 MB (B200)."""
    for num_bytes in (2**17, 2**20, 10**7, 3 * 10**8):
        copies = copies_to_be_cold(num_bytes)
        assert copies >= 2
        assert copies * num_bytes >= 2 * 126e6
    assert copies_to_be_cold(0) == copies_to_be_cold(1)


def test_the_error_is_that_of_the_worst_output() -> None:
    two = case("double", lambda x: x * 2, lambda result, arguments: (result, result * 0 + 1))
    assert relative_errors(two)[0] <= 2**-8
    worse = case("double", lambda x: x * 2.5, lambda result, arguments: (arguments[0], result))
    assert relative_errors(worse)[0] == pytest.approx(0.25, abs=0.01)


def test_a_reference_gets_its_own_copy_in_a_wide_dtype() -> None:
    """A kernel that writes into its arguments must not have written into the reference's."""
    seen = []

    def in_place(x: Tensor) -> Tensor:
        x *= 2
        return x

    def reference(x: Tensor) -> Tensor:
        seen.append(x.dtype)
        return x * 2

    one = KernelCase("double", lambda: (torch.ones(3),), in_place, reference, OpCost("d", 3))
    assert relative_errors(one, torch.float64) == (0.0, 0.0)
    assert seen == [torch.float32, torch.float64]


def test_a_kernel_may_round_as_often_as_its_reference() -> None:
    """Off by a hundredth: wrong, unless the reference in the same dtype is off as far."""

    def reference(x: Tensor) -> Tensor:
        return x * (2 if x.dtype == torch.float32 else 2.02)

    x = torch.ones(9, dtype=torch.bfloat16)
    sloppy = KernelCase("x", lambda: (x,), lambda x: x * 2.02, reference, OpCost("x", 9, 36))
    assert run_case(sloppy, CPU, 1e9, None).status == "ok"
    strict = KernelCase("x", lambda: (x,), lambda x: x * 2.02, lambda x: x * 2, OpCost("x", 9, 36))
    assert run_case(strict, CPU, 1e9, None).status == "wrong"


def test_a_group_that_cannot_be_listed_is_a_row_and_the_rest_runs(tmp_path: Path) -> None:
    def broken() -> Iterator[KernelCase]:
        raise ImportError("no module named kernels.missing")
        yield

    def sound() -> Iterator[KernelCase]:
        yield case("double", lambda x: x * 2)

    out, said = tmp_path / "k.json", []
    result = bench_kernels(
        {"missing": broken, "sound": sound}, CPU, BANDWIDTH, {}, out, said.append
    )
    assert [(row["name"], row["status"]) for row in result["rows"]] == [
        ("missing", "failed"),
        ("double", "ok"),
    ]
    assert json.loads(out.read_text()) == json.loads(json.dumps(result)) and len(said) == 2
    assert "missing" in table(result) and "1 GB/s" in table(result)


@pytest.mark.parametrize("name", list(groups(MODELS["minifer-tiny"], CPU)))
def test_every_kernel_has_cases_with_bytes_for_llama_1b(name: str) -> None:
    """Listing draws nothing: the shapes are those of a GPU."""
    cases = list(groups(MODELS["llama-1b"], CPU)[name]())
    assert cases and all(case.cost.bytes > 0 for case in cases)
    assert len({case.name for case in cases}) == len(cases)


def test_no_kernel_is_left_out() -> None:
    assert set(KERNELS) - {"mega"} <= set(groups(MODELS["llama-1b"], CPU))  # mega: the ladder


def test_the_head_of_llama_1b_is_525_megabytes() -> None:
    head = next(groups(MODELS["llama-1b"], CPU)["gemv"]())
    assert head.name == "gemv head" and 525e6 < head.cost.bytes < 526e6


def test_a_copy_counts_both_ways() -> None:
    measured = measure_bandwidth(CPU, sizes=(2**20, 2**21), samples=1)
    assert {name.split(",")[0] for name in measured.samples} == {"copy", "read"}
    assert len(measured.samples) == 6 and measured.copy > 0 and measured.read > 0
    assert measured.copy == max(v for k, v in measured.samples.items() if k.startswith("copy"))


def test_no_room_for_a_buffer_is_said(monkeypatch) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "ones", no_memory)
    with pytest.raises(RuntimeError, match="no buffer"):
        measure_bandwidth(CPU)


@pytest.mark.parametrize(
    ("accelerator", "device"),
    [
        ("NVIDIA H200", "H200-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB-SXM"),
        ("Tesla T4", "T4"),
        ("NVIDIA T400", None),
        ("NVIDIA GeForce RTX 4090", None),
        (None, None),
    ],
)
def test_the_datasheet_of_a_chip(accelerator: str | None, device: str | None) -> None:
    assert datasheet(accelerator) == (DEVICES[device] if device else None)


def test_launches_are_told_apart() -> None:
    events = [
        ("aten::mm", False),
        ("cudaLaunchKernel", False),
        ("cuLaunchKernelEx", False),
        ("cudaGraphLaunch", False),
        ("cudaDeviceSynchronize", False),
        ("gemv_kernel", True),
        ("Memset (Device)", True),
        ("Memcpy DtoD (Device -> Device)", True),
        ("void at::native::vectorized_elementwise_kernel", True),
    ]
    assert tally(events * 2, calls=2) == Launches(host=3, kernels=2, other=2)


def test_a_cpu_launches_nothing_and_has_a_wall_clock() -> None:
    calls: list[int] = []
    assert count_launches(lambda: calls.append(1), CPU) is None
    assert seconds_per_call(lambda: calls.append(1), 5, CPU) >= 0.0 and len(calls) == 5
