"""`minifer serve --replicas N`: several engines behind one address."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifer.cli import session
from minifer.cli.parser import Parser, engine_arguments, engine_fields
from minifer.config import EngineConfig

if TYPE_CHECKING:
    from minifer.serving.settings import ServerSettings

POLICY = "prefix_affinity"  # of `ReplicaSettings`, which lives behind the server extra


def add_options(parser: Parser) -> None:
    group = parser.add_argument_group(
        "replicas",
        "Several engines, each in a process of its own, behind one address. One that dies is\n"
        "started again; its requests go to another, or end with an error where their answer had\n"
        "begun. SIGHUP replaces all processes, one by one, and loses no request.",
    )
    group.add_argument("--replicas", type=int, metavar="N", help="how many engines (default: one)")
    group.add_argument(
        "--router",
        metavar="POLICY",
        help="who gets a request: random, round_robin, least_load, power_of_two, least_work, "
        "prefix_affinity, dynamo, cache_aware or cold_warm, with options after a colon, such as "
        f"prefix_affinity:load_factor=1.5 (default: {POLICY})",
    )


def check(arguments: argparse.Namespace) -> None:
    """Raises `ValueError` for options that make no sense, before anything is loaded."""
    if arguments.events is not None and (arguments.disaggregate or arguments.ray):
        raise ValueError("--events is for one engine, or for --replicas")
    if arguments.replicas is None and arguments.disaggregate is None:
        if arguments.router is not None and not arguments.ray:
            raise ValueError("--router needs --replicas: one engine has no choice")
        return
    if arguments.replicas is not None and arguments.replicas < 1:
        raise ValueError(f"--replicas must be at least 1, got {arguments.replicas}")
    from minifer.routing.policies import make_policy

    make_policy(arguments.router or POLICY)


def run(arguments: argparse.Namespace, config: EngineConfig, settings: ServerSettings) -> int:
    from minifer.cli.serve import print_welcome, with_model_name
    from minifer.serving.replicas.replica import Replica
    from minifer.serving.replicas.run import run_replicas
    from minifer.serving.replicas.settings import ReplicaSettings
    from minifer.serving.run import bind, url_of
    from minifer.weights.resolve import resolve_model

    settings = with_model_name(settings, config, resolve_model(config.model).path)
    command = replica_arguments(arguments, settings)
    replicas = []
    for i in range(arguments.replicas):
        name = f"replica-{i}"
        replicas.append(Replica(name, arguments=command + _event_log(arguments.events, name)))
    with bind(arguments.host, arguments.port) as listener:
        session.note(f"starting {len(replicas)} engines")
        run_replicas(
            replicas,
            config,
            settings,
            ReplicaSettings(router=arguments.router or POLICY),
            listener,
            lambda: print_welcome(url_of(listener), settings),
        )
    return 0


def replica_arguments(arguments: argparse.Namespace, settings: ServerSettings) -> list[str]:
    """What each replica's `minifer serve` is told: all but the address and the key."""
    from minifer.cli.serve import LIMITS

    given: Mapping[str, Any] = vars(arguments)
    command = engine_arguments(arguments.model, engine_fields(arguments))
    command += ["--served-model-name", str(settings.served_model_name)]
    for name in LIMITS:
        if name in given:
            command += ["--" + name.replace("_", "-"), str(given[name])]
    return command


def _event_log(file: Path | None, name: str) -> list[str]:
    """log.jsonl → log.replica-0.jsonl; of a process that is replaced, its successor's."""
    if file is None:
        return []
    return ["--events", str(file.with_name(f"{file.stem}.{name}{file.suffix}"))]
