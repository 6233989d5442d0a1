"""`minifer serve --disaggregate P:D`: prompts computed by some engines, answers by others."""

from __future__ import annotations

import argparse
import os
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minifer.cli import session
from minifer.cli.parser import Parser
from minifer.config import EngineConfig
from minifer.serving.disaggregation.link_faults import LinkFaults
from minifer.serving.disaggregation.settings import (
    HAND_OVER_BYTES,
    MIN_TOKEN,
    TOKEN_VARIABLE,
    TRANSPORTS,
    TransferSettings,
)

if TYPE_CHECKING:
    from minifer.async_llm import AsyncLLM
    from minifer.serving.disaggregation.worker import KVWorker
    from minifer.serving.settings import ServerSettings

ROLES = ("prefill", "decode")
# Fields of `TransferSettings` that are options: option, what stands for a value, and its help.
OPTIONS = {
    "transport": (
        "--kv-transport",
        "",
        "shm: blocks go through shared memory where both workers are on one machine, else through "
        "the connection; tcp: always through the connection",
    ),
    "timeout": ("--kv-transfer-timeout", "S", "seconds a request waits for its blocks, in all"),
    "host": ("--kv-host", "ADDRESS", "where a prefill worker waits for decode workers"),
    "port": ("--kv-port", "N", "and the port there; 0 takes a free one"),
}


def add_options(parser: Parser) -> None:
    group = parser.add_argument_group(
        "disaggregation",
        "P engines compute prompts, D others answer: a long prompt holds up nobody's answer. The\n"
        "KV of a prompt is handed over in blocks, while it is computed. Blocks that do not come,\n"
        "or not as they should be, the decode worker computes: answers are a single engine's.",
    )
    add = group.add_argument
    add("--disaggregate", metavar="P:D", help="how many engines of each kind, such as 1:2")
    add(
        "--min-hand-over",
        type=int,
        metavar="N",
        default=argparse.SUPPRESS,
        help="prompts of which fewer tokens are to be computed go to a decode worker at once "
        "(default: a block and one)",
    )
    for name, (option, metavar, text) in OPTIONS.items():
        default = getattr(TransferSettings, name)
        given: dict[str, Any] = {"metavar": metavar} if metavar else {"choices": TRANSPORTS}
        add(
            option,
            dest=f"kv_{name}",
            type=type(default),
            default=argparse.SUPPRESS,
            help=f"{text} (default: {default})",
            **given,
        )
    add(
        "--role",
        choices=ROLES,
        help=f"be one such worker, for a router that shares {TOKEN_VARIABLE} with it",
    )
    add(
        "--kv-link-faults",
        dest="kv_faults",
        metavar="CHANCES",
        type=_faults,
        default=argparse.SUPPRESS,
        help="for tests: what may happen to a block on its way, such as drop=0.1,flip=0.1,seed=1",
    )


def check(arguments: argparse.Namespace, config: EngineConfig) -> EngineConfig:
    """The configuration that workers need. Raises `ValueError` for options that make no sense."""
    given = [option for name, (option, *_) in OPTIONS.items() if hasattr(arguments, f"kv_{name}")]
    given += ["--min-hand-over"] if hasattr(arguments, "min_hand_over") else []
    given += ["--kv-link-faults"] if hasattr(arguments, "kv_faults") else []
    if arguments.disaggregate is None and arguments.role is None:
        if given:
            raise ValueError(f"{given[0]} needs --disaggregate")
        return config
    for other in ("replicas", "ray", "role"):
        if arguments.disaggregate is not None and getattr(arguments, other):
            raise ValueError(f"--disaggregate and --{other} exclude each other")
    if arguments.role is not None and (arguments.replicas or arguments.ray):
        raise ValueError("--role is for one engine: it excludes --replicas and --ray")
    if arguments.disaggregate is not None:
        from minifer.serving.disaggregation.split import Split

        split = Split.of(arguments.disaggregate)
        if split.prefill > 1 and vars(arguments).get("kv_port", 0):
            raise ValueError(
                f"--kv-port must be 0 for several prefill workers, got {arguments.kv_port}"
            )
        if vars(arguments).get("min_hand_over", 0) < 0:
            raise ValueError(f"--min-hand-over must be at least 0, got {arguments.min_hand_over}")
    transfer_settings(arguments)  # which checks what was given
    if config.kv_write_policy != "through":
        raise ValueError(
            "--kv-write-policy must be through with --disaggregate: a prefill worker hands over "
            f"what it has stored, got {config.kv_write_policy}"
        )
    if not config.enable_prefix_caching:
        raise ValueError("--disaggregate needs --enable-prefix-caching: blocks are found by prefix")
    if config.tensor_parallel_size > 1:
        raise ValueError(
            "--disaggregate needs --tensor-parallel-size 1: a block is handed over whole, got "
            f"{config.tensor_parallel_size}"
        )
    changes: dict[str, Any] = {}
    if config.kv_dram_bytes is None:
        changes["kv_dram_bytes"] = HAND_OVER_BYTES
    if not hasattr(arguments, "kv_load_policy"):  # what has travelled so far is not left aside
        changes["kv_load_policy"] = "always"
    return replace(config, **changes)


def transfer_settings(arguments: argparse.Namespace) -> TransferSettings:
    """The token is the environment's; who starts workers has not made one yet."""
    token = os.environ.get(TOKEN_VARIABLE, "") if arguments.role is not None else "-" * MIN_TOKEN
    names = (*OPTIONS, "faults")
    given = {name: getattr(arguments, f"kv_{name}", None) for name in names}
    return TransferSettings(token, **{k: value for k, value in given.items() if value is not None})


def make_worker(arguments: argparse.Namespace, llm: AsyncLLM, loaded: Any) -> KVWorker | None:
    """This engine's part in hand-overs, where it has one. loaded: the model it was built from."""
    if arguments.role is None:
        return None
    from minifer.routing.policy import Role
    from minifer.serving.disaggregation.worker import KVWorker, block_format

    blocks = block_format(loaded, llm.engine)
    return KVWorker(llm, blocks, Role(arguments.role), transfer_settings(arguments))


def run(arguments: argparse.Namespace, config: EngineConfig, settings: ServerSettings) -> int:
    """Start the workers, and the router before them."""
    from minifer.cli.serve import print_welcome, with_model_name
    from minifer.cli.serve_replicas import POLICY, replica_arguments
    from minifer.serving.disaggregation.router import PrefillStage
    from minifer.serving.disaggregation.split import Split
    from minifer.serving.replicas.replica import Replica
    from minifer.serving.replicas.run import run_replicas
    from minifer.serving.replicas.settings import ReplicaSettings
    from minifer.serving.run import bind, url_of
    from minifer.weights.resolve import resolve_model

    settings = with_model_name(settings, config, resolve_model(config.model).path)
    token = secrets.token_urlsafe(32)
    command = [*replica_arguments(arguments, settings), *_worker_arguments(arguments)]
    workers = [
        Replica(name, role, [*command, "--role", role.value], {TOKEN_VARIABLE: token})
        for name, role in Split.of(arguments.disaggregate).roles.items()
    ]
    stage = PrefillStage(token, min_tokens=getattr(arguments, "min_hand_over", 0))
    with bind(arguments.host, arguments.port) as listener:
        session.note(f"starting {len(workers)} engines")
        run_replicas(
            workers,
            config,
            settings,
            ReplicaSettings(router=arguments.router or POLICY),
            listener,
            lambda: print_welcome(url_of(listener), settings),
            before=stage,
        )
    return 0


def _worker_arguments(arguments: argparse.Namespace) -> list[str]:
    """What was said about hand-overs, for the workers."""
    given = vars(arguments)
    said = {option: given.get(f"kv_{name}") for name, (option, *_) in OPTIONS.items()}
    if "kv_faults" in given:
        said["--kv-link-faults"] = arguments.kv_faults.text
    command: list[str] = []
    for option, value in said.items():
        if value is not None:
            command += [option, str(value)]
    return command


def _faults(text: str) -> LinkFaults:
    try:
        return LinkFaults.of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
