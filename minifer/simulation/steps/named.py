"""Step times as a command line names them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from minifer.config import ModelConfig
from minifer.perf.costs import kv_bytes_per_token
from minifer.perf.devices import find_device
from minifer.simulation.steps.published import PUBLISHED_STEPS, published_kv_bytes
from minifer.simulation.steps.roofline import RooflineSteps
from minifer.simulation.steps.times import FittedSteps, FixedSteps, StepTimes

HELP = (
    "a published fit's name, a FILE that `minifer sim fit --json` wrote, fixed:SECONDS, or "
    "roofline:MODEL:DEVICE[:EFFICIENCY[:N]] (share of the data sheet's rates, GPUs)"
)


def find_steps(text: str) -> StepTimes:
    """A name of `PUBLISHED_STEPS`, "fixed:SECONDS", "roofline:MODEL:DEVICE[:EFFICIENCY[:N]]" with
    a model of `MODELS` and a device of `perf.devices`, or else a JSON file of fitted prices.

    Raises `ValueError` for what is none of them, with those there are.
    """
    if text in PUBLISHED_STEPS:
        return PUBLISHED_STEPS[text]
    kind, _, rest = text.partition(":")
    if kind == "fixed" and rest:
        return FixedSteps(_number("steps", rest))
    if kind == "roofline" and rest:
        return _roofline(rest)
    if Path(text).is_file():
        return load_steps(text)
    raise ValueError(
        f"steps must be a file, fixed:SECONDS, roofline:MODEL:DEVICE or one of "
        f"{', '.join(PUBLISHED_STEPS)}, got {text!r}"
    )


def find_kv_bytes(text: str) -> float | None:
    """Bytes of keys and values a token, of the model whose steps `text` names; None where it names
    no model. Raises as `find_steps`."""
    if text in PUBLISHED_STEPS:
        return published_kv_bytes(text)
    steps = find_steps(text)
    if isinstance(steps, RooflineSteps):
        return kv_bytes_per_token(steps.config, steps.element.kv)
    return None


def load_steps(path: str | Path) -> FittedSteps:
    """Prices from a JSON file. Raises `ValueError` naming the file where it holds none."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        return FittedSteps.from_dict(data)
    except ValueError as error:
        raise ValueError(f"{path} holds no step times: {error}") from None


def _roofline(text: str) -> RooflineSteps:
    model, *rest = text.split(":")
    if model not in MODELS or not 1 <= len(rest) <= 3:
        raise ValueError(
            "steps must be roofline:MODEL:DEVICE[:EFFICIENCY[:N]] with a model of "
            f"{', '.join(MODELS)}, got roofline:{text}"
        )
    efficiency = _number("the efficiency of steps", rest[1]) if len(rest) > 1 else 1.0
    num_devices = _number("the number of devices", rest[2]) if len(rest) > 2 else 1
    if not float(num_devices).is_integer():
        raise ValueError(f"the number of devices must be an integer, got {rest[2]}")
    return RooflineSteps(
        MODELS[model], find_device(rest[0]), efficiency, efficiency, int(num_devices)
    )


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {text!r}") from None


def _llama(width: int, mlp: int, layers: int, heads: int, tied: bool = False) -> ModelConfig:
    """Llama 3.x: 8 KV heads, a vocabulary of 128,256 (arxiv.org/abs/2407.21783, table 3)."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128_256,
        hidden_size=width,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=width // heads,
        max_position_embeddings=131_072,
        tie_word_embeddings=tied,
    )


MODELS: Mapping[str, ModelConfig] = {
    "llama-1b": _llama(2048, 8192, 16, 32, tied=True),
    "llama-8b": _llama(4096, 14_336, 32, 32),
    "llama-70b": _llama(8192, 28_672, 80, 64),
}
