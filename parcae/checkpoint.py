"""Parcae's published checkpoints ↔ a folder that this project loads.

A checkpoint is a `config.json` that says `"_class_name": "ParcaeConfig"` and a
`pytorch_model.bin`; the tokenizer lies in a repository of its own, which holds `tokenizer.json`
and nothing else (https://github.com/sandyresearch/parcae). `convert_checkpoint` makes one folder
of the two that loads without unpickling: `minifer parcae convert SRC DST`.

=====================================================  =========================================
in a checkpoint                                        here
=====================================================  =========================================
transformer.wte.weight; lm_head.weight is the same     one tensor; a head is compared and dropped
value_embeds.K.weight, K = 0 … P + R + C − 1           the same names, every second K
transformer.prelude.I, .core_block.I, .coda.I          the stacks; c_q, c_k, c_v are one matrix
transformer.adapter.A_log, .dt_bias, .B                the injection
transformer.C.weight, .ln_prelude.weight, .ln_f.weight
freqs_cis [1, S, 1, C/2, 2], cos and sin               compared with config.json and dropped
module., _orig_mod., model. before any name            wrappers of a trainer, dropped
=====================================================  =========================================
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from minifer.config import ModelConfig
from minifer.models.registry import format_of_architecture
from minifer.models.rope import inverse_frequencies
from minifer.parcae.config import config_from_parcae, config_to_parcae
from minifer.parcae.model import Parcae
from minifer.text.tokenizer import Tokenizer
from minifer.weights.atomic import atomic_folder
from minifer.weights.hf import load_config, pickled_files, save_hf, stored_tensors
from minifer.weights.loading import load_weights
from minifer.weights.published import PARCAE_TOKENIZER

__all__ = [
    "config_from_parcae",
    "config_to_parcae",
    "convert_checkpoint",
    "read_bin",
    "read_tensors",
    "read_tokenizer",
]

SPECIAL_TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
_PREFIXES = ("module.", "_orig_mod.", "model.")
_NESTED = ("model", "state_dict")  # where a trainer's file keeps the weights
_ROTARY = "freqs_cis"
_ALWAYS_FLOAT32 = (".A_log", ".dt_bias")  # whatever the rest is
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# -- tensors


def read_tensors(
    named: Iterable[tuple[str, Tensor]], config: ModelConfig
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint under their published names; the rotary table is left out.

    Raises `ValueError` for a rotary table that is not the one of config.json.
    """
    for name, tensor in named:
        name = _bare(name)
        if name == _ROTARY:
            _check_rotary(tensor, config)
        else:
            yield name, tensor


def _bare(name: str) -> str:
    """A name without the prefixes that wrappers of a model put before it, however many."""
    while name.startswith(_PREFIXES):
        name = name.partition(".")[2]
    return name


def _check_rotary(table: Tensor, config: ModelConfig) -> None:
    """cos and sin [1, S, 1, C/2, 2] are computed here; another table is another model's."""
    C = config.head_dim
    if table.dim() != 5 or table.shape[1] < 2 or table.shape[2:] != (1, C // 2, 2):
        raise ValueError(
            f"{_ROTARY} must have the shape [1, S, 1, {C // 2}, 2], got {list(table.shape)}; "
            "the weights belong to another configuration"
        )
    positions = torch.arange(min(16, table.shape[1]))  # few, so that bfloat16 tells them apart
    angles = positions[:, None] * inverse_frequencies(config.rope, C)
    ours = torch.stack([angles.cos(), angles.sin()], dim=-1)
    error = float((table[0, : len(positions), 0].float() - ours).abs().max())
    if not error < 0.02:
        raise ValueError(
            f"{_ROTARY} differs by {error:.3g} from what rope_base = {config.rope.theta:g} of "
            "config.json gives; the weights belong to another configuration"
        )


def read_bin(file: str | Path) -> dict[str, Tensor]:
    """The tensors of a pickled checkpoint by name, mapped into memory.

    Only tensors and plain containers are unpickled: no code runs. Raises `ValueError` for a file
    that is missing, torn, of torch's old format or holds anything else.
    """
    path = Path(file)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise ValueError(f"there is no file {str(path)!r}; check the path") from None
    except Exception as error:  # of a damaged pickle it may be any: KeyError, AssertionError, …
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path} is torn, or not a file of tensors alone as torch writes it ({reason}); "
            "download it again, or save its state_dict with torch.save"
        ) from error
    for key in _NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"{path} must hold tensors by name, got {type(content).__name__}")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ValueError(
                f"{path} must hold tensors by name, got {type(value).__name__} for {name!r}"
            )
        if value.layout != torch.strided or value.is_meta:
            kind = "meta" if value.is_meta else str(value.layout)
            raise ValueError(f"{path} must hold dense tensors, got a {kind} one for {name!r}")
    return dict(content)


# -- tokenizer


def read_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a folder. One without names for its special tokens, as it is published,
    gets those of `SPECIAL_TOKENS`, and begins every text with `<|bos|>`, as training did.

    Raises `ValueError` as `Tokenizer.from_dir` does, and when these tokens are not in it.
    """
    tokenizer = Tokenizer.from_dir(folder)
    if tokenizer.bos_token_id is not None or tokenizer.eos_token_id is not None:
        return tokenizer
    missing = [text for text in SPECIAL_TOKENS.values() if tokenizer.token_to_id(text) is None]
    if missing:
        raise ValueError(
            f"the tokenizer in {folder} names no special tokens and lacks {', '.join(missing)}; "
            f"take the one of {PARCAE_TOKENIZER}, or name bos_token and eos_token in "
            "tokenizer_config.json"
        )
    return Tokenizer(
        tokenizer.backend_tokenizer,
        special_tokens=SPECIAL_TOKENS,
        chat_template=tokenizer.chat_template,
        add_bos_token=True,
    )


# -- conversion


def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    tokenizer: str | Path | None = None,
    progress: bool = True,
) -> ModelConfig:
    """Write `target`: config.json, model.safetensors, tokenizer files and generation_config.json.

    source: a folder with config.json and one pickled file or safetensors. tokenizer: a folder with
    tokenizer.json; None: `source`. The weights keep their dtype. `target` appears whole or not at
    all; what an earlier conversion left there is replaced, anything else is refused.

    Raises `ValueError`: files that are missing; whatever `config_from_parcae`, `read_bin`,
    `load_weights` and `read_tokenizer` refuse.
    """
    source, target = Path(source), Path(target)
    config = load_config(source)
    if config.loop is None:
        raise ValueError(f"{source} holds a {config.architecture}, which needs no conversion")
    _check_target(source, target)
    words = read_tokenizer(source if tokenizer is None else tokenizer)
    if words.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer must have at most vocab_size = {config.vocab_size} tokens, got "
            f"{words.vocab_size}; it belongs to another model"
        )
    ends = (words.eos_token_id,) if words.eos_token_id is not None else ()
    config = replace(
        config,
        bos_token_id=words.bos_token_id,
        eos_token_ids=tuple(dict.fromkeys((*ends, *config.eos_token_ids))),
    )
    stored = list(read_tensors(_stored(source), config))
    dtype = _widest(stored)
    config = replace(config, dtype=str(dtype).removeprefix("torch."))
    model = Parcae(config, dtype)
    quiet = {} if progress else {"disable": True}  # no argument: TQDM_DISABLE decides
    load_weights(model, tqdm(stored, "convert", unit=" tensors", **quiet))
    generation = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }
    with atomic_folder(target) as temporary:
        words.save(temporary)
        text = json.dumps(generation, indent=2) + "\n"
        (temporary / "generation_config.json").write_text(text, encoding="utf-8")
        save_hf(temporary, model, config)
    return config


def _stored(folder: Path) -> Iterable[tuple[str, Tensor]]:
    """The tensors of a folder: of safetensors, or of the one pickled file there."""
    pickled = pickled_files(folder)
    if any(folder.glob("*.safetensors")) or not pickled:
        return stored_tensors(folder, format_of_architecture("ParcaeForCausalLM"))
    if len(pickled) > 1:
        named = [file for file in pickled if file.name == "pytorch_model.bin"]
        if not named:
            raise ValueError(
                f"{folder} must hold one pickled file or a pytorch_model.bin, got "
                f"{', '.join(file.name for file in pickled)}"
            )
        pickled = named
    return read_bin(pickled[0]).items()


def _widest(named: Iterable[tuple[str, Tensor]]) -> torch.dtype:
    """A dtype that holds every weight to the bit. Raises `ValueError` for what is no weight."""
    found: set[torch.dtype] = set()
    for name, tensor in named:
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"{name} must be one of {', '.join(map(str, _DTYPES))}, got {tensor.dtype}"
            )
        if not name.endswith(_ALWAYS_FLOAT32):
            found.add(tensor.dtype)
    return found.pop() if len(found) == 1 else torch.float32


def _check_target(source: Path, target: Path) -> None:
    """Replacing the target must not take anything with it."""
    here, there = source.resolve(), target.resolve()
    if here == there or there in here.parents:
        raise ValueError(f"target must not be or hold {source}, got {str(target)!r}")
    if target.is_dir():
        found = {file.name for file in target.iterdir()}
        if not found or {"config.json", "model.safetensors", "generation_config.json"} <= found:
            return
    if target.exists():
        raise ValueError(
            f"target must be a new folder or one of an earlier conversion, got {str(target)!r}; "
            "remove it first"
        )
