"""`python -m minifer.parcae.train`: train a loop model on Python's help topics.

    python -m minifer.parcae.train --out run                       # a laboratory model, a minute
    python -m minifer.parcae.train --out run --resume              # go on where it was interrupted
    python -m minifer.parcae.train --out run --layers 0,1,0 --injection concat --learning-rate 0.03
    python -m minifer.parcae.train --out run --model parcae-tiny --steps 1000

OUT gets log.csv (a row a step), checkpoint.pt (what --resume reads) and, at the end, config.json
and model.safetensors. With --resume all other options must be those of the first time: the loss
curve is then the one of a run without an interruption, to the last digit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor
from tqdm import tqdm

from minifer.config import ModelConfig
from minifer.loops import INJECTIONS
from minifer.parcae.depth import DEPTHS
from minifer.parcae.lab.data import help_topics, sample_rows
from minifer.parcae.lab.models import lab_model
from minifer.parcae.model import Parcae
from minifer.parcae.monitor import loss_by_depth
from minifer.parcae.optim import OPTIMIZERS
from minifer.parcae.presets import PRESETS, create_model
from minifer.parcae.train import Recipe, StepRecord, train
from minifer.text.help_topics import sections, split
from minifer.weights.hf import save_hf

# Of the recipe's fields; the type and the default are the field's own.
_HELP = {
    "steps": "optimiser steps",
    "rows": "sequences of a step",
    "length": "tokens of a sequence",
    "learning_rate": "after the warm-up",
    "warmup": "steps of linear rise",
    "cooldown": "share of the steps, at the end, of linear fall to 0",
    "weight_decay": "of the blocks' matrices",
    "clip": "largest norm of the gradients",
    "mean_recurrence": "mean depth",
    "mean_backprop_depth": "loops with gradients at most (default: half the mean depth)",
    "depth": "how depths are drawn",
    "optimizer": "muon: for the blocks' matrices, AdamW for the rest",
    "seed": "of weights, text, depths and noise",
}
_CHOICES = {"depth": DEPTHS, "optimizer": OPTIMIZERS}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 2 for bad usage, 130 for Ctrl-C."""
    arguments = _parser().parse_args(argv)
    try:
        run(arguments)
    except (ValueError, OSError) as error:
        print(f"minifer.parcae.train: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        saved = (arguments.out / "checkpoint.pt").exists()
        how = "--resume goes on from its checkpoint" if saved else "there is no checkpoint yet"
        print(f"\nminifer.parcae.train: interrupted; {how}", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    about, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m minifer.parcae.train",
        description=about.partition(": ")[2].capitalize(),
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--resume", action="store_true", help="go on from OUT/checkpoint.pt")
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")

    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        choices=("lab", *PRESETS),
        default="lab",
        help="lab (default): characters, no value embeddings; a preset: bytes, as published",
    )
    lab = parser.add_argument_group("laboratory model")
    lab.add_argument("--width", type=int, default=32)
    lab.add_argument("--heads", type=int, default=2)
    lab.add_argument("--layers", type=_layers, default=(1, 2, 1), metavar="P,R,C")
    lab.add_argument("--injection", choices=INJECTIONS, default="diagonal")
    lab.add_argument("--no-prelude-norm", dest="prelude_norm", action="store_false")

    recipe = parser.add_argument_group("recipe")
    types = get_type_hints(Recipe)
    for field in fields(Recipe):
        if field.name in _HELP:
            default = "" if field.default is None else f" (default: {field.default})"
            recipe.add_argument(
                "--" + field.name.replace("_", "-"),
                type=types[field.name] if types[field.name] in (int, float, str) else int,
                default=field.default,
                choices=_CHOICES.get(field.name),
                help=_HELP[field.name] + default,
            )
    recipe.add_argument("--zero-state", dest="noise", action="store_false", help="h₀ = 0, no noise")
    return parser


def _layers(text: str) -> tuple[int, int, int]:
    parts = text.split(",")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"must be three numbers such as 1,2,1, got {text!r}")
    P, R, C = map(int, parts)
    return P, R, C


def run(arguments: argparse.Namespace) -> list[StepRecord]:
    """One run. Raises `ValueError` for what `Recipe`, the model and `train` refuse."""
    values = vars(arguments)
    if arguments.threads < 1:
        raise ValueError(f"threads must be at least 1, got {arguments.threads}")
    torch.set_num_threads(arguments.threads)
    recipe = Recipe(**{f.name: values[f.name] for f in fields(Recipe) if f.name in values})
    out: Path = arguments.out
    checkpoint = out / "checkpoint.pt"
    if out.exists() and not out.is_dir():
        raise ValueError(f"out must be a folder, and {out} is a file")
    if checkpoint.exists() and not arguments.resume:
        raise ValueError(f"{out} holds a run: go on with --resume, or name another --out")
    model, training, validation = _model_and_text(values, recipe)
    _check_fits(model, recipe, training, validation)

    def batches(generator: torch.Generator) -> Tensor:
        return sample_rows(training, recipe.rows, recipe.length, generator)

    out.mkdir(parents=True, exist_ok=True)
    with tqdm(total=recipe.steps, unit=" steps") as bar:

        def show(record: StepRecord) -> None:
            bar.update(record.step - bar.n)
            bar.set_postfix(loss=f"{record.loss:.3f}", rho=f"{record.rho:.3f}")

        records = train(
            model,
            batches,
            recipe,
            on_step=show,
            checkpoint=checkpoint,
            checkpoint_every=arguments.checkpoint_every,
            resume=arguments.resume,
            log=out / "log.csv",
        )
    save_hf(out, model, _trained_config(model, recipe))
    _report(model, records, validation, recipe)
    return records


def _model_and_text(values: dict[str, Any], recipe: Recipe) -> tuple[Parcae, Tensor, Tensor]:
    """The model, and the tokens to train and to validate on."""
    if values["model"] != "lab":
        training, validation = split(sections())
        return create_model(values["model"], seed=recipe.seed), training, validation
    corpus = help_topics()
    names = ("width", "heads", "layers", "injection", "prelude_norm")
    model = lab_model(
        corpus.num_symbols,
        **{name: values[name] for name in names},
        length=recipe.length,
        mean_recurrence=recipe.mean_recurrence,
        seed=recipe.seed,
    )
    return model, corpus.train, corpus.validation


def _trained_config(model: Parcae, recipe: Recipe) -> ModelConfig:
    """The model's, with the depths it was trained with: they say how deep it runs by default."""
    loop = replace(
        model.loop,
        mean_recurrence=recipe.mean_recurrence,
        mean_backprop_depth=recipe.max_backward,
    )
    return replace(model.config, loop=loop)


def _check_fits(model: Parcae, recipe: Recipe, training: Tensor, validation: Tensor) -> None:
    longest = min(model.config.max_position_embeddings, len(training) - 1, len(validation) - 1)
    if recipe.length > longest:
        raise ValueError(f"length must be at most {longest} here, got {recipe.length}")


def _report(model: Parcae, records: list[StepRecord], validation: Tensor, recipe: Recipe) -> None:
    last = records[-1]
    print(
        f"ρ(Ā) {last.rho:.4f}   ‖h_T‖ {last.state_norm:.4g}   relative residual "
        f"{last.relative_residual:.2g}   gradient norm {last.gradient_norm:.3g}"
    )
    mean = recipe.mean_recurrence
    rows = sample_rows(validation, 64, recipe.length, torch.Generator().manual_seed(recipe.seed))
    losses = loss_by_depth(model, rows, {1, 2, 4, mean, 2 * mean})
    shown = "   ".join(f"T={t}: {loss:.3f}" for t, loss in losses.items())
    print(f"validation loss, nats a token   {shown}")
