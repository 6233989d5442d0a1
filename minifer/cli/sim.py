"""`minifer sim`: serving on a virtual clock, one sub-command each."""

from __future__ import annotations

from typing import Any

from minifer.cli import sim_log, sim_run, sim_workload
from minifer.cli.parser import add_command


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "sim COMMAND",
        lambda arguments: 2,  # argparse asks for a command before this is called
        summary="simulate serving: many nodes, routers, hours of traffic in seconds",
        about="A discrete-event simulator around the engine's own scheduler, KV manager and "
        "routing policies. Only time is made up: a step takes what a fit to measured steps says, "
        "published or of your own engine. What is simulated is no measurement, and says so.",
        examples=[
            ("sim run", "one node, step times of an A100, traffic like Azure's"),
            ("sim run --help", "nodes, roles, routers, disciplines, traffic"),
            ("sim workload mooncake-conversation", "what such traffic is like"),
            ("sim record log.jsonl --rate 2", "serve traffic with the real engine, keep the log"),
            ("sim fit log.jsonl --json steps.json", "the prices of its steps"),
            ("sim validate log.jsonl", "simulate the same, and print the error"),
        ],
        code=[
            ("minifer/simulation/simulator.py", "the clock, and what happens on it"),
            ("minifer/simulation/steps/times.py", "how long a step takes"),
            ("minifer/simulation/measures/metrics.py", "what a run was worth"),
        ],
    )
    simulations = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, prog="minifer sim"
    )
    sim_run.add(simulations)
    sim_workload.add(simulations)
    sim_log.add_record(simulations)
    sim_log.add_fit(simulations)
    sim_log.add_validate(simulations)
