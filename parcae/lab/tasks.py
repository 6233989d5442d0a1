"""Composing permutations: a task in which more loops visibly help.

A row is a start symbol and a sequence of permutations of three things; the answer at every
permutation is the product of all so far::

    row      start  a     b      c        …
    answer     –    a   b ∘ a  c ∘ b ∘ a  …
    hops       –    0     1      2

The start symbol asks nothing, but without it a row that begins "a a" looks like one that begins
"a": attention averages the values of equal symbols, which gives that value again whatever the
weights, and relative positions do not say how many there were.

The order matters, so the answer is no sum over what came before, which attention has at once: it
passes from position to position, each adding its own permutation to its neighbour's answer. With
one layer in the core a loop is about one hop: k hops need about k loops. An answer that has arrived
stays, since computing it again gives it again: more loops than needed do little harm.

About a minute of one core trains a model; `lectures/results/parcae_laws.md` has what three of them
get right.

The word problem of a group is a known measure of what depth buys (https://arxiv.org/abs/2404.08819).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from minifer.parcae.lab.models import lab_model
from minifer.parcae.model import Parcae
from minifer.parcae.monitor import logits_by_depth
from minifer.parcae.train import Recipe, StepRecord, train

# Three permutations of three things: 0 … 5 in lexicographic order.
PERMUTATIONS: tuple[tuple[int, ...], ...] = tuple(itertools.permutations(range(3)))
NUM_PERMUTATIONS = len(PERMUTATIONS)
START = NUM_PERMUTATIONS  # the symbol every row begins with
NUM_SYMBOLS = NUM_PERMUTATIONS + 1
NO_ANSWER = -100  # cross-entropy leaves it out

# length: permutations in a row, the start symbol not counted.
RECIPE = Recipe(steps=800, rows=48, length=12, learning_rate=5e-3, warmup=20, cooldown=0.3)

WIDTH = 64
LAYERS = (0, 1, 0)  # of prelude, core and coda: a pure loop


@functools.cache
def products() -> Tensor:
    """int64 [6, 6]: the number of "a after b"."""
    number = {permutation: i for i, permutation in enumerate(PERMUTATIONS)}
    return torch.tensor(
        [[number[tuple(a[b[i]] for i in range(3))] for b in PERMUTATIONS] for a in PERMUTATIONS]
    )


def sample_task(rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Start and `length` random permutations, and the product up to each: int64 [rows, 1 + length]
    each; the answer at the start is `NO_ANSWER`.

    Raises `ValueError` when either is below 1.
    """
    if rows < 1 or length < 1:
        raise ValueError(f"rows and length must be at least 1, got {rows!r} and {length!r}")
    inputs = torch.full((rows, 1 + length), START)
    inputs[:, 1:] = torch.randint(NUM_PERMUTATIONS, (rows, length), generator=generator)
    answers = inputs.clone()
    answers[:, 0] = NO_ANSWER
    for i in range(2, 1 + length):
        answers[:, i] = products()[inputs[:, i], answers[:, i - 1]]
    return inputs, answers


def train_task(
    recipe: Recipe = RECIPE,
    *,
    width: int = WIDTH,
    layers: tuple[int, int, int] = LAYERS,
    on_step: Callable[[StepRecord], None] | None = None,
) -> Parcae:
    """A model trained on the task; rows and length are the recipe's, weights of its seed.

    About a minute on one core with the defaults. Raises `ValueError` as `lab_model` and `train`.
    """
    model = lab_model(
        NUM_SYMBOLS,
        width=width,
        layers=layers,
        length=1 + recipe.length,
        mean_recurrence=recipe.mean_recurrence,
        seed=recipe.seed,
    )
    train(
        model,
        lambda generator: sample_task(recipe.rows, recipe.length, generator),
        recipe,
        on_step=on_step,
    )
    return model


def accuracy_by_depth(
    model: Parcae, depths: Iterable[int], *, rows: int = 500, length: int = 12, seed: int = 0
) -> dict[int, list[float]]:
    """Depth → share of right answers after 0, 1, … length − 1 hops, on rows of another stream than
    training's. Guessing is right once in six.

    Raises `ValueError` as `sample_task` and `logits_by_depth`.
    """
    generator = torch.Generator().manual_seed(2**31 + seed)
    inputs, answers = sample_task(rows, length, generator)
    shown = torch.cat([inputs, inputs[:, :1]], 1)  # the last column is not read
    return {
        depth: (logits.argmax(-1).view_as(answers) == answers)[:, 1:].double().mean(0).tolist()
        for depth, logits in logits_by_depth(model, shown, depths)
    }
