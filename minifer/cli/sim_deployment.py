"""Options that say what serves the traffic, and the cluster they make."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minifer.cli import session
from minifer.cli.parser import Parser, add_engine_options, engine_fields
from minifer.cli.sim_traffic import SIMULATED
from minifer.config import EngineConfig

if TYPE_CHECKING:
    from minifer.simulation.cluster import Cluster, NodeSpec, StoreLevel
    from minifer.simulation.workloads.arrivals import Workload

STEPS = "distserve-opt-13b-a100-tp1"
_KV_TOKENS = 65_536  # of a node: what is left beside the weights of OPT-13B, about
_DECODE_ROUTER = "least_load"
_STORE_SPEED = 50.0  # GB/s
_LONGEST = 4  # requests of the longest kind that fit in any case


def add_deployment_options(parser: Parser) -> None:
    group = parser.add_argument_group(
        "deployment",
        "STEPS are a published fit's name, a FILE of `minifer sim fit --json`, fixed:SECONDS, or\n"
        "roofline:MODEL:DEVICE[:EFFICIENCY[:N]] (share of the data sheet's rates, N of them).\n"
        "Unless --block-size and --num-kv-blocks say otherwise a block of KV has 512 tokens, and\n"
        f"a node {_KV_TOKENS:,} tokens or what {_LONGEST} of the longest requests take.",
    )
    add = group.add_argument
    add("--nodes", type=int, metavar="N", help="that do everything (default: 1)")
    add(
        "--roles",
        metavar="ROLE=N,…",
        help="instead: mixed, prefill, decode, pre-prefill; such as prefill=2,decode=1",
    )
    add("--steps", default=STEPS, help=f"seconds of a step (default: {STEPS})")
    add("--decode-steps", metavar="STEPS", help="of decode nodes, if they are of another kind")
    add("--router", default="least_work", help="NAME[:OPTION=VALUE,…] (default: least_work)")
    add("--decode-router", metavar="ROUTER", help=f"(default: {_DECODE_ROUTER})")
    add("--link", type=float, metavar="GB/S", help="KV from prefill to decode nodes (default: ∞)")
    add("--store-tokens", type=int, default=0, metavar="N", help="of a store that all nodes share")
    add("--store", type=float, metavar="GB/S", help=f"loading from it (default: {_STORE_SPEED:g})")
    add("--kv-bytes", type=float, metavar="N", help="of a token (default: of the steps' model)")
    add(
        "--reject",
        type=float,
        metavar="S",
        help="refuse whose prefill would end later than that; what decoding delays is not foreseen",
    )
    add("--list", action="store_true", help="print the names of steps and routers, and end")
    add_engine_options(parser, SIMULATED)


def names() -> str:
    """Of step times and routers, a line each."""
    from minifer.routing.policies import POLICIES, policy_options
    from minifer.simulation.steps.named import MODELS
    from minifer.simulation.steps.published import PUBLISHED_STEPS

    lines = [f"  {name:32}{steps.source}" for name, steps in PUBLISHED_STEPS.items()]
    lines.append(f"  roofline:MODEL:DEVICE           MODEL is one of {', '.join(MODELS)}")
    routers = [f"  {name:32}{', '.join(policy_options(name))}".rstrip() for name in POLICIES]
    return "\n".join(["steps:", *lines, "routers:", *routers])


def cluster_of(arguments: argparse.Namespace, traffic: Workload) -> Cluster:
    """What the options describe. traffic: whose longest requests must fit, and whose prompts may
    be stored. Raises `ValueError` for a bad option."""
    from minifer.routing.policy import Role
    from minifer.simulation.cluster import Cluster, Link, identical
    from minifer.simulation.rejection import PredictedTTFT
    from minifer.simulation.steps.named import find_kv_bytes, find_steps
    from minifer.simulation.workloads.statistics import requests_of

    counts = _counts(arguments)
    requests = list(requests_of(traffic))
    engine = _engine(arguments, max(r.prompt_len + r.output_len for r in requests))
    stored = any(request.stored_len for request in requests)
    _check_effect(arguments, counts, stored)
    store = _store(arguments, stored)
    nodes: list[NodeSpec] = []
    for role, count in counts.items():
        decodes = role == Role.DECODE.value
        steps = arguments.decode_steps if decodes and arguments.decode_steps else arguments.steps
        level = () if decodes else store
        alike = identical(count, find_steps(steps), engine, role=Role(role), store=level)
        nodes += (replace(node, in_tokens=True) for node in alike)  # as an engine does
    kv_bytes = arguments.kv_bytes
    if kv_bytes is None:
        kv_bytes = find_kv_bytes(arguments.steps) or 0.0
        moves = store or Role.DECODE.value in counts
        if not kv_bytes and moves:
            session.note("KV moves at no cost: these steps name no model, give --kv-bytes")
    if not counts.keys() & {Role.MIXED.value, Role.DECODE.value}:
        session.note("no node decodes: each request ends with its first token")
    return Cluster(
        tuple(nodes),
        router=arguments.router,
        decode_router=arguments.decode_router or _DECODE_ROUTER,
        seed=arguments.seed,
        link=Link(_bytes_per_second("--link", arguments.link)),
        kv_bytes=kv_bytes,
        rejection=None if arguments.reject is None else PredictedTTFT(arguments.reject),
    )


def _check_effect(arguments: argparse.Namespace, counts: dict[str, int], stored: bool) -> None:
    """Raises `ValueError` for an option that would change nothing in this deployment."""
    has_store = stored or arguments.store_tokens > 0
    apart = "decode" in counts
    decode, store = "--roles with decode nodes", "a store: give --store-tokens"
    for option, given, works, needs in (
        ("--link", arguments.link, apart, decode),
        ("--decode-steps", arguments.decode_steps, apart, decode),
        ("--decode-router", arguments.decode_router, apart, decode),
        ("--store", arguments.store, has_store, store),
        ("--kv-bytes", arguments.kv_bytes, apart or has_store, f"{decode}, or {store}"),
    ):
        if given is not None and not works:
            raise ValueError(f"{option} needs {needs}; without, it changes nothing")


def _counts(arguments: argparse.Namespace) -> dict[str, int]:
    """Role → nodes."""
    from minifer.routing.policy import Role

    if arguments.roles is None:
        nodes = 1 if arguments.nodes is None else arguments.nodes
        if nodes < 1:
            raise ValueError(f"--nodes must be at least 1, got {nodes}")
        return {Role.MIXED.value: nodes}
    if arguments.nodes is not None:
        raise ValueError("--nodes and --roles exclude each other: mixed=N are nodes too")
    known = [role.value for role in Role]
    counts: dict[str, int] = {}
    for part in arguments.roles.split(","):
        role, _, number = part.strip().partition("=")
        if role not in known or not number.isdecimal() or int(number) < 1 or role in counts:
            raise ValueError(
                f"--roles must be ROLE=N,… with each of {', '.join(known)} at most once and N at "
                f"least 1, got {arguments.roles!r}"
            )
        counts[role] = int(number)
    return counts


def _engine(arguments: argparse.Namespace, longest: int) -> EngineConfig:
    from minifer.simulation.workloads.arrivals import BLOCK

    given: dict[str, Any] = {"block_size": BLOCK, **engine_fields(arguments)}
    config = EngineConfig.from_kwargs(**given)
    if config.num_kv_blocks is not None:
        return config
    needed = _LONGEST * -(-longest // config.block_size)
    return replace(config, num_kv_blocks=max(_KV_TOKENS // config.block_size, needed))


def _store(arguments: argparse.Namespace, stored: bool) -> tuple[StoreLevel, ...]:
    from minifer.simulation.cluster import StoreLevel

    if not stored and not arguments.store_tokens:
        return ()
    given = _STORE_SPEED if arguments.store is None else arguments.store
    speed = _bytes_per_second("--store", given)
    return (StoreLevel("store", arguments.store_tokens, speed, shared=True),)


def _bytes_per_second(option: str, gigabytes: float | None) -> float:
    if gigabytes is None:
        return math.inf
    if not gigabytes > 0:
        raise ValueError(f"{option} must be above 0 GB/s, got {gigabytes}")
    return gigabytes * 1e9
