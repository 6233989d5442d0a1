"""A model folder for the command line: real files, random weights, one token a byte."""

from __future__ import annotations

from pathlib import Path

from fakes import tiny_config

ABC = ("--allowed-token-ids", "97,98,99")  # what random weights say, kept legible


def write_model(folder: Path, max_position_embeddings: int = 512) -> Path:
    """A chat model of 288 tokens; its answers mean nothing."""
    import torch

    from minifer.models.registry import build_model
    from minifer.text.byte_tokenizer import byte_tokenizer
    from minifer.weights.hf import save_hf

    config = tiny_config(vocab_size=288, max_position_embeddings=max_position_embeddings)
    model = build_model(config, torch.float32)
    model.init_weights(seed=0, std=0.3)
    save_hf(folder, model, config)
    byte_tokenizer().save(folder)
    return folder
