"""What whoever runs several replicas decides; checked when it is built."""

from __future__ import annotations

from dataclasses import dataclass

from minifer.serving.settings import check_number

DEFAULT_POLICY = "prefix_affinity"


@dataclass(frozen=True)
class ReplicaSettings:
    """Numbers of one deployment. Raises `ValueError` naming the setting, value and limit.

    router: a policy of `minifer.routing`, with its options. seed: of what it draws.
    health_interval: seconds between two questions to a replica; health_timeout: that it may take
        over its answer; health_threshold: so many in a row without one, and it is replaced.
    start_timeout: seconds a replica may take to load its model.
    wait_timeout: seconds a request waits for a replica while none is there, as after a crash of the
        only one.
    drain_timeout: seconds that a restart waits for the open requests of a replica.
    max_backoff: seconds before a replica is started again that does not stay up, at most; it begins
        with none and doubles from a second on.
    max_lost: replicas that may die over one request before it is given up. A request that kills
        whoever runs it must not be handed on until nobody is left.
    """

    router: str = DEFAULT_POLICY
    seed: int = 0
    health_interval: float = 1.0
    health_timeout: float = 5.0
    health_threshold: int = 3
    start_timeout: float = 300.0
    wait_timeout: float = 10.0
    drain_timeout: float = 600.0
    max_backoff: float = 30.0
    max_lost: int = 2

    def __post_init__(self) -> None:
        for name in ("health_threshold", "max_lost"):
            check_number(name, getattr(self, name), int, 1, "an integer of at least 1")
        for name in ("health_interval", "health_timeout", "start_timeout"):
            check_number(name, getattr(self, name), (int, float), 0.001, "at least 0.001 seconds")
        for name in ("wait_timeout", "drain_timeout", "max_backoff"):
            check_number(name, getattr(self, name), (int, float), 0, "at least 0 seconds")
