"""Pieces of prompts: many rows of one request in a step, against float64 and against one by one."""

from __future__ import annotations

import math

import pytest
import torch
from cpu_steps import num_threads
from test_cpu_attention import KINDS, Scene, by_kind, exact
from torch import Tensor

from minifer.kernels.cpu.step import Rows


class Prompt:
    """One request of a scene: `count` rows after `start` tokens whose KV is there. Other requests
    decode before and after it."""

    def __init__(self, kind: str, start: int, count: int, window: int | None, block_size=7) -> None:
        total = start + count
        self.scene = Scene(kind, lengths=[3, total, 90], block_size=block_size, window=window)
        self.start, self.count = start, count
        draw = torch.Generator().manual_seed(9)
        self.x = torch.randn(count, self.scene.x.shape[1], generator=draw)
        self.slots = self.scene.slots[1]
        for cache in (self.scene.keys, self.scene.values):
            cache.flatten(0, 1)[self.slots[start:]] = math.nan  # not computed yet

    def rows(self, first: int = 0, count: int | None = None, alone: bool = False) -> Rows:
        """Rows first … first + count − 1 of the piece, between the decodes of two others."""
        count = self.count - first if count is None else count
        scene, table = self.scene, self.scene.tables[1].tolist()
        span = range(self.start + first, self.start + first + count)
        mine = Rows(
            self.x[first : first + count],
            list(span),
            self.slots[span.start : span.stop].tolist(),
            [table] * count,
            range(count),
        )
        if alone:
            return mine
        before, after = scene.rows([0]), scene.rows([2])
        return Rows(
            torch.cat((before.tokens, mine.tokens, after.tokens)),
            [*before.positions, *mine.positions, *after.positions],
            [*before.slots, *mine.slots, *after.slots],
            [*before.tables, *mine.tables, *after.tables],
            range(count + 2),
        )

    def truth(self) -> Tensor:
        """Logits [count, V] row by row, each after the exact keys and values of those before."""
        scene = self.scene
        kept = self.slots[: self.start]
        keys, values = (cache.flatten(0, 1)[kept].double() for cache in (scene.keys, scene.values))
        logits = []
        for i in range(self.count):
            found = exact(scene.layer, self.x[i], self.start + i, keys, values, scene.window)
            logits.append(found[0])
            keys = torch.cat((keys, found[1][None]))
            values = torch.cat((values, found[2][None]))
        return torch.stack(logits)


def check(prompt: Prompt, kind: str) -> None:
    truth = prompt.truth()
    logits = prompt.scene.step.logits(prompt.rows()).double()
    others = logits[[0, -1]]
    if KINDS[kind][2] == torch.float32:
        torch.testing.assert_close(logits[1:-1], truth, atol=2e-4, rtol=1e-4)
    else:
        error = (logits[1:-1] - truth).abs().mean(1) / truth.abs().mean(1)
        assert float(error.mean()) < 0.01 and float(error.max()) < 0.05
    for row, got in zip((0, 2), others, strict=True):
        expected, _, _ = prompt.scene.truth(row)
        assert float((got - expected).abs().mean() / expected.abs().mean()) < 0.015


@by_kind
@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize(
    ("start", "count"),
    [(0, 15), (0, 16), (0, 17), (0, 33), (5, 32), (31, 70), (100, 16), (250, 50)],
)
def test_each_row_sees_what_came_before_it_and_itself(kind, start, count, window) -> None:
    check(Prompt(kind, start, count, window), kind)


@by_kind
@pytest.mark.parametrize("sizes", [(70,), (16, 16, 38), (1, 20, 49), (40, 1, 1, 28)])
def test_the_pieces_of_a_prompt_make_the_whole(kind, sizes) -> None:
    """The same rows in any pieces: what differs is the order in which float32 adds up."""
    whole = Prompt(kind, 12, 70, None)
    expected = whole.scene.step.logits(whole.rows(alone=True))
    parts, pieces, first = Prompt(kind, 12, 70, None), [], 0
    for size in sizes:
        pieces.append(parts.scene.step.logits(parts.rows(first, size, alone=True)))
        first += size
    got = torch.cat(pieces)
    if KINDS[kind][2] == torch.float32:
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    else:
        assert float((got - expected).abs().mean() / expected.abs().mean()) < 0.015


@by_kind
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 5, 20, 34])
def test_a_row_of_nan_stays_with_its_request(kind, bad, place) -> None:
    """Rows of one request may go together, so a NaN may reach those before it, as in torch."""
    clean, broken = (Prompt(kind, 10, 35, None) for _ in range(2))
    broken.x[place, 3] = bad
    expected = clean.scene.step.logits(clean.rows())
    logits = broken.scene.step.logits(broken.rows())
    assert logits[1 + place : 36].isnan().all()
    assert torch.equal(logits[[0, 36]], expected[[0, 36]])


@by_kind
def test_the_number_of_threads_changes_no_bit_of_a_prompt(kind) -> None:
    prompt = Prompt(kind, 31, 70, 40)
    found = []
    for threads in (1, 2, 3, 5):
        with num_threads(threads):
            found.append(prompt.scene.step.logits(prompt.rows()))
    assert all(torch.equal(found[0], other) for other in found[1:])
