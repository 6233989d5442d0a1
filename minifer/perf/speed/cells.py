"""What is asked of an engine: cells of equal requests, or a mixed workload; the same for all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from minifer.perf.load.workload import Workload


@dataclass(frozen=True)
class Ask:
    """One request: token ids, and how many tokens to answer, whatever they are."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Cell:
    """`batch` requests of `context` prompt tokens each, answered with `tokens`.

    kind: "decode", timed where all decode, or "prefill", timed to the first token of each (tokens
    is 1 then). Raises `ValueError`.
    """

    kind: str
    batch: int
    context: int
    tokens: int

    def __post_init__(self) -> None:
        least = 2 if self.kind == "decode" else 1
        for name in ("batch", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if self.tokens < least:
            raise ValueError(f"--tokens must be at least {least}, got {self.tokens}")

    def __str__(self) -> str:
        return f"{self.kind} {self.batch} × {self.context}"

    def asks(self, vocab_size: int, seed: int, text: Sequence[int] = ()) -> list[Ask]:
        """The requests. text: take prompts from these tokens, each from another place on, and
        begin again where they end; without it, token ids drawn with `seed`."""
        rng = random.Random(f"{seed}/{self}")
        prompts = []
        for i in range(self.batch):
            if text:
                first = i * len(text) // self.batch
                prompts.append(tuple(text[(first + j) % len(text)] for j in range(self.context)))
            else:
                prompts.append(tuple(rng.randrange(vocab_size) for _ in range(self.context)))
        return [Ask(prompt, self.tokens) for prompt in prompts]


def workload_asks(workload: Workload, vocab_size: int, seed: int) -> list[Ask]:
    """The sessions of a workload as requests, all there at once; single turns."""
    sessions = workload.sessions(range(vocab_size), seed)
    return [
        Ask(tuple(map(int, turn.pieces)), turn.output_len) for s in sessions for turn in s.turns
    ]


def needed_blocks(asks: Sequence[Ask], block_size: int) -> int:
    """KV blocks that hold all requests to their ends, with one to spare each."""
    return sum(-(-(len(a.prompt) + a.max_tokens) // block_size) + 1 for a in asks)
