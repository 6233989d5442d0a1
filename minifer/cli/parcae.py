"""`minifer parcae`: the laboratory of the loop model, one sub-command an experiment."""

from __future__ import annotations

from typing import Any

from minifer.cli import (
    parcae_batching,
    parcae_convert,
    parcae_laws,
    parcae_stability,
    parcae_tradeoff,
)
from minifer.cli.parser import add_command

SUBCOMMANDS = (parcae_stability, parcae_laws, parcae_tradeoff, parcae_batching, parcae_convert)


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "parcae EXPERIMENT",
        lambda arguments: 2,  # argparse asks for an experiment before this is called
        summary="the loop model: its stability, its scaling laws, its depth in the engine",
        about="Parcae applies its middle layers T times with the same weights. These commands show "
        "on a CPU, in minutes, what keeps that stable, what more loops are worth, and what they "
        "cost to serve. To generate with a loop model use `minifer generate --model parcae-tiny`; "
        "--num-loops sets the depth.",
        examples=[
            ("parcae stability", "spectral radius and state norm, forced and trained"),
            ("parcae laws --jobs 2", "what more loops are worth, in training and afterwards"),
            ("parcae tradeoff", "what they cost through the server, and what each lost loop loses"),
            ("parcae batching", "requests of different depth in one step, by counting"),
            ("parcae convert --help", "run a published checkpoint"),
        ],
        code=[
            ("parcae/injection.py", "the linear system at the start of an iteration"),
            ("parcae/model.py", "the stages: prelude, loop, coda"),
            ("parcae/lab/", "the experiments"),
            ("minifer/execution/loops/", "how the engine schedules depth"),
        ],
    )
    experiments = parser.add_subparsers(
        title="experiments", metavar="EXPERIMENT", required=True, prog="minifer parcae"
    )
    for command in SUBCOMMANDS:
        command.add(experiments)
