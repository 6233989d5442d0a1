"""`minifer kernels`: what can be known about the GPU kernels, one sub-command each."""

from __future__ import annotations

from typing import Any

from minifer.cli import kernels_report, kernels_timeline, kernels_verify
from minifer.cli.parser import add_command

SUBCOMMANDS = (kernels_report, kernels_timeline, kernels_verify)


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "kernels QUESTION",
        lambda arguments: 2,  # argparse asks for a question before this is called
        summary="compile the GPU kernels and look at them, without a GPU",
        about="What can be known about the Triton kernels without the chip they are made for: "
        "compiled, proved, modelled. Nothing here needs a GPU, and nothing is measured; that is "
        "`minifer bench`.",
        examples=[
            ("kernels report", "registers, spills, shared memory, instructions"),
            ("kernels report --help", "its options"),
            ("kernels verify", "is the megakernel's schedule for Llama-3.2-1B sound?"),
            ("kernels timeline", "a decode step in seven ways, modelled on an H100"),
        ],
        code=[
            ("kernels/", "the kernels, one a file, each beside its slow twin"),
            ("kernels/mega/", "a whole decode step in one launch"),
            ("minifer/perf/timeline/", "a model of its time"),
        ],
    )
    questions = parser.add_subparsers(
        title="questions", metavar="QUESTION", required=True, prog="minifer kernels"
    )
    for command in SUBCOMMANDS:
        command.add(questions)
