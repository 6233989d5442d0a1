"""The bytes a step has to read, whoever runs it: what bandwidth utilisation (MBU) counts.

MBU = (bytes of weights + bytes of KV) ÷ seconds ÷ read bandwidth. Each matrix counts once a step in
the form it is kept (quantised: codes, scales and zeros); of the embedding the rows that are looked
up, and the whole where it is the head as well; K and V of every live position once. What a program
reads twice, copies or writes is its own affair, and makes its MBU smaller, never larger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from minifer.config import ModelConfig
from minifer.weights.quantized import weight_bytes


@dataclass(frozen=True)
class Traffic:
    """What reading a model costs.

    weights: bytes of all that a step reads whole. row: bytes of one row of the embedding.
    kv_token: bytes of K and V of one token in one layer. windows: (window, layers that have it);
    None: a layer that sees everything.
    """

    weights: int
    row: float
    kv_token: int
    windows: tuple[tuple[int | None, int], ...]

    @classmethod
    def of(cls, model: Any, config: ModelConfig, kv_itemsize: int) -> Traffic | None:
        """Of a plain transformer; None for a loop model, which reads its core several times."""
        if config.loop is not None:
            return None
        held, embedding = weight_bytes(model), weight_bytes(model.embed_tokens)
        return cls(
            weights=held if config.tie_word_embeddings else held - embedding,
            row=embedding / config.vocab_size,
            kv_token=2 * config.num_kv_heads * config.head_dim * kv_itemsize,
            windows=tuple(Counter(map(config.window, range(config.num_layers))).items()),
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Traffic:
        windows = tuple((window, layers) for window, layers in values["windows"])
        return cls(values["weights"], values["row"], values["kv_token"], windows)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def kv(self, contexts: Iterable[int]) -> int:
        """Bytes of KV that requests of these contexts read: one query each."""
        contexts = list(contexts)
        tokens = sum(
            layers * sum(c if window is None else min(c, window) for c in contexts)
            for window, layers in self.windows
        )
        return self.kv_token * tokens

    def step(self, contexts: Sequence[int]) -> float:
        """Bytes of one step that decodes a token of each request. contexts: tokens whose KV it
        reads, its own included."""
        return self.weights + self.row * len(contexts) + self.kv(contexts)


def decode_bytes(traffic: Traffic, prompts: Sequence[int], steps: Iterable[Sequence[int]]) -> float:
    """Bytes of the steps of a `Window`. prompts: lengths; steps: tokens each request had before.

    The input of a step is the last token a request has: its context is all tokens before the new
    one.
    """
    return sum(
        traffic.step([p + had for p, had in zip(prompts, before, strict=True)]) for before in steps
    )
