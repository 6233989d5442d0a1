"""Train a loop model: `train` in Python, `python -m minifer.parcae.train` on the command line.

A step draws rows, a depth for each of them and the noise of their initial states, unrolls the model
to these depths with gradients through the last loops (`minifer.parcae.depth`), and lets the
optimiser step. Every draw comes from a generator made of (seed, step), so that a run that was
interrupted goes on with the numbers it would have had: the same loss curve to the last digit.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minifer.execution.backend import Backend
from minifer.execution.backends.dense import RowsBackend, row_batch
from minifer.parcae.depth import DEPTHS, Unrolled, sample_depths, unroll
from minifer.parcae.model import Parcae
from minifer.parcae.optim import OPTIMIZERS, Optimizer

# int64 [B, S + 1], each row's next tokens the targets; or inputs and targets, int64 [B, S] each,
# where a target of −100 does not count.
Batch = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Recipe:
    """What decides a run beside the model and its text.

    rows, length: of a batch, for whoever makes batches. learning_rate: after `warmup` steps, linear
    up to it; cooldown: the share of the steps at the end in which it falls to 0, linearly.
    weight_decay: of the blocks' matrices. clip: the largest norm of the gradients.
    mean_recurrence: mean depth, drawn as `depth` says (`sample_depths`). mean_backprop_depth: loops
    with gradients at most; None: half the mean, rounded up. noise: whether h₀ is random or 0.

    Raises `ValueError` naming the field and its limit.
    """

    steps: int = 250
    rows: int = 8
    length: int = 64
    learning_rate: float = 1e-2
    warmup: int = 10
    cooldown: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 1.0
    mean_recurrence: int = 8
    mean_backprop_depth: int | None = None
    depth: str = "poisson"
    noise: bool = True
    optimizer: str = "adamw"
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"steps": 1, "rows": 1, "length": 1, "warmup": 0, "mean_recurrence": 1, "seed": 0}
        if self.mean_backprop_depth is not None:
            least["mean_backprop_depth"] = 1
        for name, limit in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < limit:
                raise ValueError(f"{name} must be an integer of at least {limit}, got {value!r}")
        if self.seed >= 2**63:
            raise ValueError(f"seed must be below 2**63, got {self.seed!r}")
        for name in ("learning_rate", "clip"):
            if not 0 < _number(name, getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)!r}")
        if not isinstance(self.betas, tuple) or len(self.betas) != 2:
            raise ValueError(f"betas must be a tuple of two numbers, got {self.betas!r}")
        for name, value in (("cooldown", self.cooldown), *(("betas", b) for b in self.betas)):
            if not 0 <= _number(name, value) <= 1 or (name == "betas" and value == 1):
                raise ValueError(f"{name} must lie between 0 and 1, got {value!r}")
        if not 0 <= _number("weight_decay", self.weight_decay) < math.inf:
            raise ValueError(f"weight_decay must be at least 0, got {self.weight_decay!r}")
        if not isinstance(self.noise, bool):
            raise ValueError(f"noise must be True or False, got {self.noise!r}")
        for name, allowed in (("depth", DEPTHS), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}"
                )

    @property
    def max_backward(self) -> int:
        return self.mean_backprop_depth or math.ceil(self.mean_recurrence / 2)

    def learning_rate_at(self, step: int) -> float:
        """Of step 0 … steps − 1."""
        rate = self.learning_rate * min(1.0, (step + 1) / max(1, self.warmup))
        falling = self.cooldown * self.steps
        return rate * min(1.0, (self.steps - step) / falling) if falling else rate


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return value


@dataclass(frozen=True)
class StepRecord:
    """One step, counted from 1. Norms are means over the batch's tokens.

    loss: nats a token, before the step. gradient_norm: before it was cut. rho: ρ(Ā) before the
    step. state_norm: ‖h_T‖. relative_residual: ‖h_T − h_{T−1}‖ / ‖h_T‖. mean_depth: of the batch.
    """

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    rho: float
    state_norm: float
    relative_residual: float
    mean_depth: float


def train(
    model: Parcae,
    batches: Callable[[torch.Generator], Batch],
    recipe: Recipe,
    *,
    on_step: Callable[[StepRecord], None] | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 100,
    resume: bool = False,
    log: str | Path | None = None,
    backend: Backend | None = None,
) -> list[StepRecord]:
    """Train `model` in place; returns the record of every step.

    batches: makes a step's rows from the generator it is handed, and from nothing else that
    changes. on_step: called after each step. checkpoint: a file written every `checkpoint_every`
    steps and at the end; resume: go on from it. log: a CSV file with a row a step. backend: None
    for float32.

    Raises `ValueError`: resume without a checkpoint, or from one that another recipe or model
    wrote; a batch that has not the stated shape.
    """
    if checkpoint_every < 1:
        raise ValueError(f"checkpoint_every must be at least 1, got {checkpoint_every!r}")
    optimizer = Optimizer(
        model, recipe.optimizer, recipe.learning_rate, recipe.betas, recipe.weight_decay
    )
    file = None if checkpoint is None else Path(checkpoint)
    records = load_checkpoint(file, model, optimizer, recipe) if resume else []
    backend = backend or RowsBackend()
    with open(os.devnull if log is None else log, "w", encoding="utf-8", newline="") as text:
        table = write_log(text, records)
        for step in range(len(records), recipe.steps):
            record = train_step(model, batches, recipe, step, optimizer, backend)
            records.append(record)
            table.writerow(asdict(record))
            text.flush()
            if file and (len(records) % checkpoint_every == 0 or len(records) == recipe.steps):
                save_checkpoint(file, model, optimizer, recipe, records)
            if on_step is not None:
                on_step(record)
    return records


def write_log(text: TextIO, records: Iterable[StepRecord]) -> csv.DictWriter[str]:
    """Write CSV: a header and a row a record. Returns what writes further rows."""
    table = csv.DictWriter(text, [field.name for field in fields(StepRecord)], lineterminator="\n")
    table.writeheader()
    table.writerows(map(asdict, records))
    return table


def train_step(
    model: Parcae,
    batches: Callable[[torch.Generator], Batch],
    recipe: Recipe,
    step: int,
    optimizer: Optimizer,
    backend: Backend,
) -> StepRecord:
    """Step 0 … steps − 1 of a run."""
    rows, depth, noise = generators(recipe.seed, step)
    inputs, targets = _inputs_and_targets(batches(rows))
    depths = sample_depths(recipe.depth, recipe.mean_recurrence, len(inputs), depth)
    batch = replace(row_batch(*inputs.shape), token_ids=inputs.flatten())
    start = noise if recipe.noise else None
    out = unroll(model, batch, backend, depths, recipe.max_backward, start)
    loss = F.cross_entropy(model.logits(out.hidden, backend), targets.flatten())
    rho, rate = model.adapter.spectral_radius(), recipe.learning_rate_at(step)
    gradient_norm = optimizer.step(loss, rate, recipe.clip)
    return StepRecord(
        step=step + 1,
        loss=loss.item(),
        learning_rate=rate,
        gradient_norm=gradient_norm,
        rho=rho,
        mean_depth=float(depths.float().mean()),
        **_state_numbers(out),
    )


def generators(seed: int, step: int) -> tuple[torch.Generator, torch.Generator, torch.Generator]:
    """Of a step's rows, depths and noise: they depend on nothing that happened before."""
    rows, depth, noise = np.random.SeedSequence((seed, step)).generate_state(3).tolist()
    return (
        torch.Generator().manual_seed(rows),
        torch.Generator().manual_seed(depth),
        torch.Generator().manual_seed(noise),
    )


def _inputs_and_targets(batch: Batch) -> tuple[Tensor, Tensor]:
    if isinstance(batch, Tensor):
        inputs, targets = batch[..., :-1], batch[..., 1:]
    else:
        inputs, targets = batch
    if inputs.dim() != 2 or inputs.numel() == 0 or inputs.shape != targets.shape:
        raise ValueError(
            "a batch must be [B, S + 1], or inputs and targets [B, S], B and S of at least 1; "
            f"got inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)}"
        )
    return inputs, targets


@torch.no_grad()
def _state_numbers(out: Unrolled) -> dict[str, float]:
    norm = float(out.state.norm(dim=-1).mean())
    residual = float((out.state - out.previous).norm(dim=-1).mean())
    return {"state_norm": norm, "relative_residual": residual / norm if norm else 0.0}


def save_checkpoint(
    file: Path, model: Parcae, optimizer: Optimizer, recipe: Recipe, records: list[StepRecord]
) -> None:
    """Write what a run needs to go on, under a temporary name first."""
    value = {
        "recipe": asdict(recipe),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "records": [asdict(record) for record in records],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        torch.save(value, temporary)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(
    file: Path | None, model: Parcae, optimizer: Optimizer, recipe: Recipe
) -> list[StepRecord]:
    """Fill model and optimiser from a file of `save_checkpoint`; returns the steps done so far."""
    if file is None or not file.is_file():
        raise ValueError(f"resume needs a checkpoint, and there is no file {str(file)!r}")
    try:
        value = torch.load(file, weights_only=True)
        then = {field.name: value["recipe"][field.name] for field in fields(recipe)}
        weights, moments = dict(value["model"]), list(value["optimizer"])
        records = [StepRecord(**record) for record in value["records"]]
    except Exception as error:  # of a damaged file it may be any
        raise ValueError(f"{file} is no checkpoint of a run ({str(error)[:80]})") from error
    for name, was in then.items():
        now = getattr(recipe, name)
        if was != now:
            raise ValueError(f"{file} was trained with {name}={was!r}, not {now!r}")
    try:
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
    except Exception as error:
        reason = str(error).splitlines()[-1].strip()
        raise ValueError(f"{file} is of another model: {reason}") from error
    return records


if __name__ == "__main__":
    import sys

    from minifer.parcae.train_cli import main

    sys.exit(main())
