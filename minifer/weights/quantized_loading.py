"""Models whose matrices are codes: filled from a GGUF's codes, or quantised while they are read.

The matrices of the model are never allocated: it is built without memory for them, and each is put
in when its parts are there. What is held beside the codes is one tensor of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from minifer.config import ModelConfig
from minifer.models.registry import build_model
from minifer.models.rope import RotaryEmbedding
from minifer.models.transformer import WeightPart
from minifer.weights.loading import HEAD, LoadableModel, NamedWeights, load_weights
from minifer.weights.mapped import mapped_tensors
from minifer.weights.quantized import (
    QuantizedWeight,
    Weight,
    can_concatenate,
    concatenate,
    dense,
    quantize,
    set_weight,
)

# In a converted folder. Not beside model.safetensors: engines read every file of that kind there.
CODES = "quantized/model.safetensors"
_PARTS = ("codes", "scale", "zero")
_BLOCK = 32


def load_quantized(
    config: ModelConfig, dtype: torch.dtype, named: NamedWeights, mode: str
) -> tuple[Any, str | None]:
    """A model with codes for matrices and `dtype` for everything else, and what to tell its user.

    named: the checkpoint's tensors. mode: "file" keeps those that come as codes and rounds the
    others to dtype, which the text names; "int8" quantises all matrices, a scale a row; "int4"
    the layers in groups of 32 columns, embedding and head as int8.

    Raises `ValueError`: a loop model; no codes in `named`; a width that int4 cannot group; and
    what `load_weights` raises.
    """
    refuse_loops(config, mode)
    model = _without_matrices(config, dtype)
    store = _Codes(model, dtype, mode)
    load_weights(model, named, store)
    return model, store.notice()


def refuse_loops(config: ModelConfig, mode: str) -> None:
    """Raises `ValueError` for a loop model."""
    if config.loop is not None:
        raise ValueError(
            f"quantize must be none for {config.architecture}, whose loop would apply an error "
            f"again and again, got {mode!r}"
        )


class _Codes:
    """A `WeightStore` that collects the parts of each matrix, then puts it into the model."""

    def __init__(self, model: LoadableModel, dtype: torch.dtype, mode: str) -> None:
        self._model = model
        self._dtype = dtype
        self._mode = mode
        self._waiting: dict[str, dict[int, Weight]] = {}
        self._dense: list[str] = []
        self._kept = 0

    def put(self, part: WeightPart, weight: Weight) -> None:
        target = self._model.get_parameter(part.parameter)
        if target.dim() != 2:
            assert isinstance(weight, Tensor)  # codes are matrices, and shapes were compared
            target[part.start : part.stop].copy_(weight)
            return
        parts = self._waiting.setdefault(part.parameter, {})
        parts[part.start] = self._codes(part.name, weight)
        if sum(held.shape[0] for held in parts.values()) == target.shape[0]:
            del self._waiting[part.parameter]
            self._set(part.parameter, [parts[start] for start in sorted(parts)])

    def holds(self, part: WeightPart, weight: Weight) -> bool:
        held: Any = _module(self._model, part.parameter).weight
        weight = self._codes(part.name, weight)
        if isinstance(held, QuantizedWeight) and isinstance(weight, QuantizedWeight):
            return torch.equal(held.codes, weight.codes) and torch.equal(held.scale, weight.scale)
        return isinstance(weight, Tensor) and torch.equal(held, weight.to(held))

    def _codes(self, name: str, weight: Weight) -> Weight:
        """What is kept of a matrix."""
        if isinstance(weight, QuantizedWeight):
            return weight
        if self._mode == "file":
            return weight.to(self._dtype, copy=True)
        width = weight.shape[1]
        if self._mode == "int8" or name in (self._model.embedding_name, HEAD):
            return quantize(weight, 8, width)
        if width % _BLOCK:
            raise ValueError(
                f"quantize=int4 needs widths that are a multiple of {_BLOCK}; {name} has {width}: "
                "use quantize=int8"
            )
        return quantize(weight, 4, _BLOCK)

    def _set(self, parameter: str, parts: list[Weight]) -> None:
        coded = [part for part in parts if isinstance(part, QuantizedWeight)]
        module = _module(self._model, parameter)
        if len(coded) == len(parts) and can_concatenate(coded):
            set_weight(module, concatenate(coded))
            self._kept += 1
            return
        matrix = torch.cat([dense(part, self._dtype) for part in parts])
        module.weight = nn.Parameter(matrix, requires_grad=False)
        self._dense.append(parameter.removesuffix(".weight"))

    def notice(self) -> str | None:
        if self._mode == "file" and not self._kept:
            raise ValueError(
                "quantize=file needs a checkpoint with matrices stored as Q4_0, Q4_1 or Q8_0, and "
                "this one has none: use quantize=int8 or int4"
            )
        if not self._dense:
            return None
        dtype = str(self._dtype).removeprefix("torch.")
        shown = ", ".join(self._dense[:3]) + (", …" if len(self._dense) > 3 else "")
        return (
            f"{len(self._dense)} of {self._kept + len(self._dense)} matrices are not stored as "
            f"Q4_0, Q4_1 or Q8_0 in all their parts and were dequantised to {dtype}: {shown}"
        )


def _without_matrices(config: ModelConfig, dtype: torch.dtype) -> Any:
    """A model whose vectors lie on the CPU, uninitialised, and whose matrices have no memory."""
    model = build_model(config, dtype, "meta")
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() != 2:
                own = nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=False)
                setattr(module, name, own)
    model.rotary = RotaryEmbedding(config.rope, config.head_dim, "cpu")
    return model


def _module(model: Any, parameter: str) -> nn.Module:
    module: nn.Module = model.get_submodule(parameter.rpartition(".")[0])
    return module


def save_codes(file: Path, named: NamedWeights) -> int:
    """Write the weights among `named` that are codes; returns how many. For none, no file.

    Each is three tensors, NAME.codes, NAME.scale and (4 bits) NAME.zero, as `QuantizedWeight`
    describes them.
    """
    tensors = {
        f"{name}.{part}": tensor.contiguous()
        for name, weight in named
        if isinstance(weight, QuantizedWeight)
        for part, tensor in weight.named_buffers()
    }
    if tensors:
        file.parent.mkdir(exist_ok=True)
        save_file(tensors, file, metadata={"format": "pt"})
        file.chmod(0o644)  # save_file keeps it to its owner
    return len({name.rpartition(".")[0] for name in tensors})


def read_codes(file: Path) -> Iterator[tuple[str, QuantizedWeight]]:
    """The weights that `save_codes` wrote, one at a time. Raises `ValueError` for a torn file."""
    try:
        with safe_open(file, framework="pt", device="cpu") as stored:
            names = set(stored.keys())
        weights = sorted(n.removesuffix(".codes") for n in names if n.endswith(".codes"))
        order = [f"{w}.{part}" for w in weights for part in _PARTS if f"{w}.{part}" in names]
        parts: dict[str, Tensor] = {}
        for name, tensor in mapped_tensors(file, order):
            weight, _, part = name.rpartition(".")
            # Copies: nothing may depend on a file that a later pull replaces.
            parts[part] = tensor.clone()
            if len(parts) == sum(f"{weight}.{each}" in names for each in _PARTS):
                yield weight, QuantizedWeight(parts["codes"], parts["scale"], parts.get("zero"))
                parts = {}
    except SafetensorError as error:
        raise ValueError(f"{file} is torn or incomplete ({error}): run `minifer pull`") from error
