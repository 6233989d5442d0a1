"""Fill one rank's part of a model. Each rank reads the files itself, and keeps its slices only.

Safetensors files are mapped: of a tensor that is split by rows, the other ranks' rows are never
read. Of columns, and of a GGUF file's blocks, one whole tensor at a time is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minifer.config import ModelConfig
from minifer.execution.parallel.group import Group
from minifer.execution.parallel.layers import ParallelTransformer
from minifer.execution.parallel.shard import Shard, check_size
from minifer.models.registry import model_class
from minifer.models.transformer import Transformer, WeightPart
from minifer.weights.loading import Copies, NamedWeights, load_weights
from minifer.weights.quantized import Weight, dense
from minifer.weights.resolve import LoadedModel, load_model


def load_rank(name: str, dtype: str, device: str, shard: Shard) -> LoadedModel:
    """`load_model` of one rank's part. `config` of the result is the whole model's.

    Its group is not connected yet. Raises `ValueError` as `load_model` does, and for a model that
    cannot be cut for so many ranks, before its weights are read.
    """

    def fill(
        config: ModelConfig, dtype: torch.dtype, device: torch.device | str, named: NamedWeights
    ) -> ParallelTransformer:
        return fill_rank(config, Group(shard.rank, shard.size), dtype, device, named)

    loaded = load_model(name, dtype, device, fill=fill)
    loaded.model.source = loaded.path
    return loaded


def fill_rank(
    config: ModelConfig,
    group: Group,
    dtype: torch.dtype,
    device: torch.device | str,
    named: NamedWeights,
) -> ParallelTransformer:
    """A rank's part of a model, from all tensors of its checkpoint.

    config: of the whole model. Raises `ValueError` as `check_size` and `load_weights` do.
    """
    check_size(config, group.size)
    if (kind := model_class(config.architecture)) is not Transformer:
        raise ValueError(
            f"tensor_parallel_size must be 1 for {config.architecture}, which runs as "
            f"{kind.__name__}, got {group.size}"
        )
    part = ParallelTransformer(config, group, dtype, device)
    whole = Transformer(config, dtype, "meta")  # shapes without memory: what the file must hold
    load_weights(whole, named, _Slices(part, config))
    return part


class _Slices:
    """A `WeightStore` that keeps a rank's part of each tensor."""

    def __init__(self, part: ParallelTransformer, config: ModelConfig) -> None:
        self._shard = Shard(part.group.rank, part.group.size)
        self._config = config
        self._copies = Copies(part)
        self._places = {place.name: place for place in part.weight_parts()}

    def put(self, part: WeightPart, weight: Weight) -> None:
        self._copies.put(self._places[part.name], self._slice(part.name, weight))

    def holds(self, part: WeightPart, weight: Weight) -> bool:
        return self._copies.holds(self._places[part.name], self._slice(part.name, weight))

    def _slice(self, name: str, weight: Weight) -> Tensor:
        return self._shard.part(self._config, name, dense(weight))


def places(device: str, size: int) -> list[str]:
    """The device of each rank.

    "cpu": all on it. "auto" and "cuda" give each rank a GPU of its own; "auto" without a GPU is
    "cpu". "cuda:1", one GPU by its number, takes all of them, to try things out. Raises
    `ValueError` when there are fewer GPUs than ranks.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if count else "cpu"
    if device != "cuda":
        return [device] * size
    if 0 < count < size:
        raise ValueError(
            f"tensor_parallel_size must be at most {count}, the number of GPUs here, got {size}: "
            'device="cuda:0" puts all ranks on one GPU and device="cpu" on the CPU, to try it'
        )
    return [f"cuda:{rank}" for rank in range(size)]


def own_gpus(devices: list[str]) -> bool:
    """Has each of several ranks a GPU of its own?"""
    on_gpus = all(device.startswith("cuda") for device in devices)
    return on_gpus and len(set(devices)) == len(devices) > 1
