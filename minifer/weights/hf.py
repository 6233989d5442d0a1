"""Hugging Face model directories: read one into a model, write a model into one.

A directory holds `config.json`, the tensors in `model.safetensors` (or in shards listed by
`model.safetensors.index.json`), and often `generation_config.json`. What config.json says and how
tensors are called is Hugging Face's way, or that of a family in `minifer.models.registry.FORMATS`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minifer.config import ModelConfig
from minifer.models.registry import (
    CheckpointFormat,
    by_path,
    format_of,
    format_of_architecture,
)
from minifer.weights.hf_config import config_from_hf, config_to_hf, token_ids
from minifer.weights.loading import Fill, LoadableModel, NamedWeights, fill_model
from minifer.weights.mapped import mapped_tensors
from minifer.weights.quantized import QuantizedWeight
from minifer.weights.quantized_loading import CODES, load_quantized, read_codes, refuse_loops

__all__ = [
    "config_from_hf",
    "config_to_hf",
    "load_config",
    "load_generation_defaults",
    "load_hf",
    "save_hf",
]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def load_hf(
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    fill: Fill = fill_model,
) -> tuple[Any, ModelConfig]:
    """Build the model of a directory in `dtype` (None: the checkpoint's) and fill it.

    The files are mapped and copied tensor by tensor: what is held twice is one tensor. The
    configuration's `eos_token_ids` are those of `load_generation_defaults`. fill: makes the model,
    or a part of it, in place of `fill_model`.

    Raises `ValueError`: no such directory; a file that is missing or torn; whatever
    `config_from_hf` and `load_weights` refuse.
    """
    folder = Path(path)
    config = load_config(folder)
    config = replace(config, eos_token_ids=load_generation_defaults(folder)["eos_token_ids"])
    form = format_of_architecture(config.architecture)
    tensors = stored_tensors(folder, form)
    named = tensors if form is None else by_path(form.read_tensors)(tensors, config)
    return fill(config, dtype or getattr(torch, config.dtype), device, named), config


def load_hf_quantized(
    path: str | Path, mode: str, dtype: torch.dtype
) -> tuple[Any, ModelConfig, str | None]:
    """`load_hf` on the CPU with codes for matrices; the last is what to tell the user.

    mode: "int8" and "int4" quantise each tensor when it is read; "file" takes the codes that
    `minifer pull` kept below the converted weights. Raises `ValueError` as `load_hf` and
    `load_quantized` do, and for "file" where there are no codes.
    """
    folder = Path(path)
    config = load_config(folder)
    config = replace(config, eos_token_ids=load_generation_defaults(folder)["eos_token_ids"])
    refuse_loops(config, mode)
    form = format_of_architecture(config.architecture)
    named: NamedWeights = stored_tensors(folder, form)
    if mode == "file":
        if not (folder / CODES).is_file():
            raise ValueError(
                f"quantize=file needs the codes of a GGUF file, and {folder} has no {CODES}: name "
                "the .gguf file as the model, or run `minifer pull` again if this is its model, or "
                "use quantize=int8 or int4"
            )
        named = _with_codes(_weight_files(folder, form), folder / CODES)
    model, notice = load_quantized(config, dtype, named, mode)
    return model, config, notice


def stored_tensors(
    folder: Path, form: CheckpointFormat | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder's safetensors files, mapped, one at a time, as they are named there.

    Raises `ValueError`: at once for files that are missing, later for one that is torn.
    """
    return _tensors(_weight_files(folder, form))


def load_config(folder: Path) -> ModelConfig:
    """The configuration alone, without its end tokens. Raises `ValueError` as `load_hf` does."""
    if not folder.is_dir():
        raise ValueError(f"there is no model directory {str(folder)!r}; check the path")
    source = folder / "config.json"
    raw = read_json(source)
    form = format_of(raw)
    read = config_from_hf if form is None else by_path(form.read_config)
    config: ModelConfig = read(raw, str(source))
    return config


def load_generation_defaults(path: str | Path) -> dict[str, Any]:
    """What the model's makers set for generation: `eos_token_ids` and sampling fields.

    The end tokens are the union of `generation_config.json`'s and `config.json`'s, in this order
    (the tokenizer's own is joined by whoever holds one). Of temperature, top_k, top_p, min_p and
    repetition_penalty the dictionary holds those that the file sets.
    """
    folder = Path(path)
    generation: dict[str, Any] = {}
    if (folder / "generation_config.json").exists():
        generation = read_json(folder / "generation_config.json")
    config = read_json(folder / "config.json")
    ends = token_ids(generation.get("eos_token_id")) + token_ids(config.get("eos_token_id"))
    defaults: dict[str, Any] = {"eos_token_ids": tuple(dict.fromkeys(ends))}
    for key in _SAMPLING:
        if generation.get(key) is not None:
            defaults[key] = generation[key]
    return defaults


def save_hf(path: str | Path, model: LoadableModel, config: ModelConfig) -> None:
    """Write `config.json` and `model.safetensors`, unfused, as other engines read them.

    Each file is written under a temporary name and renamed, the configuration last: a directory
    with a `config.json` is complete. `torch_dtype` is that of the model's weights.

    Raises `ValueError` when the architecture cannot express the configuration.
    """
    folder = Path(path)
    if any(isinstance(module, QuantizedWeight) for module in model.modules()):
        raise ValueError(
            "model must have no quantised weights to be saved: its checkpoint holds more than "
            "codes do; load it with quantize=none"
        )
    tensors = {
        part.name: model.get_parameter(part.parameter).detach()[part.start : part.stop]
        for part in model.weight_parts()
    }
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    form = format_of_architecture(config.architecture)
    write = config_to_hf if form is None else by_path(form.write_config)
    text = json.dumps(write(replace(config, dtype=dtype)), indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{_SINGLE}.{os.getpid()}.tmp"
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
        temporary.chmod(0o644)  # save_file keeps it to its owner
        temporary.replace(folder / _SINGLE)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(folder / "config.json")
    finally:
        temporary.unlink(missing_ok=True)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises `ValueError` naming the file that is missing or bad."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{file} is missing; a model directory needs config.json and safetensors files"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object; download it again")
    return value


def _weight_files(
    folder: Path, form: CheckpointFormat | None = None
) -> dict[Path, list[str] | None]:
    """Files to read → the tensors the index promises in each (None: all there are)."""
    if (folder / _SINGLE).exists():
        return {folder / _SINGLE: None}
    if (folder / _INDEX).exists():
        index = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise ValueError(f"{folder / _INDEX} has no 'weight_map'; download it again")
        shards: dict[Path, list[str] | None] = {
            folder / shard: [name for name in index if index[name] == shard]
            for shard in sorted(set(index.values()))
        }
        missing = [file.name for file in shards if not file.exists()]
        if missing:
            raise ValueError(
                f"{folder} lacks {', '.join(missing)}, named in {_INDEX}; download what is missing"
            )
        return shards
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return {found[0]: None}
    if found:
        raise ValueError(
            f"{folder} holds {len(found)} safetensors files but no {_INDEX}, which says what "
            "belongs to the model; download it too"
        )
    pickled = pickled_files(folder)
    if form is not None:
        held = f"pickled weights only ({pickled[0].name})" if pickled else "no safetensors files"
        raise ValueError(f"{folder} holds {held}. {form.without_safetensors}")
    if pickled:
        raise ValueError(
            f"{folder} holds pickled weights only ({pickled[0].name}); unpickling can run any "
            "code, so minifer reads safetensors. Take a revision that has them, or convert with "
            "transformers: AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)"
        )
    raise ValueError(f"{folder} holds no safetensors files; download the model's weights")


def pickled_files(folder: Path) -> list[Path]:
    """Files that torch or Python pickled, sorted."""
    return sorted(f for f in folder.iterdir() if f.suffix in (".bin", ".pt", ".pth"))


def _with_codes(files: dict[Path, list[str] | None], codes: Path) -> NamedWeights:
    """The weights that are codes, then the tensors of the files that are not."""
    coded = set()
    for name, weight in read_codes(codes):
        coded.add(name)
        yield name, weight
    yield from _tensors(files, coded)


def _tensors(
    files: dict[Path, list[str] | None], skip: Container[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the files, mapped, one at a time, but those whose names are in `skip`.

    Raises `ValueError` for a torn file.
    """
    for file, promised in files.items():
        try:
            with safe_open(file, framework="pt", device="cpu") as shard:
                names = list(shard.keys())
                absent = sorted(set(promised or ()) - set(names))
                if absent:
                    raise ValueError(
                        f"{file} lacks {absent[0]} and {len(absent) - 1} more tensors that "
                        f"{_INDEX} places there; download both again"
                    )
            wanted = names if promised is None else promised
            yield from mapped_tensors(file, [name for name in wanted if name not in skip])
        except SafetensorError as error:
            raise ValueError(
                f"{file} is torn or not a safetensors file ({error}); download it again"
            ) from error
