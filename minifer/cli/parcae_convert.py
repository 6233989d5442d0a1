"""`minifer parcae convert`: a published checkpoint → a folder that loads without unpickling."""

from __future__ import annotations

import argparse
from typing import Any

from minifer.cli.parser import add_command


def add(experiments: Any) -> None:
    parser = add_command(
        experiments,
        "convert SRC DST",
        run,
        summary="a published checkpoint, once, into a folder that every command reads",
        about="Parcae is published as pickled weights (pytorch_model.bin), and its tokenizer in a "
        "repository of its own that does not say which tokens begin and end a text. Check both and "
        "write one folder with safetensors and everything that generating needs. The file is "
        "read with torch's weights_only, so that nothing in it runs. Every tensor must be there, "
        "once, in its shape. DST appears whole or not at all; safe to run again.",
        examples=[
            (
                "parcae convert parcae-140m ready --tokenizer parcae-tokenizer",
                "folders with the files of SandyResearch/parcae-140m and …/parcae-tokenizer",
            ),
            ("generate --model ready 'Once upon'", "use it"),
        ],
        code=[
            ("parcae/checkpoint.py", "names of tensors, pickled files, the tokenizer"),
            ("parcae/config.py", "which fields of config.json decide the model"),
        ],
        prog="minifer parcae",
    )
    parser.add_argument("source", metavar="SRC", help="folder with config.json and weights")
    parser.add_argument("target", metavar="DST", help="new folder, or one of an earlier conversion")
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", help="where tokenizer.json lies (default: SRC)"
    )


def run(arguments: argparse.Namespace) -> int:
    from minifer.parcae.checkpoint import convert_checkpoint

    config = convert_checkpoint(arguments.source, arguments.target, arguments.tokenizer)
    loop = config.loop
    assert loop is not None  # of a loop model
    print(
        f"{arguments.target}: {loop.prelude} + {loop.core} + {loop.coda} layers of width "
        f"{config.hidden_size}, {loop.mean_recurrence} loops, {config.dtype}"
    )
    return 0
