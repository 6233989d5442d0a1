"""The loop model in pieces says what the whole model says, whoever keeps its keys and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from minifer.course.loop_model import (
    LoopModel,
    Place,
    attention,
    random_parcae,
    tiny_loop_model,
)
from minifer.execution.reference import DenseBackend, sequence_batch
from minifer.weights.resolve import load_model


def whole(model: Any, tokens: list[int], loops: int) -> Tensor:
    """Logits [T, V] of one sequence by `Parcae.forward`, without a cache."""
    backend = DenseBackend()
    with torch.inference_mode():
        hidden = model(sequence_batch(tokens), None, backend, loops)
        return model.logits(hidden, backend)


class Book:
    """Keys and values of one sequence by place; a pass continues where the last one ended."""

    def __init__(self) -> None:
        self.kv: dict[Place, tuple[Tensor, Tensor]] = {}

    def attend(
        self, place: Place, rows: list[int], query: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        if place in self.kv:
            before = self.kv[place]
            keys, values = torch.cat([before[0], keys]), torch.cat([before[1], values])
        self.kv[place] = keys, values
        return attention(query, keys, values)


@pytest.mark.parametrize("chunks", [[9], [4, 5], [1] * 9])
@pytest.mark.parametrize("layers", [(0, 1, 0), (2, 2, 2), (1, 3, 0)])
@pytest.mark.parametrize("loops", [1, 3])
def test_pieces_give_the_models_logits(
    layers: tuple[int, int, int], loops: int, chunks: list[int]
) -> None:
    parcae = random_parcae(layers, 4, seed=sum(layers))
    tokens = torch.randint(29, (9,), generator=torch.Generator().manual_seed(3)).tolist()
    model, book, found, start = LoopModel(parcae), Book(), [], 0
    for count in chunks:
        span = range(start, start + count)
        hidden = model.hidden(tokens[start : span.stop], span, [loops] * count, book.attend)
        found.append(model.logits(hidden))
        start += count
    torch.testing.assert_close(torch.cat(found), whole(parcae, tokens, loops), atol=1e-4, rtol=0)
    P, R, C = layers
    assert len(book.kv) == P + R * loops + C


def test_rows_of_other_depths_share_a_pass() -> None:
    """Two sequences side by side, of 2 and of 5 loops: each as if alone."""
    parcae = random_parcae((1, 2, 1), 4, seed=8)
    model, seen = LoopModel(parcae), []

    def attend(place: Place, rows: list[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append((place, rows))
        cut = sum(row < 3 for row in rows)
        parts = [(q[:cut], k[:cut], v[:cut]), (q[cut:], k[cut:], v[cut:])]
        return torch.cat([attention(*part) for part in parts if len(part[0])])

    a, b = [3, 1, 4], [1, 5, 9, 2]
    positions = [0, 1, 2, 0, 1, 2, 3]
    logits = model.logits(model.hidden(a + b, positions, [2] * 3 + [5] * 4, attend))
    torch.testing.assert_close(logits[:3], whole(parcae, a, 2), atol=1e-4, rtol=0)
    torch.testing.assert_close(logits[3:], whole(parcae, b, 5), atol=1e-4, rtol=0)
    assert (Place("core", 1, 4), [3, 4, 5, 6]) in seen
    assert (Place("coda", 0, 0), list(range(7))) in seen


def test_tiny_is_the_shipped_model() -> None:
    model, book = tiny_loop_model(), Book()
    assert (model.layers, model.loops) == ((0, 1, 0), 8)
    tokens = list(b"The import")
    hidden = model.hidden(tokens, range(10), [8] * 10, book.attend)
    parcae = load_model("parcae-tiny", dtype="float32").model
    torch.testing.assert_close(model.logits(hidden), whole(parcae, tokens, 8), atol=1e-3, rtol=0)


def test_refuses_what_is_no_pass() -> None:
    model = tiny_loop_model()
    for tokens, positions, loops in (([], [], []), ([1], [0, 1], [1]), ([1], [0], [0])):
        with pytest.raises(ValueError, match="loops must be lists of one length"):
            model.hidden(tokens, positions, loops, Book().attend)
    with pytest.raises(ValueError, match="query must be the last of 2 keys, got 3"):
        attention(torch.zeros(3, 2, 8), torch.zeros(2, 2, 8), torch.zeros(2, 2, 8))
