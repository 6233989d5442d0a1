"""Prompts of a text: `--prompt-file`, in the tokens of the model that is asked."""

from __future__ import annotations

import argparse
from typing import Any


def prompt_tokens(arguments: argparse.Namespace) -> list[int]:
    """Token ids of --prompt-file; none without it. Raises `ValueError` for an empty text."""
    file = arguments.prompt_file
    if file is None:
        return []
    ids: list[int] = _tokenizer(arguments.model).encode(file.read_text(encoding="utf-8"))
    if not ids:
        raise ValueError(f"--prompt-file must hold at least one token, {file} is empty")
    return ids


def _tokenizer(model: str) -> Any:
    """A model's tokenizer without its weights."""
    from minifer.models.registry import by_path, format_of_architecture
    from minifer.text.tokenizer import Tokenizer
    from minifer.weights.gguf import GGUFFile
    from minifer.weights.gguf_tokenizer import tokenizer_from_gguf
    from minifer.weights.resolve import read_config, resolve_model

    path = resolve_model(model).path
    if path.suffix == ".gguf":
        return tokenizer_from_gguf(GGUFFile(path))
    form = format_of_architecture(read_config(model).architecture)
    return (Tokenizer.from_dir if form is None else by_path(form.read_tokenizer))(path)
