"""All claims by name, in the order in which they are best read."""

from __future__ import annotations

from importlib import import_module

from minifer.claims.claim import Claim

# Each a module of this package, with a `CLAIM`. First arithmetic, then replays, then simulations.
_MODULES = (
    "rare_bugs",
    "speed_of_light",
    "launch_overhead",
    "reload",
    "energy",
    "lru",
    "routing",
    "chunked_prefill",
    "disaggregation",
    "heterogeneous",
)


def names() -> list[str]:
    return [module.replace("_", "-") for module in _MODULES]


def get(name: str) -> Claim:
    """Raises `ValueError` for an unknown name, with those there are."""
    if name not in names():
        raise ValueError(f"claim must be one of {', '.join(names())}, got {name!r}")
    claim = import_module(f"minifer.claims.{name.replace('-', '_')}").CLAIM
    assert isinstance(claim, Claim)
    return claim
