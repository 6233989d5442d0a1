"""A model folder for the command line: real files, random weights, one token a byte."""

from __future__ import annotations

from pathlib import Path

from fakes import tiny_config, tiny_model
from loop_fakes import loop_model, loop_model_config

ABC = ("--allowed-token-ids", "97,98,99")  # what random weights say, kept legible


def write_model(folder: Path, max_position_embeddings: int = 512) -> Path:
    """A chat model of 288 tokens; its answers mean nothing."""
    from minifer.text.byte_tokenizer import byte_tokenizer
    from minifer.weights.hf import save_hf

    config = tiny_config(vocab_size=288, max_position_embeddings=max_position_embeddings)
    save_hf(folder, tiny_model(config), config)
    byte_tokenizer().save(folder)
    return folder


def write_loop_model(folder: Path) -> Path:
    """The same of a loop model, for up to 8 loops."""
    from minifer.text.byte_tokenizer import byte_tokenizer
    from minifer.weights.hf import save_hf

    config = loop_model_config(vocab_size=288, max_position_embeddings=512)
    save_hf(folder, loop_model(config), config)
    byte_tokenizer().save(folder)
    return folder
