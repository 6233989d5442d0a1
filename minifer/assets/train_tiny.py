"""Train `minifer-tiny`, the model that ships with minifer, in minutes on two CPU cores.

    python minifer/assets/train_tiny.py            # writes minifer-tiny beside this file
    python minifer/assets/train_tiny.py --out DIR --steps 100

The text is `pydoc_data.topics` of the running Python without its tables, cut into sections. Every
section is written twice: as a document, and its beginning as the answer in a chat that asks for its
title. One section in sixteen is held out, and the loss on those is the one that is reported.

Four fifths of the steps see rows of 128 tokens, where attention is cheap; the rest rows of 1024,
the longest context the model is said to hold.

Same seed, machine, thread count and versions give the same weights to the bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minifer.config import ModelConfig
from minifer.execution.backends.dense import RowsBackend, row_batch
from minifer.execution.forward_batch import ForwardBatch
from minifer.models.transformer import Transformer
from minifer.perf import bench
from minifer.text.byte_tokenizer import VOCAB_SIZE, byte_tokenizer
from minifer.text.help_topics import sections, split
from minifer.weights.hf import save_hf
from minifer.weights.quantized import Weight, dense

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB_SIZE,
    hidden_size=192,
    intermediate_size=384,
    num_layers=4,
    num_heads=12,
    num_kv_heads=6,
    head_dim=16,
    max_position_embeddings=1024,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    dtype="bfloat16",
    bos_token_id=256,
    eos_token_ids=(257, 259),  # the end of a document, and of a chat message
)


@dataclass(frozen=True)
class Recipe:
    """What decides the weights. Tokens of a step = rows · length, in both phases."""

    seed: int = 0
    steps: int = 2400
    tokens: int = 1024  # a step
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    warmup: int = 50
    long_after: float = 0.8  # this share of the steps on short rows, the rest on long ones
    short: int = 128
    long: int = 1024
    threads: int = 2


class TrainingBackend(RowsBackend):
    """Rows of one length, no KV cache, products in bfloat16; what is added up stays float32."""

    name = "training"

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None = None
    ) -> Tensor:
        out = F.linear(x.bfloat16(), dense(weight).bfloat16(), bias)
        return out if residual is None else residual + out


def loss_of(model: Transformer, batch: ForwardBatch, tokens: Tensor) -> Tensor:
    """Mean cross-entropy in nats a token of rows [B, S + 1]."""
    backend = TrainingBackend()
    hidden = model(replace(batch, token_ids=tokens[:, :-1].flatten()), None, backend)
    return F.cross_entropy(model.logits(hidden, backend), tokens[:, 1:].flatten())


@torch.inference_mode()
def held_out_loss(model: Transformer, stream: Tensor, length: int) -> float:
    """Bits a byte (special tokens count as bytes) over all full rows of `length`."""
    rows = (len(stream) - 1) // length
    batch = row_batch(1, length)
    starts = [i * length for i in range(rows)]
    losses = [loss_of(model, batch, stream[i : i + length + 1][None]) for i in starts]
    return float(torch.stack(losses).mean()) / math.log(2)


def learning_rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    if step < recipe.warmup:
        return recipe.learning_rate * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def new_model(recipe: Recipe) -> Transformer:
    """Float32 weights from the seed; what writes to the residual stream starts smaller (GPT-2)."""
    model = Transformer(CONFIG)
    model.init_weights(recipe.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_((2 * CONFIG.num_layers) ** -0.5)
    return model


def train(recipe: Recipe, stream: Tensor, log_every: int = 0) -> Transformer:
    """The whole run; returns the model in float32."""
    torch.set_num_threads(recipe.threads)
    model = new_model(recipe)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    norms = [p for p in model.parameters() if p.dim() != 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    generator = torch.Generator().manual_seed(recipe.seed)
    batches = {s: row_batch(recipe.tokens // s, s) for s in (recipe.short, recipe.long)}
    started = time.perf_counter()
    for step in range(recipe.steps):
        length = recipe.short if step < recipe.long_after * recipe.steps else recipe.long
        rows = recipe.tokens // length
        starts = torch.randint(len(stream) - length, (rows, 1), generator=generator)
        loss = loss_of(model, batches[length], stream[starts + torch.arange(length + 1)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        optimizer.step()
        if log_every and (step + 1) % log_every == 0:
            bits, seconds = loss.item() / math.log(2), time.perf_counter() - started
            print(f"step {step + 1:5d}  {bits:.3f} bits/byte  {seconds:4.0f} s", flush=True)
    return model


def save(folder: Path, model: Transformer) -> str:
    """Write the model's directory in bfloat16; returns the SHA-256 of `model.safetensors`."""
    save_hf(folder, model.to(torch.bfloat16), CONFIG)
    byte_tokenizer().save(folder)
    generation = {"bos_token_id": CONFIG.bos_token_id, "eos_token_id": list(CONFIG.eos_token_ids)}
    write_json(folder / "generation_config.json", generation)
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "minifer-tiny")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    arguments = parser.parse_args()
    recipe = Recipe(steps=arguments.steps)

    training, held_out = split(sections())
    started = time.perf_counter()
    model = train(recipe, training, log_every=100)
    seconds = time.perf_counter() - started
    with torch.no_grad():
        for parameter in model.parameters():  # what is reported is what is saved
            parameter.copy_(parameter.bfloat16())
    report = {
        "text": "pydoc_data.topics",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": bench.machine()["cpu"],
        "recipe": asdict(recipe),
        "training_tokens": len(training),
        "seconds": round(seconds),  # beside whatever else ran
        "cpu_seconds": round(time.process_time()),
        "held_out_tokens": len(held_out),
        "held_out_bits_per_byte": {
            f"rows of {length}": round(held_out_loss(model, held_out, length), 3)
            for length in (recipe.short, recipe.long)
        },
        "parameters": model.num_parameters,
        "sha256": save(arguments.out, model),
    }
    write_json(arguments.out / "training.json", report)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
