"""Kernels that use `minifer.kernels.compat` and little else, to look at what becomes of it."""

from __future__ import annotations

import triton
import triton.language as tl

from minifer.kernels import compat
from minifer.kernels.aot import NVIDIA, TARGETS, AotCase


@triton.jit
def wait_then_read(C, A, OUT, target, patience, B: tl.constexpr):
    left = compat.wait_ge(C, target, patience)
    i = tl.arange(0, B)
    tl.store(OUT + i, tl.load(A + i))
    tl.store(OUT + B, left * 1.0)


@triton.jit
def store_then_signal(C, A, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(A + i, i * 1.0)
    compat.signal(C, 2)


@triton.jit
def release_without_barrier(C, A, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(A + i, i * 1.0)
    tl.atomic_add(C, 2, sem="release", scope="gpu")


@triton.jit
def spin_on_plain_load(C, A, OUT, target, B: tl.constexpr):
    while tl.load(C) < target:
        pass
    i = tl.arange(0, B)
    tl.store(OUT + i, tl.load(A + i))


@triton.jit
def spin_on_volatile_load(C, A, OUT, target, B: tl.constexpr):
    while tl.load(C, volatile=True) < target:
        pass
    i = tl.arange(0, B)
    tl.store(OUT + i, tl.load(A + i))


@triton.jit
def prefetch(W, B: tl.constexpr):
    compat.prefetch_l2(W + tl.arange(0, B) * 64)  # 64 bf16: a line of 128 bytes


@triton.jit
def two_clocks(OUT):
    tl.store(OUT, compat.nanoseconds())
    tl.store(OUT + 1, compat.nanoseconds())


@triton.jit
def dependent(X, OUT, B: tl.constexpr):
    compat.launch_dependents()
    compat.wait_for_launcher()
    i = tl.arange(0, B)
    tl.store(OUT + i, tl.load(X + i))


@triton.jit
def round_to(X, OUT, DTYPE: tl.constexpr, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(OUT + i, compat.to_dtype(tl.load(X + i), DTYPE))


def aot_cases() -> list[AotCase]:
    waits = {"C": "*i32", "A": "*fp32", "OUT": "*fp32", "target": "i32"}
    signals = {"C": "*i32", "A": "*fp32"}
    block = {"B": 1024}

    def case(kernel, signature, constants=block, targets=TARGETS) -> AotCase:
        return AotCase(
            kernel.__name__, kernel, signature, constants, num_warps=8, wide=False, targets=targets
        )

    return [
        case(wait_then_read, waits | {"patience": "i32"}),
        case(store_then_signal, signals),
        case(release_without_barrier, signals),
        case(spin_on_plain_load, waits),
        case(spin_on_volatile_load, waits),
        case(prefetch, {"W": "*bf16"}, targets=NVIDIA),
        case(two_clocks, {"OUT": "*i64"}, {}, targets=NVIDIA),
        case(dependent, {"X": "*fp32", "OUT": "*fp32"}, targets=("sm_90", "sm_100")),
        case(round_to, {"X": "*fp32", "OUT": "*bf16"}, block | {"DTYPE": tl.bfloat16}),
    ]
