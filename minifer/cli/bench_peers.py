"""`--vs` of the benchmarks: other engines, each in processes of its own."""

from __future__ import annotations

import argparse
import json
from argparse import ArgumentTypeError
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifer.cli import session
from minifer.cli.parser import Parser
from minifer.config import BACKENDS, EngineConfig, ModelConfig

if TYPE_CHECKING:
    from minifer.perf.speed.benchmark import Engine
    from minifer.perf.speed.engines import Tasks

PEERS = ("transformers", "llamacpp", "vllm", "torch-compile")
_OTHER_BACKEND = "minifer:"  # and its name
MOST_STEP_TOKENS = 16_384  # of prompts in one step, unless an option asks for more


def add_peer_options(parser: Parser) -> None:
    add = parser.add_argument_group(
        "others",
        "Each engine answers the same prompts with as many tokens, greedy, in a fresh process a\n"
        "round, and the engines take turns.",
    ).add_argument
    add(
        "--vs",
        type=_names,
        action="extend",
        default=[],
        metavar="NAME,…",
        help=f"compare with {', '.join(PEERS)}, or with another of our back ends, as in "
        "minifer:torch; who is not installed is skipped by name",
    )
    add(
        "--peer-python",
        type=_pair,
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="the interpreter that has it (default: this one)",
    )
    add(
        "--peer-options",
        type=_json_pair,
        action="append",
        default=[],
        metavar="NAME=JSON",
        help='its own options, as in vllm={"enforce_eager": true}',
    )
    add("--gguf", type=Path, metavar="FILE", help="for llamacpp (default: what was pulled)")
    add("--timeout", type=float, default=600.0, metavar="S", help="a process (default: 600)")


def check_peers(arguments: argparse.Namespace) -> None:
    """Raises `ValueError` for others that nobody knows, or options of some that were not asked."""
    known = (*PEERS, *(_OTHER_BACKEND + backend for backend in BACKENDS))
    unknown = [name for name in arguments.vs if name not in known]
    if unknown:
        raise ValueError(f"--vs must be of {', '.join(known)}, got {unknown[0]!r}")
    for option in ("peer_python", "peer_options"):
        for name, _ in getattr(arguments, option):
            if name not in arguments.vs:
                flag = option.replace("_", "-")
                raise ValueError(f"--{flag} {name}=… needs --vs {name}")
    if not arguments.timeout > 0:
        raise ValueError(f"--timeout must be above 0, got {arguments.timeout}")


def elsewhere(
    arguments: argparse.Namespace,
    config: ModelConfig,
    tasks: Tasks,
    options: Mapping[str, Any],
    threads: int,
    dtype: str,
    device: str,
) -> tuple[dict[str, Engine], dict[str, str]]:
    """Processes by engine, ours first; and who is skipped, with the reason."""
    from minifer.perf.speed.benchmark import OURS, WITHOUT
    from minifer.perf.speed.engines import Elsewhere
    from minifer.perf.speed.worker import WorkerError

    if device != "cpu":
        raise ValueError(f"--vs compares on a CPU so far, got device {device!r}: add --device cpu")
    job = _job(config, tasks, dtype, threads)
    plain = {name: str(v) if isinstance(v, Path) else v for name, v in options.items()}
    ours = {**job, "model": arguments.model, "options": plain}
    engines: dict[str, Engine] = {OURS: Elsewhere("minifer", ours, timeout=arguments.timeout)}
    if (slow := without_speculation(plain)) is not None:
        engines[WITHOUT] = Elsewhere(
            "minifer", {**ours, "options": slow}, timeout=arguments.timeout
        )
    pythons = dict(arguments.peer_python)
    skipped: dict[str, str] = {}
    for name in dict.fromkeys(arguments.vs):
        try:
            own = _own_options(name, arguments, plain)
            if name.startswith(_OTHER_BACKEND):
                kind, theirs = "minifer", {**ours, "options": own}
            else:
                _check_tasks(name, tasks)
                model = str(_model_of(name, arguments))
                kind, theirs = name, {**job, "model": model, "options": own}
            peer = Elsewhere(kind, theirs, pythons.get(name), arguments.timeout)
            peer.probe()
            engines[name] = peer
        except (ValueError, WorkerError) as error:
            skipped[name] = str(error)
            session.note(f"{name} is skipped: {error}")
    return engines, skipped


def _job(config: ModelConfig, tasks: Tasks, dtype: str, threads: int) -> dict[str, Any]:
    """What every engine is told, but for its model and options."""
    from minifer.perf.costs import kv_bytes_per_token

    asks = [ask for task in tasks(0) for ask in task.asks]
    batch = max(len(task.asks) for task in tasks(0))
    longest = max(len(ask.prompt) + ask.max_tokens for ask in asks)
    length = min(-(-longest // 64) * 64, config.max_position_embeddings)
    most = max(sum(task.prompts) for task in tasks(0))
    return {
        "dtype": dtype,
        "threads": threads,
        "batch": batch,
        "max_model_len": length,
        "max_step_tokens": min(MOST_STEP_TOKENS, max(2048, most)),
        "kv_bytes": int(1.25 * batch * length * kv_bytes_per_token(config)),
        "warmup_tokens": 8,
    }


def _own_options(
    name: str, arguments: argparse.Namespace, ours: Mapping[str, Any]
) -> dict[str, Any]:
    """The options of a peer. Raises `ValueError` where it cannot multiply by these weights."""
    own = dict(arguments.peer_options).get(name, {})
    if name.startswith(_OTHER_BACKEND):
        own = {**ours, "backend": name.removeprefix(_OTHER_BACKEND), **own}
        EngineConfig.from_kwargs(**own)
    elif name == "torch-compile":
        own = {"quantize": ours.get("quantize", "none"), **own}
        if own["quantize"] not in ("none", "file"):
            raise ValueError(f"it has no weights of --quantize {own['quantize']}, none and file")
    return own


def _check_tasks(name: str, tasks: Tasks) -> None:
    """Raises `ValueError` for tasks that a peer does not take."""
    asked = tasks(0)
    one_length = all(
        len({(len(ask.prompt), ask.max_tokens) for ask in task.asks}) == 1 for task in asked
    )
    if name == "transformers" and not one_length:
        raise ValueError("its generate takes requests of one length")
    if name == "torch-compile" and {task.kind for task in asked} != {"decode"}:
        raise ValueError("it compiles decode steps alone: bench decode")


def _model_of(peer: str, arguments: argparse.Namespace) -> Path:
    """The files of the same model that a peer reads. Raises `ValueError` where there are none."""
    from minifer.weights.pull import gguf_path
    from minifer.weights.resolve import DEFAULT_NAMES, resolve_model

    path = resolve_model(arguments.model).path
    if peer != "llamacpp":
        if path.suffix == ".gguf":
            raise ValueError("it needs a folder in Hugging Face format, and --model is a GGUF file")
        return path
    if arguments.gguf is not None:
        path = arguments.gguf
    elif arguments.model in DEFAULT_NAMES:
        path = gguf_path()
    if path.suffix != ".gguf" or not path.is_file():
        raise ValueError("it needs the model as a GGUF file: --gguf FILE")
    return path


def without_speculation(options: Mapping[str, Any]) -> dict[str, Any] | None:
    if options.get("speculative_method", "none") == "none":
        return None
    return {
        name: value
        for name, value in options.items()
        if not name.startswith(("speculative_", "num_speculative_", "prompt_lookup_"))
    }


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise ArgumentTypeError(f"must be NAME=FILE such as vllm=venv/bin/python, got {text!r}")
    return name, value


def _json_pair(text: str) -> tuple[str, dict[str, Any]]:
    name, _, value = text.partition("=")
    try:
        options = json.loads(value)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ArgumentTypeError(f"must be NAME=JSON with a JSON object, got {text!r}")
    return name, options
