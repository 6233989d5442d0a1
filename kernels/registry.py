"""Which kernels there are, by name: each module has `aot_cases()`. Imports no triton by itself."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minifer.kernels.aot import AotCase

_MODULES = (
    "rms_norm",
    "rope_append",
    "gemv",
    "gemm_small",
    "gemm",
    "norm_gemv",
    "gate_up",
    "quantized_gemv",
    "flash_attention",
    "paged_decode",
    "sample",
    "inject",
)

# name → module
KERNELS: Mapping[str, str] = MappingProxyType(
    {name: f"minifer.kernels.{name}" for name in _MODULES} | {"mega": "minifer.kernels.mega.launch"}
)


def cases(module: str) -> list[AotCase]:
    """The configurations of a module's kernels; a process that compiles calls this."""
    found: list[AotCase] = importlib.import_module(module).aot_cases()
    return found
