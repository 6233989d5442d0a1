"""Requests whose context lies scattered over a poisoned KV cache."""

from __future__ import annotations

import torch

from minifer.execution.forward_batch import ForwardBatch
from minifer.execution.kv_storage import KVStorage, write_kv

C = 8


def scattered(lengths, new, *, block_size, heads, kv_heads, seed=0, dtype=torch.float64):
    """Random requests on shuffled blocks; whatever is not written holds NaN.

    lengths: contexts after the step; new: how many of their last tokens are this step's.
    """
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // block_size) for length in lengths]
    free = torch.randperm(sum(needed) + 3, generator=generator).tolist()
    kv = KVStorage(1, len(free), block_size, kv_heads, C, dtype, debug=True)
    keys, values, tables, slots, positions, start = [], [], [], [], [], [0]
    for length, blocks, count in zip(lengths, needed, new, strict=True):
        table, free = free[:blocks], free[blocks:]
        k, v = torch.randn(2, length, kv_heads, C, generator=generator, dtype=torch.float64)
        all_slots = torch.tensor([table[p // block_size] * block_size + p % block_size
                                  for p in range(length)])  # fmt: skip
        write_kv(kv.keys[0], all_slots, k)
        write_kv(kv.values[0], all_slots, v)
        keys.append(k)
        values.append(v)
        tables.append(table)
        slots += all_slots.tolist()[length - count :]
        positions += range(length - count, length)
        start.append(start[-1] + count)
    query = torch.randn(start[-1], heads, C, generator=generator, dtype=torch.float64)
    batch = ForwardBatch.build(
        [0] * start[-1], positions, slots, start, lengths, tables, [], block_size
    )
    return query.to(dtype), kv, batch, keys, values
