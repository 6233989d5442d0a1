"""Prefix keys of blocks that have names instead of tokens.

The KV manager compares `PrefixKey`s and looks them up by digest; that there are tokens behind them
it never asks. Here a key's "tokens" are names, its digest is a number, and equal prefixes get one
object, so that comparing two chains is one look::

    names of 512 tokens      | 7       | 9       |          blocks of 1024 | (7, 9)            |
    blocks of 256            |(7,0)(7,1)|(9,0)(9,1)| …

Blocks that no name covers (the tail of a prompt, an answer) are private: nobody else has them.
"""

from __future__ import annotations

from collections.abc import Sequence

from minifer.kv.prefix_key import PrefixKey
from minifer.simulation.workloads.arrivals import BLOCK


def check_block_size(block_size: int, name_tokens: int) -> None:
    """Raise `ValueError` unless blocks and names divide each other."""
    if block_size % name_tokens and name_tokens % block_size:
        raise ValueError(
            f"block_size must divide {name_tokens}, the tokens of a block's name, or be a multiple "
            f"of it; got {block_size}"
        )


class KeyTree:
    """All prefixes of a workload, each once. name_tokens: tokens that a name stands for."""

    def __init__(self, name_tokens: int = BLOCK) -> None:
        if name_tokens < 1:
            raise ValueError(f"name_tokens must be at least 1, got {name_tokens}")
        self.name_tokens = name_tokens
        self._children: dict[tuple[bytes, tuple[int, ...]], PrefixKey] = {}
        self._count = 0

    def keys(self, block_size: int, names: Sequence[int], num_tokens: int) -> list[PrefixKey]:
        """Keys of the full blocks among `num_tokens` tokens that begin with `names`."""
        blocks = num_tokens // block_size
        keys: list[PrefixKey] = []
        parent: PrefixKey | None = None
        for tokens in self._shared(block_size, names, blocks):
            parent = self._child(block_size, parent, tokens)
            keys.append(parent)
        while len(keys) < blocks:
            self._count += 1
            parent = PrefixKey(parent, (-self._count,), (), self._digest())
            keys.append(parent)
        return keys

    def _shared(
        self, block_size: int, names: Sequence[int], blocks: int
    ) -> Sequence[tuple[int, ...]]:
        """What the leading blocks that names cover in full hold."""
        if block_size >= self.name_tokens:
            n = block_size // self.name_tokens
            covered = min(blocks, len(names) // n)
            return [tuple(names[i * n : (i + 1) * n]) for i in range(covered)]
        n = self.name_tokens // block_size
        return [(names[i // n], i % n) for i in range(min(blocks, len(names) * n))]

    def _child(
        self, block_size: int, parent: PrefixKey | None, tokens: tuple[int, ...]
    ) -> PrefixKey:
        # The first block's size is part of its place: nodes of two sizes share no key.
        place = block_size.to_bytes(4, "little") if parent is None else parent.digest
        key = self._children.get((place, tokens))
        if key is None:
            self._count += 1
            key = self._children[place, tokens] = PrefixKey(parent, tokens, (), self._digest())
        return key

    def _digest(self) -> bytes:
        return self._count.to_bytes(8, "little")
