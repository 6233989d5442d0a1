"""Requests and draws for the sampler's tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from minifer.execution.sampler import Sampled, Sampler, SampleRow
from minifer.outputs import RequestGroup
from minifer.request import Request, SamplingParams


def make_request(
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    eos_token_ids: Sequence[int] = (),
    bad_word_ids: Sequence[tuple[int, ...]] = (),
    **params: Any,
) -> Request:
    """A request that has already generated `output`."""
    return Request(
        "r",
        list(prompt),
        SamplingParams(**params),
        RequestGroup("r", None),
        eos_token_ids=frozenset(eos_token_ids),
        bad_word_ids=tuple(bad_word_ids),
        token_ids=[*prompt, *output],
    )


def draw(logits: Any, *requests: Request, seeds: Sequence[int] | None = None) -> list[Sampled]:
    """Row i of logits [R, V] for request i; one row of logits serves all."""
    table = torch.as_tensor(logits, dtype=torch.float32).view(-1, torch.as_tensor(logits).shape[-1])
    seeds = seeds or [0] * len(requests)
    rows = [
        SampleRow(i if len(table) > 1 else 0, request, seed)
        for i, (request, seed) in enumerate(zip(requests, seeds, strict=True))
    ]
    return Sampler()(table, rows)


def drawn(logits: Any, draws: int = 200, **params: Any) -> list[int]:
    """Tokens of `draws` seeds from one row of logits [V]."""
    request = make_request(**params)
    return [s.token_id for s in draw(logits, *[request] * draws, seeds=range(draws))]


def log(probabilities: Sequence[float]) -> torch.Tensor:
    """Logits of the given probabilities."""
    return torch.tensor(probabilities, dtype=torch.float64).log().float()


def chi_square(counts: Sequence[float], expected: Sequence[float]) -> float:
    """Pearson's statistic."""
    return sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))


def chi_square_limit(degrees: int) -> float:
    """A value that a true hypothesis exceeds once in a million (Wilson and Hilferty, 1931)."""
    a = 2 / (9 * degrees)
    return degrees * (1 - a + 4.7534 * a**0.5) ** 3
