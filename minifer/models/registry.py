"""Which class runs an architecture.

Classes are named by their dotted path and imported when first asked for: a package above this one
(Parcae) takes part with a line in the table and no import upwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from minifer.config import ModelConfig

if TYPE_CHECKING:
    import torch

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "LlamaForCausalLM": "minifer.models.transformer.Transformer",
        "MistralForCausalLM": "minifer.models.transformer.Transformer",
        "Qwen2ForCausalLM": "minifer.models.transformer.Transformer",
        "Qwen3ForCausalLM": "minifer.models.transformer.Transformer",
        "ParcaeForCausalLM": "minifer.parcae.model.Parcae",
    }
)

# Mixture-of-experts models without "Moe" in their name.
_OTHER_MOE = ("Mixtral", "Dbrx", "Deepseek", "GptOss")


def check_architecture(architecture: str, num_experts: int = 0) -> None:
    """Raises `ValueError` for an architecture that minifer does not run, saying what to do."""
    named_moe = "moe" in architecture.lower() or architecture.startswith(_OTHER_MOE)
    if num_experts or named_moe:
        raise ValueError(
            f"{architecture} is a mixture-of-experts model; minifer runs dense models only. "
            "Use a dense model of the family (e.g. Mistral-7B for Mixtral, Qwen3-0.6B for "
            "Qwen3-30B-A3B), or run this one with vLLM"
        )
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"architecture {architecture!r} is not supported; minifer runs "
            f"{', '.join(ARCHITECTURES)}"
        )


def model_class(architecture: str) -> type[Any]:
    """The class of an architecture, imported now. Raises `ValueError` as `check_architecture`."""
    check_architecture(architecture)
    module, _, name = ARCHITECTURES[architecture].rpartition(".")
    found: type[Any] = getattr(import_module(module), name)
    return found


def build_model(config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> Any:
    """A model with uninitialised weights in `dtype` on `device`.

    Raises `ValueError` as `check_architecture` does.
    """
    return model_class(config.architecture)(config, dtype=dtype, device=device)
