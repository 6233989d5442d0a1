"""All policies by name, and how one is asked for: `cold_warm:match_threshold=.1,unmatched=512`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from minifer.routing.balancing import LeastLoad, LeastWork, PowerOfTwo, RandomChoice, RoundRobin
from minifer.routing.cache_aware import CacheAware
from minifer.routing.cold_warm import ColdWarm
from minifer.routing.dynamo import DynamoCost
from minifer.routing.policy import RoutingPolicy
from minifer.routing.prefix_affinity import PrefixAffinity

# Called with `seed` and the policy's options by name; raises `ValueError` for a bad value.
POLICIES: Mapping[str, Callable[..., RoutingPolicy]] = MappingProxyType(
    {
        "random": RandomChoice,
        "round_robin": RoundRobin,
        "least_load": LeastLoad,
        "power_of_two": PowerOfTwo,
        "least_work": LeastWork,
        "prefix_affinity": PrefixAffinity,
        "dynamo": DynamoCost,
        "cache_aware": CacheAware,
        "cold_warm": ColdWarm,
    }
)


def make_policy(text: str, seed: int = 0) -> RoutingPolicy:
    """The policy that `text` asks for: a name, or a name, a colon and options.

    `dynamo:temperature=.2,overlap_weight=2`; a hyphen is as good as an underscore, a switch alone
    is on (`cold_warm:soft`), and an option that wants a policy takes a name (`within=dynamo`).
    Two made from the same text and seed decide the same.

    Raises `ValueError` for an unknown name or option and for a value that is none.
    """
    name, _, rest = text.partition(":")
    name = _plain(name)
    if name not in POLICIES:
        raise ValueError(f"router must be one of {', '.join(POLICIES)}, got {name!r}")
    known = policy_options(name)
    options: dict[str, Any] = {}
    for part in rest.split(",") if rest.strip() else ():
        key, equals, value = part.partition("=")
        key = _plain(key)
        if key not in known:
            has = f"has the options {', '.join(known)}" if known else "has no options"
            raise ValueError(f"router {name} {has}, got {key!r}")
        if key in options:
            raise ValueError(f"router {name} got {key} twice")
        if not equals and known[key] is False:
            value = "true"
        options[key] = _value(f"{name}:{key}", known[key], value.strip(), seed)
    try:
        return POLICIES[name](seed=seed, **options)
    except ValueError as error:
        raise ValueError(f"router {name}: {error}") from None


def policy_options(name: str) -> dict[str, Any]:
    """Options of a policy and what they are if not given, without the seed.

    Their types are those of the defaults; None stands for another policy.
    """
    parameters = inspect.signature(POLICIES[name]).parameters
    return {key: p.default for key, p in parameters.items() if key != "seed"}


def _plain(name: str) -> str:
    return name.strip().replace("-", "_")


_SWITCH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _value(option: str, default: Any, text: str, seed: int) -> Any:
    if default is None:
        return make_policy(text, seed)
    if isinstance(default, bool):
        if text.lower() not in _SWITCH:
            raise ValueError(f"router {option} must be true or false, got {text!r}")
        return _SWITCH[text.lower()]
    kind, noun = (int, "a whole number") if isinstance(default, int) else (float, "a number")
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"router {option} must be {noun}, got {text!r}") from None
