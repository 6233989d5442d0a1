"""The laboratory's text: the help topics of the running Python, as characters."""

from __future__ import annotations

import collections
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from minifer.text.help_topics import topics


@dataclass(frozen=True)
class Corpus:
    """train, validation: int64 ids 0 … num_symbols − 1. symbols: the character of each id."""

    train: Tensor
    validation: Tensor
    symbols: str

    @property
    def num_symbols(self) -> int:
        return len(self.symbols)


@functools.cache
def help_topics(num_symbols: int = 95) -> Corpus:
    """The topics in alphabetical order, of their `num_symbols` most frequent characters.

    The rarer ones are dropped. The last tenth is for validation.

    Raises `ValueError` for less than 2 symbols.
    """
    if num_symbols < 2:
        raise ValueError(f"num_symbols must be at least 2, got {num_symbols!r}")
    text = "\n".join(body for _, body in sorted(topics().items()))
    frequent = sorted(collections.Counter(text).items(), key=lambda item: (-item[1], item[0]))
    symbols = "".join(sorted(character for character, _ in frequent[:num_symbols]))
    index = {character: i for i, character in enumerate(symbols)}
    ids = torch.tensor([index[character] for character in text if character in index])
    cut = len(ids) - len(ids) // 10
    return Corpus(ids[:cut], ids[cut:], symbols)


def sample_rows(ids: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """int64 [rows, length + 1]: pieces of ids [N] that begin anywhere, drawn with replacement.

    Raises `ValueError` when rows or length are below 1, or a piece is longer than the text.
    """
    if rows < 1 or not 1 <= length < len(ids):
        raise ValueError(
            f"rows must be at least 1 and length 1 to {len(ids) - 1} (the text has {len(ids)} "
            f"tokens), got rows={rows!r} and length={length!r}"
        )
    starts = torch.randint(len(ids) - length, (rows, 1), generator=generator)
    return ids[starts + torch.arange(length + 1)]
