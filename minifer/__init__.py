"""minifer: an inference textbook whose examples are a real engine.

Public names are imported on first use, so that `import minifer` costs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minifer.async_llm import AsyncLLM
    from minifer.config import EngineConfig, ModelConfig
    from minifer.engine import Engine
    from minifer.llm import LLM
    from minifer.outputs import CompletionOutput, RequestOutput
    from minifer.sampling_params import SamplingParams
    from minifer.structured_output import StructuredOutput

    __version__: str

_HOMES = {
    "LLM": "minifer.llm",
    "AsyncLLM": "minifer.async_llm",
    "Engine": "minifer.engine",
    "EngineConfig": "minifer.config",
    "ModelConfig": "minifer.config",
    "SamplingParams": "minifer.sampling_params",
    "StructuredOutput": "minifer.structured_output",
    "RequestOutput": "minifer.outputs",
    "CompletionOutput": "minifer.outputs",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "ModelConfig",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "__version__":
        return _version()
    raise AttributeError(f"module 'minifer' has no attribute {name!r}")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # half of an import's time

    try:
        return version("minifer")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0.0.0+source"


def __dir__() -> list[str]:
    return sorted(__all__)
