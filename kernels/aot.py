"""Ahead-of-time compilation for GPUs that are not there, and what came out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NVIDIA = ("sm_80", "sm_90", "sm_100")
TARGETS = (*NVIDIA, "gfx942")


@dataclass(frozen=True)
class AotCase:
    """One kernel with one configuration, as it would be launched on a GPU.

    signature: argument → "*bf16", "*fp32", "*i32", "i32", "fp32", … in the kernel's order; its
    constexpr arguments stand in `constants` instead. Pointers and the integers in `aligned` are
    promised to be multiples of 16, as the JIT finds out by itself. wide: loads of weights must be
    128 bits wide.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = ()
    wide: bool = True
    targets: tuple[str, ...] = TARGETS
    options: Mapping[str, Any] = field(default_factory=dict)
