"""From the name a user gives to a model that can run: the one entrance the engine uses."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from minifer.config import DTYPES, QUANTIZE, ModelConfig
from minifer.models.registry import by_path, format_of_architecture
from minifer.text.tokenizer import Tokenizer
from minifer.weights.gguf import (
    GGUFFile,
    build_from_gguf,
    config_from_gguf,
    hf_codes,
    hf_tensors,
)
from minifer.weights.gguf_tokenizer import tokenizer_from_gguf
from minifer.weights.hf import (
    load_config,
    load_generation_defaults,
    load_hf,
    load_hf_quantized,
)
from minifer.weights.loading import Fill, fill_model
from minifer.weights.published import published_elsewhere
from minifer.weights.pull import PullError, hub_download, pulled_model
from minifer.weights.quantized_loading import load_quantized

DEFAULT_NAMES = ("default", "smollm2")
# Names of the models inside the wheel → their folders.
BUNDLED = {"tiny": "minifer-tiny", "minifer-tiny": "minifer-tiny", "parcae-tiny": "parcae-tiny"}
_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")  # ./x and ../x are paths


@dataclass(frozen=True)
class ResolvedModel:
    """path: a Hugging Face folder or a .gguf file. notice: what a user should know, or None."""

    path: Path
    notice: str | None = None


@dataclass(frozen=True)
class LoadedModel:
    """A model and everything its checkpoint says about using it.

    generation_defaults: sampling fields the makers recommend (`temperature`, `top_p`, …).
    eos_token_ids: all tokens that end a reply, by generation_config, config or tokenizer.
    """

    model: Any
    config: ModelConfig
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    path: Path
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    notice: str | None = None


def model_label(asked: str | Path, path: Path) -> str:
    """A model's name for people: as it was asked for; `default` by the folder it was found in."""
    return path.name.removesuffix(".gguf") if asked == "default" else str(asked)


def resolve_model(name_or_path: str | Path) -> ResolvedModel:
    """Find a model: a short name, a folder, a .gguf file, or a hub id "org/name".

    `default` (or `smollm2`) is what `minifer pull` fetched; before that, the bundled
    `minifer-tiny` steps in for `default`, with a notice. `minifer-tiny` and `parcae-tiny` are
    bundled. A path that exists wins over a hub id.

    Raises `ValueError` saying what was looked for and what to do.
    """
    name = str(name_or_path)
    if name in BUNDLED:
        return ResolvedModel(_bundled(BUNDLED[name]))
    if name in DEFAULT_NAMES:
        if (pulled := pulled_model()) is not None:
            return ResolvedModel(pulled)
        if name != "default":
            raise ValueError(f"model {name!r} was not pulled yet: run `minifer pull`")
        return ResolvedModel(
            _bundled("minifer-tiny"),
            "SmolLM2-135M-Instruct was not pulled yet, using the bundled minifer-tiny, which "
            "writes toy text: run `minifer pull` for the real one",
        )
    path = Path(name).expanduser()
    if path.is_dir():
        return ResolvedModel(_in_folder(path))
    if path.suffix == ".gguf":
        return ResolvedModel(path)  # whether it exists is the reader's first question
    if path.exists():
        raise ValueError(f"model {name!r} is a file, but not a .gguf file; give its folder")
    if (advice := published_elsewhere(name)) is not None:
        raise ValueError(advice)
    if _HUB_ID.fullmatch(name):
        try:
            return ResolvedModel(hub_download(name))
        except PullError as error:
            raise ValueError(f"there is no folder {name!r}, and as a hub model: {error}") from error
    raise ValueError(
        f"model {name!r} is neither a short name ({', '.join((*DEFAULT_NAMES, *BUNDLED))}) nor a "
        "folder or .gguf file that exists, nor a hub id of the form org/name"
    )


def read_config(name_or_path: str | Path) -> ModelConfig:
    """The configuration of a model whose weights are not read. Raises `ValueError`."""
    path = resolve_model(name_or_path).path
    return config_from_gguf(GGUFFile(path)) if path.suffix == ".gguf" else load_config(path)


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """The tokenizer of a model whose weights are not read. Raises `ValueError`."""
    path = resolve_model(name_or_path).path
    if path.suffix == ".gguf":
        return tokenizer_from_gguf(GGUFFile(path))
    return _read_tokenizer(path, load_config(path))


def _read_tokenizer(folder: Path, config: ModelConfig) -> Tokenizer:
    form = format_of_architecture(config.architecture)
    read = Tokenizer.from_dir if form is None else by_path(form.read_tokenizer)
    tokenizer: Tokenizer = read(folder)
    return tokenizer


def load_model(
    name_or_path: str | Path,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    quantize: str = "none",
    fill: Fill = fill_model,
) -> LoadedModel:
    """Resolve a name and load model, tokenizer and generation defaults.

    dtype: "float32", "bfloat16", "float16", or "auto": float32 on a CPU, the checkpoint's on any
    other device. device: "auto" takes a GPU when there is one. quantize: "none", "file", "int8" or
    "int4", see `load_quantized`; matrices are codes, on a CPU, and "auto" is bfloat16 for the rest.
    fill: makes the model from its tensors; another one may keep a part of them (not of codes).

    Raises `ValueError`.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if quantize not in QUANTIZE:
        raise ValueError(f"quantize must be one of {', '.join(QUANTIZE)}, got {quantize!r}")
    device = _usable_device(device)
    coded = quantize != "none"
    if coded and device.type != "cpu":
        raise ValueError(
            f"quantize={quantize} runs on a CPU only, got device={device}: use device=cpu, or "
            "quantize=none"
        )
    if dtype == "auto":
        on_cpu = torch.bfloat16 if coded else torch.float32
        wanted = on_cpu if device.type == "cpu" else None
    else:
        wanted = getattr(torch, dtype)
    resolved = resolve_model(name_or_path)
    defaults: dict[str, Any] = {}
    notices = [resolved.notice]
    if resolved.path.suffix == ".gguf":
        file = GGUFFile(resolved.path)
        config = config_from_gguf(file)
        if coded:
            named = (hf_codes if quantize == "file" else hf_tensors)(file, config)
            model, notice = load_quantized(config, wanted or torch.bfloat16, named, quantize)
            notices.append(notice)
        else:
            model = build_from_gguf(file, config, wanted, device, fill)
        tokenizer = tokenizer_from_gguf(file)
    else:
        if coded:
            model, config, notice = load_hf_quantized(
                resolved.path, quantize, wanted or torch.bfloat16
            )
            notices.append(notice)
        else:
            model, config = load_hf(resolved.path, wanted, device, fill)
        tokenizer = _read_tokenizer(resolved.path, config)
        defaults = load_generation_defaults(resolved.path)
    ends = {*defaults.pop("eos_token_ids", ()), *config.eos_token_ids, tokenizer.eos_token_id}
    return LoadedModel(
        model=model,
        config=config,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(end for end in ends if end is not None),
        path=resolved.path,
        generation_defaults=defaults,
        notice="; ".join(notice for notice in notices if notice) or None,
    )


def _usable_device(device: str | torch.device) -> torch.device:
    """A device by its name; asked for memory now, so that its absence is not found out later."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # without CUDA torch asserts
        reason = " ".join(str(error).split()).partition(". ")[0]  # torch tells all it knows
        raise ValueError(
            f'device must be "auto", "cpu" or one that torch finds here, got {str(device)!r}: '
            f"{reason}"
        ) from error
    return torch.device(device)


def _bundled(name: str) -> Path:
    """The folder of a model inside the wheel."""
    folder = Path(str(resources.files("minifer") / "assets" / name))
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"the bundled model is missing from {folder}: reinstall minifer, or run `minifer pull`"
        )
    return folder


def _in_folder(folder: Path) -> Path:
    """A Hugging Face folder, or the single GGUF model a folder holds."""
    if (folder / "config.json").is_file():
        return folder
    models = [f for f in sorted(folder.glob("*.gguf")) if not _later_part(f)]
    if len(models) == 1:
        return models[0]
    found = f"{len(models)} GGUF files (name the one you want)" if models else "no config.json"
    raise ValueError(f"folder {folder} is not a model: it holds {found}")


def _later_part(file: Path) -> bool:
    """Part 2, 3, … of a split model: found through part 1."""
    part = re.search(r"-(\d{5})-of-\d{5}\.gguf$", file.name)
    return part is not None and int(part[1]) > 1
