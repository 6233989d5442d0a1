"""The matrices of a model as the megakernel takes them: where they are, by address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minifer.kernels.checks import check_same, check_tensor
from minifer.kernels.mega.isa import DecodeShape


@dataclass(frozen=True)
class Weights:
    """A model's matrices and norms, contiguous, of one dtype; `layers` holds, of each layer, the
    attention norm [D], W_qkv [(H + 2 K) · C, D], W_o [D, H · C], the MLP norm [D], W_gate_up
    [2 F, D] and W_down [D, F]. embedding and head [V, D] may be the same tensor; norm [D]."""

    layers: Sequence[tuple[Tensor, ...]]
    embedding: Tensor
    norm: Tensor
    head: Tensor

    def check(self, shape: DecodeShape) -> None:
        """Raises `ValueError` for a tensor that does not fit the shape."""
        D, F, wide = shape.hidden, shape.intermediate, shape.heads * shape.head_dim
        layer = {
            "attention norm": (D,),
            "qkv": (shape.qkv_rows, D),
            "output": (D, wide),
            "MLP norm": (D,),
            "gate_up": (2 * F, D),
            "down": (D, F),
        }
        if len(self.layers) != shape.layers:
            raise ValueError(f"weights must have {shape.layers} layers, got {len(self.layers)}")
        named = {"embedding": (self.embedding, (shape.vocab, D)), "norm": (self.norm, (D,))}
        named["head"] = (self.head, (shape.vocab, D))
        for i, tensors in enumerate(self.layers):
            for (name, size), tensor in zip(layer.items(), tensors, strict=True):
                named[f"{name} of layer {i}"] = (tensor, size)
        for name, (tensor, size) in named.items():
            check_tensor(name, tensor, size, like=self.embedding)
            check_alignment(name, tensor)
        check_same("dtype", {name: tensor.dtype for name, (tensor, _) in named.items()})

    def addresses(self) -> Tensor:
        """int64 [6 L + 3], on the device of the weights."""
        rest = (self.embedding, self.norm, self.head)
        tensors = [tensor for layer in self.layers for tensor in layer] + list(rest)
        return pointers(tensors)


def pointers(tensors: Sequence[Tensor]) -> Tensor:
    """Their addresses, int64, on their device."""
    return torch.tensor(
        [t.data_ptr() for t in tensors], dtype=torch.int64, device=tensors[0].device
    )


def check_alignment(name: str, tensor: Tensor) -> None:
    """Raises `ValueError` unless the tensor starts at a multiple of 16 bytes: the kernel loads 16
    bytes at a time."""
    if tensor.data_ptr() % 16:
        raise ValueError(
            f"{name} must start at a multiple of 16 bytes, got address {tensor.data_ptr():#x}: "
            "copy it with .clone()"
        )
