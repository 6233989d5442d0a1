"""`minifer serve --ray`: engines on the nodes of a Ray cluster, as many as the load asks for."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from minifer.cli import session
from minifer.cli.parser import Parser
from minifer.config import EngineConfig
from minifer.serving.ray_serve.settings import LOCAL, RaySettings

if TYPE_CHECKING:
    from minifer.serving.settings import ServerSettings

# Options of `--ray` alone: field of `RaySettings` → what stands for a value, and its help.
OPTIONS = {
    "min_replicas": ("N", "Ray keeps at least so many replicas"),
    "max_replicas": ("N", "and adds more while the load asks for them, up to N"),
    "target_requests": ("N", "open requests of a replica that it aims at"),
    "upscale_delay": ("S", "seconds that the load must ask for more"),
    "downscale_delay": ("S", "and for fewer"),
    "replica_cpus": ("N", "CPUs that Ray gives to a replica; so many threads torch uses"),
    "replica_gpus": ("N", "GPUs of a replica; with --device cuda 1"),
}


def add_options(parser: Parser) -> None:
    group = parser.add_argument_group(
        "Ray",
        'The same on the nodes of a Ray cluster (pip install "minifer[ray]"). --replicas N fixes\n'
        "their number; with --min-replicas and --max-replicas it follows the load. minifer and\n"
        "the model must be on every node. The replicas of a node that dies start on another.",
    )
    group.add_argument("--ray", action="store_true", help="run the replicas under Ray Serve")
    group.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="auto: the cluster that this machine is a node of; or a node's HOST:PORT "
        "(default: Ray is started here, and ended with the server)",
    )
    for name, (metavar, text) in OPTIONS.items():
        default = getattr(RaySettings, name)
        group.add_argument(
            _option(name),
            metavar=metavar,
            type=type(default),
            default=argparse.SUPPRESS,
            help=f"{text} (default: {default:g})",
        )


def check(arguments: argparse.Namespace) -> None:
    """Raises `ValueError` for options that make no sense, before anything is loaded."""
    if not arguments.ray:
        given = [name for name in OPTIONS if hasattr(arguments, name)]
        given += ["ray_address"] if arguments.ray_address is not None else []
        if given:
            raise ValueError(f"{_option(given[0])} needs --ray")
        return
    if arguments.disaggregate is not None:
        raise ValueError("--ray and --disaggregate exclude each other")
    from minifer.routing.policies import make_policy

    make_policy(ray_settings(arguments).router)


def ray_settings(arguments: argparse.Namespace, device: str = "auto") -> RaySettings:
    """What the options say. Raises `ValueError`."""
    fields: dict[str, Any] = {
        name: getattr(arguments, name) for name in OPTIONS if hasattr(arguments, name)
    }
    if arguments.replicas is not None:
        for name in ("min_replicas", "max_replicas"):
            if name in fields:
                raise ValueError(f"--replicas is a fixed number: leave out {_option(name)}")
            fields[name] = arguments.replicas
    elif "min_replicas" in fields:
        fields.setdefault("max_replicas", fields["min_replicas"])
    if device.startswith("cuda"):
        fields.setdefault("replica_gpus", 1.0)
    if arguments.router is not None:
        fields["router"] = arguments.router
    return RaySettings(address=arguments.ray_address or LOCAL, **fields)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def run(arguments: argparse.Namespace, config: EngineConfig, settings: ServerSettings) -> int:
    from minifer.cli.serve import print_welcome, with_model_name
    from minifer.serving.run import bind, url_of
    from minifer.weights.resolve import resolve_model

    try:
        from minifer.serving.ray_serve.deployment import run_ray
    except ImportError as error:
        if (error.name or "").startswith("minifer"):
            raise
        raise RuntimeError('`minifer serve --ray` needs Ray: pip install "minifer[ray]"') from error
    ray = ray_settings(arguments, config.device)
    resolved = resolve_model(config.model)
    if resolved.notice:
        session.note(resolved.notice)
    settings = with_model_name(settings, config, resolved.path)
    with bind(arguments.host, arguments.port) as listener:
        number = f"{ray.min_replicas} to {ray.max_replicas}" if ray.scales else ray.max_replicas
        where = "Ray here" if ray.address == LOCAL else f"the Ray cluster at {ray.address}"
        session.note(f"starting engines in {where}: {number}")

        def ready(application: str) -> None:
            print_welcome(url_of(listener), settings)
            if ray.address != LOCAL:
                session.note(
                    f"the cluster knows this as application {application}: should this process be "
                    f"killed, `serve.delete({application!r})` ends it there"
                )

        run_ray(config, settings, ray, listener, ready)
    return 0
