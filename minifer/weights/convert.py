"""GGUF file → Hugging Face folder, once, so that later starts only map files.

Weights are stored in float32 when the file holds quantised blocks: a Q4_1 weight is
scale · q + offset with two float16 numbers, which takes up to 24 bits. float32 keeps every
dequantised value to the bit; float16 would round values by up to 2**-11 of their size and
bfloat16 by 2**-8, and close greedy picks would differ from what other engines read out of the
same file. The price is disk: four bytes a weight.

The codes of Q4_0, Q4_1 and Q8_0 matrices are kept too (`quantized/model.safetensors`, the size of
the GGUF file), so that `quantize="file"` finds them without opening it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tqdm import tqdm

from minifer.models.registry import build_model
from minifer.weights.atomic import atomic_folder
from minifer.weights.gguf import GGUFFile, config_from_gguf, hf_codes, hf_tensors
from minifer.weights.gguf_tokenizer import tokenizer_from_gguf
from minifer.weights.hf import save_hf
from minifer.weights.loading import load_weights
from minifer.weights.quantized_loading import CODES, save_codes


def convert_gguf(gguf_path: str | Path, folder: str | Path, progress: bool = True) -> None:
    """Write config.json, model.safetensors, the codes if there are any, tokenizer files and
    generation_config.json.

    `folder` is replaced as a whole at the end: it is never seen half written. Raises `ValueError`
    as `load_gguf` and `tokenizer_from_gguf` do.
    """
    with atomic_folder(Path(folder)) as temporary:
        write_converted(gguf_path, temporary, progress)


def write_converted(gguf_path: str | Path, folder: Path, progress: bool = True) -> None:
    """The files of `convert_gguf`, written into a folder that is already there."""
    file = GGUFFile(gguf_path)
    tokenizer_from_gguf(file).save(folder)
    config = config_from_gguf(file)
    model = build_model(config, getattr(torch, config.dtype))
    quiet = {} if progress else {"disable": True}  # no argument: TQDM_DISABLE decides
    named = hf_tensors(file, config)
    load_weights(model, tqdm(named, "convert", len(file.tensors), unit=" tensors", **quiet))
    save_hf(folder, model, config)
    save_codes(folder / CODES, hf_codes(file, config))
    generation = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }
    text = json.dumps(generation, indent=2) + "\n"
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
