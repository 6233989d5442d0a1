"""Counter-based noise: the randomness of a draw is a function of who draws, and when.

A generator with a state gives numbers that depend on who asked before. Philox has no state: it
scrambles a counter with a key, so (seed, output index, token id) always gives the same number,
whatever else is in the batch, in whatever order, on whatever device.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
# What a number is for: the third word of the counter, so that none is used for two things.
DRAW, ACCEPT, REPLACE = 0, 1, 2
Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[Tensor, Tensor], rounds: int = 10) -> Words:
    """Philox-4x32: four 32-bit words of counter and two of key → four random words.

    All tensors are int64 in [0, 2**32), have the same number of dimensions and broadcast against
    each other. (torch's 32-bit unsigned integers have no arithmetic; an int64 product wraps, and
    keeps all 64 bits.)
    """
    # c0 and c2, c1 and c3 are treated alike: two rows of one tensor, half the calls.
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    multiplied, kept = torch.stack((c0, c2)), torch.stack((c1, c3))
    ones = [1] * c0.dim()
    factors = torch.tensor([0xD2511F53, 0xCD9E8D57], device=c0.device).view(2, *ones)
    steps = torch.tensor([0x9E3779B9, 0xBB67AE85], device=c0.device).view(2, *ones)
    turns = torch.arange(rounds, device=c0.device).view(-1, 1, *ones)
    for k in (torch.stack(torch.broadcast_tensors(*key)) + turns * steps) & WORD:
        product = (multiplied * factors).flip(0)
        multiplied, kept = ((product >> 32) & WORD) ^ kept ^ k, product & WORD
    return multiplied[0], kept[0], multiplied[1], kept[1]


def token_noise(seeds: Sequence[int], output_indices: Sequence[int], token_ids: Tensor) -> Tensor:
    """Exponential noise, float32 [M, n], of the tokens token_ids [M, n] in M draws.

    Draw m has its own seed (64 bits; a negative one counts as its two's complement) and output
    index. Token t takes word t mod 4 of the counter (t // 4, output index, 0, 0).
    """
    words = _words(seeds, output_indices, token_ids // 4)
    return exponential(words.gather(-1, (token_ids % 4)[..., None])[..., 0])


def vocabulary_noise(
    seeds: Sequence[int],
    output_indices: Sequence[int],
    vocab_size: int,
    device: torch.device | str = "cpu",
    purpose: int = DRAW,
) -> Tensor:
    """`token_noise` of every token of the vocabulary, float32 [M, V], at a quarter of the work."""
    blocks = torch.arange((vocab_size + 3) // 4, device=device)[None]
    words = _words(seeds, output_indices, blocks, purpose)
    return exponential(words.flatten(1)[:, :vocab_size])


def chance(
    seeds: Sequence[int], output_indices: Sequence[int], device: torch.device | str = "cpu"
) -> Tensor:
    """One uniform number in (0, 1) a draw, float32 [M]: is its draft accepted?"""
    blocks = torch.zeros(1, 1, dtype=torch.int64, device=device)
    return uniform(_words(seeds, output_indices, blocks, ACCEPT)[:, 0, 0])


def _words(
    seeds: Sequence[int], output_indices: Sequence[int], blocks: Tensor, purpose: int = DRAW
) -> Tensor:
    """The four random words, int64 [M, n, 4], of each counter block [M or 1, n]."""
    columns = [
        (seed & WORD, seed >> 32 & WORD, index)
        for seed, index in zip(seeds, output_indices, strict=True)
    ]
    low, high, index = torch.tensor(columns, device=blocks.device).T[..., None]
    zero = torch.zeros_like(low)
    return torch.stack(philox((blocks, index, zero + purpose, zero), (low, high)), dim=-1)


def exponential(words: Tensor) -> Tensor:
    """Random 32-bit words → Exp(1) in float32, never 0 and never infinite.

    The race is won by small values, so they get the fine end of the float: the smallest is
    2**-33. A float32 cannot tell the largest words from 2**32; they are held below it.
    """
    return -torch.log1p(-uniform(words))


def uniform(words: Tensor) -> Tensor:
    """Random 32-bit words → numbers in (0, 1), float32."""
    return ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
