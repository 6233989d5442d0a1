"""Proposers for tests: drafts that a function makes up, and drafts of a second tiny model."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from fakes import tiny_config, tiny_model

from minifer.engine import Engine
from minifer.execution.runner import make_runner
from minifer.execution.speculation.draft_model import DraftModelProposer
from minifer.kv.step_input import StepInput
from minifer.request import Request


class Scripted:
    """Drafts whatever `guess` says, cut to what there is room for."""

    def __init__(self, guess: Callable[[Request], Sequence[int]]) -> None:
        self.guess = guess
        self.asked: list[int] = []  # the most drafts there was room for

    def num_drafts(self, request: Request, most: int) -> int:
        self.asked.append(most)
        request.draft_token_ids = list(self.guess(request))[:most]
        return len(request.draft_token_ids)

    def propose(self, step: StepInput) -> None:
        pass


def half_right(
    replies: Mapping[tuple[str, int], Sequence[int]], rng: random.Random, vocab_size: int = 40
) -> Scripted:
    """What a request will say, with a mistake here and there. replies: by group and index."""

    def guess(request: Request) -> list[int]:
        reply = replies[request.group.request_id, request.index]
        right = reply[request.num_output_tokens :][: rng.randint(0, 6)]
        return [t if rng.random() < 0.8 else rng.randrange(vocab_size) for t in right]

    return Scripted(guess)


def use(engine: Engine, proposer) -> Engine:
    """The engine, drafting with `proposer` from now on."""
    engine.proposer = engine.scheduler.proposer = proposer
    return engine


def with_draft_model(engine: Engine, seed: int, config=None) -> Engine:
    """The engine, drafting with the tiny random model of a seed; that of seed 0 is its own."""
    config = config or tiny_config()
    blocks = engine.kv.pool.num_blocks
    runner = make_runner(tiny_model(config, seed), config, engine.config, blocks)
    rejection = engine.config.speculative_acceptance == "rejection"
    return use(engine, DraftModelProposer(runner, rejection))


def chi_square_fits(counts: Mapping, probabilities: Mapping) -> bool:
    """Could these counts be of these probabilities? A true hypothesis fails once in a million.

    Pearson's test; what is expected less than five times counts together. The limit is Wilson and
    Hilferty's, 1931.
    """
    draws = sum(counts.values())
    expected = {k: p * draws for k, p in probabilities.items() if p * draws >= 5}
    pairs = [(counts.get(k, 0), e) for k, e in expected.items()]
    rest = draws - sum(expected.values())
    if rest >= 5:
        pairs.append((draws - sum(count for count, _ in pairs), rest))
    statistic = sum((count - e) ** 2 / e for count, e in pairs)
    a = 2 / (9 * (len(pairs) - 1))
    return statistic < (len(pairs) - 1) * (1 - a + 4.7534 * a**0.5) ** 3
