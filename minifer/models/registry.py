"""Which class runs an architecture, and who reads a checkpoint that is not Hugging Face's.

Classes and functions are named by their dotted path and imported when first asked for: a package
above this one (Parcae) takes part with an entry in a table and no import upwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class CheckpointFormat:
    """A family whose checkpoints are not in Hugging Face's form. Each function by dotted path.

    read_config: (parsed config.json, its name in errors) → ModelConfig. write_config: back.
    read_tensors: ((name, tensor) pairs, ModelConfig) → pairs that `weight_parts` knows.
    read_tokenizer: (folder) → Tokenizer. without_safetensors: what to do about a folder that
    lacks them.
    """

    architecture: str
    read_config: str
    write_config: str
    read_tensors: str
    read_tokenizer: str
    without_safetensors: str


# `_class_name` in config.json → its format.
FORMATS: Mapping[str, CheckpointFormat] = MappingProxyType(
    {
        "ParcaeConfig": CheckpointFormat(
            architecture="ParcaeForCausalLM",
            read_config="minifer.parcae.checkpoint.config_from_parcae",
            write_config="minifer.parcae.checkpoint.config_to_parcae",
            read_tensors="minifer.parcae.checkpoint.read_tensors",
            read_tokenizer="minifer.parcae.checkpoint.read_tokenizer",
            without_safetensors="Parcae is published as pytorch_model.bin: download that, run "
            "`minifer parcae convert SRC DST` once, and use DST",
        )
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
    found: type[Any] = by_path(ARCHITECTURES[architecture])
    return found


def format_of(raw: Mapping[str, Any]) -> CheckpointFormat | None:
    """The format of a parsed `config.json`; None for Hugging Face's."""
    name = raw.get("_class_name")
    return FORMATS.get(name) if isinstance(name, str) else None


def format_of_architecture(architecture: str) -> CheckpointFormat | None:
    """The format that models of an architecture are saved in; None for Hugging Face's."""
    return next((form for form in FORMATS.values() if form.architecture == architecture), None)


def by_path(dotted: str) -> Any:
    """What a dotted path names, imported now."""
    module, _, name = dotted.rpartition(".")
    return getattr(import_module(module), name)


def build_model(config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> Any:
    """A model with uninitialised weights in `dtype` on `device`.

    Raises `ValueError` as `check_architecture` does.
    """
    return model_class(config.architecture)(config, dtype=dtype, device=device)
