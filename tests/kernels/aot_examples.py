"""Kernels that come out well, badly, or not at all, to see how each is told."""

from __future__ import annotations

import os
from collections.abc import ItemsView, Iterator

import triton
import triton.language as tl

from minifer.kernels.aot import AotCase


@triton.jit
def copy(X, OUT, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(OUT + i, tl.load(X + i))


@triton.jit
def leaves_a_loop(X):
    while True:
        break


@triton.jit
def keeps_tiles(X, W, OUT, B: tl.constexpr, STAGES: tl.constexpr):
    """A pipelined product: each stage but the last keeps a tile of X and one of W."""
    i = tl.arange(0, B)
    total = tl.zeros([B, B], tl.float32)
    for k in tl.range(0, 1024, B, num_stages=STAGES):
        x = tl.load(X + i[:, None] * 1024 + k + i[None, :])
        w = tl.load(W + (k + i)[:, None] * 1024 + i[None, :])
        total = tl.dot(x, w, total)
    tl.store(OUT + i[:, None] * B + i[None, :], total)


class _Killer(dict):
    """A compiler that is not ours to catch: it ends the process."""

    def items(self) -> ItemsView:
        os.abort()

    def __iter__(self) -> Iterator:
        os.abort()


def aot_cases() -> list[AotCase]:
    pointers = {"X": "*bf16", "OUT": "*bf16"}
    tiles = {"X": "*bf16", "W": "*bf16", "OUT": "*fp32"}
    return [
        AotCase("well", copy, pointers, {"B": 1024}),
        AotCase("no such statement", leaves_a_loop, {"X": "*bf16"}, {}),
        AotCase("kills its compiler", copy, pointers, _Killer(), targets=("sm_90",)),
        AotCase("an argument too few", copy, {"X": "*bf16"}, {"B": 1024}),
        AotCase("tiles", keeps_tiles, tiles, {"B": 128, "STAGES": 3}, num_warps=8),
        AotCase(
            "too many tiles",
            keeps_tiles,
            tiles,
            {"B": 128, "STAGES": 6},
            num_warps=8,
            targets=("sm_90",),
        ),
        AotCase("narrow", copy, {"X": "*i8", "OUT": "*i8"}, {"B": 128}, wide=False),
    ]
