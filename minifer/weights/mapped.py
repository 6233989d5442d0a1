"""Tensors of a safetensors file, mapped, without holding the file's size in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

MAPPED_BYTES = 64 * 2**20  # that are read before the file is mapped anew


def mapped_tensors(
    file: Path, names: Sequence[str], limit: int = MAPPED_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of a file, in this order, each a view of the mapped file.

    Memory that was read through a mapping counts as this process's until the mapping is gone: who
    copies a file tensor by tensor would hold it twice. So the file is mapped anew once `limit`
    bytes were read, and what nobody refers to any more is let go. Raises `SafetensorError`.
    """
    done = 0
    while done < len(names):
        read = 0
        with safe_open(file, framework="pt", device="cpu") as shard:
            while done < len(names) and read < limit:
                name = names[done]
                tensor = shard.get_tensor(name)
                done, read = done + 1, read + tensor.nbytes
                yield name, tensor
