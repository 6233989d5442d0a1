"""Prompts of a text, in the tokens of the model that is asked."""

from __future__ import annotations

import argparse
from typing import Any


def prompt_tokens(arguments: argparse.Namespace) -> list[int]:
    """Token ids of --prompt-file; without it none, or of the text that ships with minifer where
    drafts are made: random tokens are answered with repetitions, which are easy to guess.

    Raises `ValueError` for an empty text.
    """
    file = arguments.prompt_file
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"--prompt-file {file} cannot be read: {reason}") from error
    elif getattr(arguments, "speculative_method", "none") != "none":
        from minifer.perf.quality import fixed_text

        text = fixed_text()
    else:
        return []
    ids: list[int] = _tokenizer(arguments.model).encode(text)
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
