"""Train `parcae-tiny`, the loop model that ships with minifer, on one CPU core.

    python minifer/assets/train_parcae_tiny.py            # writes parcae-tiny beside this file
    python minifer/assets/train_parcae_tiny.py --out DIR --steps 100

The text, its held-out sections and the byte tokenizer are minifer-tiny's (`train_tiny.py`). The
folder holds what a published Parcae checkpoint holds, with the same names, and two files of its
own: `training.json` (recipe, versions, held-out loss by depth), `training.csv` (every tenth step).

An interrupted run goes on with `--resume`. Same seed, machine, thread count and versions give the
same weights to the bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from minifer.parcae.lab.data import sample_rows
from minifer.parcae.model import Parcae
from minifer.parcae.monitor import loss_by_depth
from minifer.parcae.presets import create_model
from minifer.parcae.train import Recipe, StepRecord, train, write_log
from minifer.perf import bench
from minifer.text.byte_tokenizer import byte_tokenizer
from minifer.text.help_topics import sections, split
from minifer.weights.hf import save_hf

NAME = "parcae-tiny"
LENGTHS = (64, 128, 256, 512)  # of a step's rows, drawn; the last is the longest context
RECIPE = Recipe(
    steps=5000,
    rows=8,
    length=64,  # rows · length tokens a step, whatever length is drawn
    learning_rate=5e-3,
    warmup=20,
    cooldown=0.5,
)
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)
HELD_OUT_LENGTH = 128
LOG_EVERY = 10  # steps


def batch(stream: Tensor, recipe: Recipe, generator: torch.Generator) -> Tensor:
    """int64 [B, S + 1], B · S the same for every S of LENGTHS."""
    length = LENGTHS[int(torch.randint(len(LENGTHS), (), generator=generator))]
    return sample_rows(stream, recipe.rows * recipe.length // length, length, generator)


def held_out_rows(stream: Tensor, length: int = HELD_OUT_LENGTH) -> Tensor:
    """int64 [rows, length + 1]: all full rows of a stream, one after the other."""
    return stream.unfold(0, length + 1, length)


def held_out_loss(
    model: Parcae, rows: Tensor, depths: tuple[int, ...] = DEPTHS
) -> dict[str, float]:
    """Bits a byte (special tokens count as bytes) at each depth, from h₀ = 0."""
    return {
        str(t): round(loss / math.log(2), 4)
        for t, loss in loss_by_depth(model, rows, depths).items()
    }


def save(folder: Path, model: Parcae) -> str:
    """Write the model's directory in bfloat16; returns the SHA-256 of `model.safetensors`."""
    save_hf(folder, model, model.config)
    byte_tokenizer().save(folder)
    config = model.config
    generation = {"bos_token_id": config.bos_token_id, "eos_token_id": list(config.eos_token_ids)}
    write_json(folder / "generation_config.json", generation)
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def report_of(recipe: Recipe) -> dict[str, Any]:
    """What decides the weights on a given machine."""
    return {"recipe": asdict(recipe), "row_lengths": LENGTHS, "threads": 1}


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def rounded(model: Parcae) -> Parcae:
    """The model in bfloat16, as it is saved; A_log and dt_bias stay float32."""
    small = Parcae(model.config, torch.bfloat16)
    with torch.no_grad():
        for name, parameter in small.named_parameters():
            parameter.copy_(model.get_parameter(name))
    return small


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / NAME)
    parser.add_argument("--steps", type=int, default=RECIPE.steps)
    parser.add_argument("--resume", action="store_true", help="go on from OUT.checkpoint")
    arguments = parser.parse_args()
    recipe = replace(RECIPE, steps=arguments.steps)
    torch.set_num_threads(1)

    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out.with_name(out.name + ".checkpoint")
    training, held_out = split(sections())
    model = create_model(NAME, seed=recipe.seed)
    with tqdm(total=recipe.steps, unit=" steps") as bar:

        def show(record: StepRecord) -> None:
            bar.update(record.step - bar.n)
            bar.set_postfix(bits=f"{record.loss / math.log(2):.3f}", rho=f"{record.rho:.3f}")

        records = train(
            model,
            lambda generator: batch(training, recipe, generator),
            recipe,
            on_step=show,
            checkpoint=checkpoint,
            resume=arguments.resume,
        )
    with open(out / "training.csv", "w", encoding="utf-8") as text:
        write_log(text, records[LOG_EVERY - 1 :: LOG_EVERY])
    small = rounded(model)
    served = Parcae(model.config)
    served.load_state_dict(small.state_dict())  # what is reported is what is saved
    report = {
        "text": "pydoc_data.topics",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": bench.machine()["cpu"],
        **report_of(recipe),
        "training_tokens": len(training),
        "cpu_seconds": round(time.process_time()),  # of this process alone, if it was resumed
        "held_out_tokens": len(held_out),
        "held_out_rows_of": HELD_OUT_LENGTH,
        "held_out_bits_per_byte_by_depth": held_out_loss(served, held_out_rows(held_out)),
        "spectral_radius": records[-1].rho,
        "parameters": model.num_parameters,
        "sha256": save(out, small),
    }
    write_json(out / "training.json", report)
    checkpoint.unlink()
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
