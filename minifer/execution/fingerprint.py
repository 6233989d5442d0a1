"""What makes one model's KV useless to another: the namespace of its blocks on disk."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from minifer.config import ModelConfig
from minifer.weights.quantized import quantized_weights

_SAMPLE = 256  # elements of each tensor that are hashed as they are
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def weights_digest(model: nn.Module) -> str:
    """SHA-256 over all weights, in one pass at the speed of memory.

    Of each tensor it covers name, shape, dtype, a sample of elements and the sum of all bit
    patterns as integers: unlike a sum of floats it is exact, the same in whatever order it is
    added, and changes when any one element does.
    """
    digest = hashlib.sha256()
    codes = [
        (f"{name}.{part}", tensor)
        for name, weight in quantized_weights(model)
        for part, tensor in weight.named_buffers()
    ]
    for name, tensor in (*model.named_parameters(), *codes):
        bits = tensor.detach().contiguous().view(_BITS[tensor.element_size()]).flatten()
        sample = bits[:: max(1, bits.numel() // _SAMPLE)]
        total = int(bits.sum(dtype=torch.int64))
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype} {total}\n".encode())
        digest.update(sample.cpu().numpy().tobytes())
    return digest.hexdigest()


def kv_namespace(model: nn.Module, config: ModelConfig) -> tuple[tuple[str, str], ...]:
    """Everything KV depends on but the tokens, what tags them, and the shape of a block.

    The configuration holds positions (RoPE), windows and norms. A tokenizer is no part of it:
    blocks are named by token ids.
    """
    return (("config", repr(config)), ("weights", weights_digest(model)))
