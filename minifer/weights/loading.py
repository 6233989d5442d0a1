"""Fill a model from named tensors, whatever file they came from.

Memory from `torch.empty` looks like weights and is garbage, so nothing is taken on trust: every
part of every parameter must be set exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from minifer.config import ModelConfig
from minifer.models.registry import build_model
from minifer.models.transformer import WeightPart
from minifer.weights.quantized import Weight, dense

HEAD = "lm_head.weight"  # in every format
NamedWeights = Iterable[tuple[str, Weight]]
# A configuration, dtype, device and the tensors of a checkpoint → a model that holds them.
Fill = Callable[[ModelConfig, torch.dtype, "torch.device | str", NamedWeights], Any]


class LoadableModel(Protocol):
    """What a model offers to be filled and saved: its parameters and their names in a file.

    embedding_name: the tensor of a file that the head of a tied model repeats.
    """

    embedding_name: str

    def get_parameter(self, target: str) -> nn.Parameter: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def weight_parts(self) -> Iterator[WeightPart]: ...


class WeightStore(Protocol):
    """Where the tensors of a file go."""

    def put(self, part: WeightPart, weight: Weight) -> None:
        """Keep the weight of a part; called once a part."""
        ...

    def holds(self, part: WeightPart, weight: Weight) -> bool:
        """Whether the part that was put is this weight."""
        ...


class Copies:
    """Copies into the parameters of a model, converting to its dtype and device."""

    def __init__(self, model: LoadableModel) -> None:
        self._model = model

    def _target(self, part: WeightPart) -> Tensor:
        return self._model.get_parameter(part.parameter)[part.start : part.stop]

    def put(self, part: WeightPart, weight: Weight) -> None:
        self._target(part).copy_(dense(weight))

    def holds(self, part: WeightPart, weight: Weight) -> bool:
        target = self._target(part)
        return torch.equal(dense(weight).to(target), target)


@torch.no_grad()
def load_weights(
    model: LoadableModel, named_tensors: NamedWeights, store: WeightStore | None = None
) -> None:
    """Copy tensors with Hugging Face names into the model, converting to its dtype and device.

    One tensor is held at a time (of a tied model the head too). Old files' `rotary_emb.inv_freq`
    is computed here and skipped. A tied model may come with an `lm_head.weight`, as long as it
    equals the embedding. store: takes the tensors in place of `Copies(model)`.

    Raises `ValueError`: a tensor of the wrong shape or not of floating point; tensors missing,
    unknown or given twice, all of them in one message. The model is then not usable.
    """
    store = store or Copies(model)
    parts = {part.name: part for part in model.weight_parts()}
    shapes = {name: _shape(model, part) for name, part in parts.items()}
    seen: set[str] = set()
    twice: list[str] = []
    unknown: list[str] = []
    head: Weight | None = None  # of a tied model
    for name, tensor in named_tensors:
        if name.endswith("rotary_emb.inv_freq"):
            continue
        if name in seen:
            twice.append(name)
        elif name in parts:
            _check(name, tensor, shapes[name])
            store.put(parts[name], tensor)
            seen.add(name)
        elif name == HEAD:
            head = tensor
            seen.add(name)
        else:
            unknown.append(name)
    missing = [name for name in parts if name not in seen]
    if missing or unknown or twice:
        groups = (("missing", missing), ("unknown", unknown), ("given twice", twice))
        listing = "; ".join(f"{label}: {_listed(names)}" for label, names in groups if names)
        raise ValueError(
            f"the weights do not fit the model ({len(parts)} tensors expected). {listing}. "
            "Check that the file is complete and belongs to this configuration"
        )
    if head is not None:
        _check(HEAD, head, shapes[model.embedding_name])
        if not store.holds(parts[model.embedding_name], head):
            raise ValueError(
                f"{HEAD} differs from {model.embedding_name} although config.json ties the two; "
                "a Llama or Qwen uses both with tie_word_embeddings set to false there"
            )


def fill_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str, named: NamedWeights
) -> Any:
    """A new model with all of its weights. Raises `ValueError` as `load_weights` does."""
    model = build_model(config, dtype, device)
    load_weights(model, named)
    return model


def _shape(model: LoadableModel, part: WeightPart) -> torch.Size:
    """Of a part's tensor in a file."""
    return torch.Size((part.stop - part.start, *model.get_parameter(part.parameter).shape[1:]))


def _check(name: str, tensor: Weight, shape: torch.Size) -> None:
    if tensor.shape != shape:
        raise ValueError(
            f"{name} must have the shape {list(shape)}, got {list(tensor.shape)}; "
            "the weights belong to another configuration"
        )
    if isinstance(tensor, Tensor) and not tensor.is_floating_point():
        raise ValueError(
            f"{name} must hold floating-point numbers, got {tensor.dtype}; quantised weights of "
            "this kind are not supported, use the unquantised checkpoint or a GGUF file"
        )


def _listed(names: list[str], limit: int = 20) -> str:
    """The first names; a whole missing shard is hundreds of them."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
