"""The tensors behind the block tables.

One pair of tensors a KV slot (layer × iteration), never views into one big tensor: a compiled
step that writes into a view copies all of what the view looks at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from minifer.debug import DebugError
from minifer.kv.tiers.dram import StoredBlock

PAYLOAD_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class KVStorage:
    """Keys and values of all blocks: `keys[slot]`, `values[slot]` of shape [N, P, K, C].

    The memory is not initialised. Nothing may depend on what an unwritten position holds, NaN
    included: attention zeroes what it masks. debug: fill it with NaN, so that whoever depends on
    it is found out, and lay one more block of NaN on either side of each tensor.
    """

    def __init__(
        self,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        debug: bool = False,
    ) -> None:
        band = 1 if debug else 0
        shape = (num_blocks + 2 * band, block_size, num_kv_heads, head_dim)
        whole = [torch.empty(shape, dtype=dtype, device=device) for _ in range(2 * num_slots)]
        if debug:
            for tensor in whole:
                tensor.fill_(math.nan)
            whole = [tensor[band:-band] for tensor in whole]
        self.keys, self.values = whole[:num_slots], whole[num_slots:]
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._guarded = debug

    @property
    def payload_dtype(self) -> str:
        """Of `read_block`'s elements, by safetensors' name."""
        return PAYLOAD_DTYPES[self.keys[0].dtype]

    @property
    def payload_shape(self) -> tuple[int, ...]:
        """[2 · slots, P, K, C]: the keys of all slots, then the values."""
        return (2 * len(self.keys), *self.keys[0].shape[1:])

    def read_block(self, block_id: int) -> memoryview | None:
        """A copy of one block as bytes; None when it holds NaN or infinity."""
        block = torch.stack([tensor[block_id] for tensor in (*self.keys, *self.values)])
        if not bool(torch.isfinite(block).all()):
            return None
        return block.cpu().view(torch.uint8).flatten().numpy().data

    def write_blocks(self, loads: Sequence[tuple[int, StoredBlock]]) -> None:
        """Fill whole blocks with what `read_block` returned: (block, its payload)."""
        if not loads:
            return
        dtype, device = self.keys[0].dtype, self.keys[0].device
        contents = [torch.frombuffer(stored.payload, dtype=dtype) for _, stored in loads]
        by_slot = torch.stack([c.view(self.payload_shape) for c in contents], dim=1).to(device)
        ids = torch.tensor([block_id for block_id, _ in loads], device=device)
        for tensor, blocks in zip((*self.keys, *self.values), by_slot, strict=True):
            tensor[ids] = blocks

    @staticmethod
    def bytes_per_block(
        num_slots: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """2 (K and V) · slots · P · K · C · bytes an element."""
        return 2 * num_slots * block_size * num_kv_heads * head_dim * dtype.itemsize

    def poison(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with NaN: what they held is nobody's any more."""
        if block_ids:
            for tensor in (*self.keys, *self.values):
                tensor[list(block_ids)] = math.nan

    def check_guard_bands(self) -> None:
        """Raise `DebugError` when something was written beside the pool. Debug mode only."""
        for slot, tensor in enumerate((*self.keys, *self.values)):
            size = tensor[0].numel()
            whole = tensor.as_strided((tensor.numel() + 2 * size,), (1,), 0)
            for side, band in (("before", whole[:size]), ("after", whole[-size:])):
                if self._guarded and not bool(band.isnan().all()):
                    kind = "values" if slot >= len(self.keys) else "keys"
                    raise DebugError(
                        f"something wrote {side} the {kind} of KV slot {slot % len(self.keys)}"
                    )

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination): the copy of copy-on-write."""
        pairs = list(copies)
        if not pairs:
            return
        source = torch.tensor([s for s, _ in pairs], device=self.keys[0].device)
        target = torch.tensor([d for _, d in pairs], device=self.keys[0].device)
        for tensor in (*self.keys, *self.values):
            tensor[target] = tensor[source]


def write_kv(cache: Tensor, slot_mapping: Tensor, new: Tensor) -> None:
    """Write `new` [T, K, C] into `cache` [N, P, K, C] at flat slots [T]; slots below 0 are skipped.

    A negative index must not reach the tensor: in Python it would name the last block.
    """
    flat = cache.view(-1, *cache.shape[2:])
    written = slot_mapping >= 0
    if bool(written.all()):
        flat[slot_mapping] = new.to(cache.dtype)
    else:
        flat[slot_mapping[written]] = new[written].to(cache.dtype)
