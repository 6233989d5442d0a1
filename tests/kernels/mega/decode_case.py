"""A decode step of a tiny random model: what a machine is given, and what the model makes of it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from fakes import tiny_config, tiny_model
from torch import Tensor

from minifer.execution.backend import TorchBackend
from minifer.execution.forward_batch import ForwardBatch
from minifer.execution.kv_storage import KVStorage
from minifer.kernels.mega.isa import DecodeShape
from minifer.kernels.mega.reference_vm import Inputs
from minifer.kernels.mega.shapes import decode_shape

P = 4  # positions of a block


class ExactBackend(TorchBackend):
    """Norms and rotations in the dtype they are given, where the engine's are float32."""

    def rms_norm(self, x, weight, eps):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    def rope(self, x, cos, sin):
        a, b = x.chunk(2, dim=-1)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@dataclass(frozen=True)
class Case:
    """logits [B, V], rows of empty seats NaN; keys, values: the caches after the step."""

    shape: DecodeShape
    inputs: Inputs
    logits: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def decode_case(
    contexts: Sequence[int] = (1, 7),
    splits: int = 1,
    dtype: torch.dtype = torch.float64,
    tile: int = 8,
    **config: object,
) -> Case:
    """contexts: tokens of each request, the new one included; 0 is an empty seat.

    Blocks lie anywhere in the pool, and what no request has written is NaN.
    """
    settings = tiny_config(**config)
    model = copy.deepcopy(tiny_model(settings)).to(dtype)
    backend = ExactBackend()
    draw = torch.Generator().manual_seed(len(contexts))
    pool = torch.randperm(40, generator=draw).tolist()
    kv = KVStorage(
        settings.num_layers, 40, P, settings.num_kv_heads, settings.head_dim, dtype, debug=True
    )
    tables = [[pool.pop() for _ in range(-(-length // P))] for length in contexts]
    tokens = [
        torch.randint(0, settings.vocab_size, (length,), generator=draw).tolist()
        for length in contexts
    ]

    def forward(rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> Tensor:
        """Logits of the last of the tokens starts[i] … ends[i] of each request in rows."""
        spans = [range(starts[i], ends[i]) for i in range(len(rows))]
        query_start = [0]
        for span in spans:
            query_start.append(query_start[-1] + len(span))
        places = [(row, p) for row, span in zip(rows, spans, strict=True) for p in span]
        batch = ForwardBatch.build(
            [tokens[row][p] for row, p in places],
            [p for _, p in places],
            [tables[row][p // P] * P + p % P for row, p in places],
            query_start,
            ends,
            [tables[row] for row in rows],
            [end - 1 for end in query_start[1:]],
            P,
        )
        with torch.no_grad():
            weight = model.embed_tokens.weight if model.lm_head is None else model.lm_head.weight
            return backend.linear(model(batch, kv, backend)[batch.logits_rows], weight, None)

    for row, length in enumerate(contexts):
        if length > 1:
            forward([row], [0], [length - 1])
    keys, values = ([tensor.clone() for tensor in tensors] for tensors in (kv.keys, kv.values))
    active = [row for row, length in enumerate(contexts) if length]
    ends = [contexts[row] for row in active]
    logits = torch.full((len(contexts), settings.vocab_size), torch.nan, dtype=dtype)
    logits[active] = forward(active, [end - 1 for end in ends], ends)
    positions = torch.tensor([length - 1 for length in contexts])
    width = max(map(len, tables))
    cos, sin = model.rotary(positions)
    inputs = Inputs(
        weights=model.state_dict(),
        eps=settings.rms_norm_eps,
        tokens=torch.tensor([row[-1] if row else 0 for row in tokens]),
        positions=positions,
        keys=keys,
        values=values,
        block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables]),
        cos=cos,
        sin=sin,
    )
    shape = decode_shape(settings, len(contexts), splits, tile)
    return Case(shape, inputs, logits, kv.keys, kv.values)
