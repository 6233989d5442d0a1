"""Drafts from a model: a smaller one, or a loop model with fewer of its iterations.

Both draw token after token in small passes between the planning of a step and its one big pass.
They draw by the request's own rules and temperature with the noise that the target will use at
the same place: two models that nearly agree then nearly always draw the same token.

Keys and values of drafts go to the slots that the step has for them anyway, so rolling them back
costs nothing: a slot behind the accepted tokens is written again before it is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minifer.config import EngineConfig, ModelConfig
from minifer.execution.loops.runner import LoopedRunner
from minifer.execution.runner import ModelRunner, make_runner
from minifer.execution.sampler import Picked, Sampler, SampleRow, reads_largest_only
from minifer.kv.step_input import StepInput
from minifer.request import Request

Part = tuple[int, range]  # which entry of a step, and which of its rows


@dataclass(frozen=True)
class _Guess:
    """One request that drafts in this step. first: row of its first draft."""

    entry: int
    request: Request
    first: int
    count: int

    def rows(self, place: int) -> range:
        """The row of draft `place`, counted from 1; 0 is the newest token."""
        return range(self.first + place - 1, self.first + place)


class ModelProposer(ABC):
    """What the two have in common: drafts are drawn one after the other, all requests together.

    rejection: keep what each draft was drawn from, for the rule of `rejection.py`.
    """

    def __init__(self, rejection: bool) -> None:
        self._sampler = Sampler()
        self._rejection = rejection

    def num_drafts(self, request: Request, most: int) -> int:
        """As many as there may be; which tokens, `propose` says."""
        request.draft_token_ids = [0] * most
        return most

    def propose(self, step: StepInput) -> None:
        guesses = [
            _Guess(b, entry.request, end - entry.num_draft, entry.num_draft)
            for b, (entry, end) in enumerate(zip(step.scheduled, step.query_start[1:], strict=True))
            # in a step that was suspended, its drafts were drawn already
            if entry.num_draft and entry.request.suspended is None
        ]
        for guess in guesses:
            guess.request.drop_drafts()
        logits = self._first_pass(step, guesses)
        place = 0
        while guesses:
            place += 1
            for guess, token in zip(guesses, self._draw(logits, guesses, place - 1), strict=True):
                guess.request.draft_token_ids.append(token)
                step.token_ids[guess.rows(place).start] = token
            logits = self._next_pass(step, guesses, place)
            guesses = [guess for guess in guesses if guess.count > place]

    @abstractmethod
    def _first_pass(self, step: StepInput, guesses: Sequence[_Guess]) -> Tensor | Picked:
        """Logits [guesses, V] after the newest token of each."""

    @abstractmethod
    def _next_pass(self, step: StepInput, guesses: Sequence[_Guess], place: int) -> Tensor | Picked:
        """Logits, after draft `place`, of those guesses that go on."""

    def _draw(self, logits: Tensor | Picked, guesses: Sequence[_Guess], drawn: int) -> list[int]:
        """The next draft of each guess; `drawn` of them are there already."""
        rows = [SampleRow(i, g.request, g.request.seed, drawn) for i, g in enumerate(guesses)]
        sampled = self._sampler(logits, rows)
        # Where nothing can be drawn, any token will do: it is only a guess.
        tokens = [0 if one.error is not None else one.token_id for one in sampled]
        random = [i for i, g in enumerate(guesses) if not g.request.params.is_greedy]
        if self._rejection and random:
            assert isinstance(logits, Tensor)  # only greedy requests may be given less
            probs = self._sampler.probabilities(logits, [rows[i] for i in random])
            for i, row in zip(random, probs, strict=True):
                if sampled[i].error is not None:
                    row = F.one_hot(torch.zeros_like(row[0], dtype=torch.int64), len(row)).to(row)
                before = guesses[i].request.draft_probs
                kept = row[None] if before is None else torch.cat((before, row[None]))
                guesses[i].request.draft_probs = kept
        return tokens


class DraftModelProposer(ModelProposer):
    """A second model, with KV of its own in the target's blocks.

    It computes each token that the target computes, prompts too. So a block that others find by
    its prefix holds both models' KV, and nobody keeps books about the second one.
    """

    def __init__(self, runner: ModelRunner, rejection: bool) -> None:
        super().__init__(rejection)
        self.runner = runner

    def _first_pass(self, step: StepInput, guesses: Sequence[_Guess]) -> Tensor | Picked:
        rows = pairwise(step.query_start)
        parts = [
            (b, range(first, end - entry.num_draft))
            for b, (entry, (first, end)) in enumerate(zip(step.scheduled, rows, strict=True))
            if entry.request.suspended is None
        ]
        part = part_of(step, parts, guesses)
        part.block_copies, part.block_poison = step.block_copies, step.block_poison
        self.runner.move_blocks(part)
        return self.runner.forward(part) if parts else torch.empty(0)

    def _next_pass(self, step: StepInput, guesses: Sequence[_Guess], place: int) -> Tensor | Picked:
        # The last draft passes too, for its KV: the target may accept it.
        parts = [(guess.entry, guess.rows(place)) for guess in guesses]
        going = [guess for guess in guesses if guess.count > place]
        return self.runner.forward(part_of(step, parts, going))


class LoopProposer(ModelProposer):
    """A loop model drafts with `num_loops` of its iterations and judges with all of them.

    The drafting passes write the KV of the first iterations and of the coda to the very slots that
    the judging pass then overwrites: each of the tokens runs through it again.
    """

    def __init__(self, runner: ModelRunner, num_loops: int, rejection: bool) -> None:
        super().__init__(rejection)
        assert isinstance(runner, LoopedRunner)  # `draft_loops` has looked
        self._runner = runner
        self._num_loops = num_loops

    def num_drafts(self, request: Request, most: int) -> int:
        """None for requests that are as shallow as their drafts would be."""
        deeper = (request.num_loops or 0) > self._num_loops
        return super().num_drafts(request, most) if deeper else 0

    def _first_pass(self, step: StepInput, guesses: Sequence[_Guess]) -> Tensor | Picked:
        self._runner.move_blocks(step)  # a draft may be the first to write into a copied block
        return self._pass(step, guesses, 0)

    def _next_pass(self, step: StepInput, guesses: Sequence[_Guess], place: int) -> Tensor | Picked:
        return self._pass(step, [guess for guess in guesses if guess.count > place], place)

    def _pass(self, step: StepInput, guesses: Sequence[_Guess], place: int) -> Tensor | Picked:
        if not guesses:
            return torch.empty(0)
        parts = [(guess.entry, guess.rows(place)) for guess in guesses]
        part = part_of(step, parts, guesses)
        return self._runner.draft(part, self._num_loops)


def part_of(step: StepInput, parts: Sequence[Part], drawing: Sequence[_Guess]) -> StepInput:
    """Some rows of a step as a step of its own. drawing: whose last row has logits."""
    part = StepInput(step.block_size)
    part.greedy = all(reads_largest_only(guess.request) for guess in drawing)
    wanted = {guess.entry for guess in drawing}
    for b, rows in parts:
        span = slice(rows.start, rows.stop)
        part.scheduled.append(step.scheduled[b])
        part.token_ids += step.token_ids[span]
        part.positions += step.positions[span]
        part.slot_mapping += step.slot_mapping[span]
        part.query_start.append(len(part.token_ids))
        part.seq_lens.append(step.positions[rows.stop - 1] + 1)
        part.block_tables.append(step.block_tables[b])
        if b in wanted:
            part.logits_rows.append(len(part.token_ids) - 1)
    return part


def draft_runner(draft: Any, config: EngineConfig, num_blocks: int) -> ModelRunner:
    """A runner for the draft model, whose KV lies in blocks of the same numbers.

    It runs whole on rank 0 where its target is cut: it is small, and ranks wait for each other.
    """
    whole = replace(config, tensor_parallel_size=1)
    return make_runner(draft.model, draft.config, whole, num_blocks)


def draft_loops(config: EngineConfig, model: ModelConfig) -> int:
    """How many iterations a draft gets: a quarter of the engine's depth, unless it is said.

    Raises `ValueError` for a model without a loop, or when a draft would be no cheaper.
    """
    if model.loop is None:
        raise ValueError(
            'speculative_method="loops" needs a loop model such as parcae-tiny; this one runs '
            "each layer once"
        )
    if model.loop.policy.overwrites:
        raise ValueError(
            f"speculative_method needs KV that is written once, got loop_kv_policy="
            f"{model.loop.kv_policy}: use full or first-M"
        )
    loops = config.speculative_num_loops or max(1, model.loop.deepest // 4)
    if loops >= model.loop.deepest:
        raise ValueError(
            f"speculative_num_loops must be below max_num_loops ({model.loop.deepest}), got {loops}"
        )
    return loops
