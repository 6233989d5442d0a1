"""What whoever runs replicas under Ray decides; checked when it is built."""

from __future__ import annotations

from dataclasses import dataclass

from minifer.serving.replicas.settings import DEFAULT_POLICY
from minifer.serving.settings import check_number

LOCAL = "local"


@dataclass(frozen=True)
class RaySettings:
    """Numbers of one deployment. Raises `ValueError` naming the setting, value and limit.

    address: "local" starts Ray on this machine and ends it with the server; "auto" is the cluster
        this machine is a node of; or a node's HOST:PORT.
    min_replicas, max_replicas: Ray adds and removes replicas between the two; equal ones are fixed.
    target_requests: open requests of a replica that autoscaling aims at.
    upscale_delay, downscale_delay: seconds the load must ask for more, or for fewer, replicas.
    replica_cpus, replica_gpus: of its node that Ray gives to each. A CPU is also a thread of
        torch's; a replica with no GPU sees none.
    router: a policy of `minifer.routing`, with its options. seed: of what it draws.
    report_interval: seconds between two reports of a replica's load.
    wait_timeout: seconds a request waits until some replica takes it.
    drain_timeout: seconds that a replica which is not needed any more may go on with its requests.
    max_lost: replicas that may die over one request before it is given up.
    """

    address: str = LOCAL
    min_replicas: int = 1
    max_replicas: int = 1
    target_requests: float = 16.0
    upscale_delay: float = 10.0
    downscale_delay: float = 300.0
    replica_cpus: float = 1.0
    replica_gpus: float = 0.0
    router: str = DEFAULT_POLICY
    seed: int = 0
    report_interval: float = 1.0
    wait_timeout: float = 30.0
    drain_timeout: float = 600.0
    max_lost: int = 2

    def __post_init__(self) -> None:
        check_number("min_replicas", self.min_replicas, int, 1, "an integer of at least 1")
        low = self.min_replicas
        rule = f"an integer of at least min_replicas, which is {low}"
        check_number("max_replicas", self.max_replicas, int, low, rule)
        check_number("max_lost", self.max_lost, int, 1, "an integer of at least 1")
        for name in ("upscale_delay", "downscale_delay", "wait_timeout", "drain_timeout"):
            check_number(name, getattr(self, name), (int, float), 0, "at least 0 seconds")
        for name, least in (("target_requests", 0.1), ("report_interval", 0.1)):
            value = getattr(self, name)
            check_number(name, value, (int, float), least, f"at least {least}")
        for name in ("replica_cpus", "replica_gpus"):
            check_number(name, getattr(self, name), (int, float), 0, "at least 0")
        if self.address.startswith("ray://"):
            raise ValueError(
                f"address must be that of a cluster's node, as HOST:PORT, got {self.address!r}: "
                "answers are streams, which Ray's client does not carry; run the server on a node"
            )

    @property
    def scales(self) -> bool:
        """May the number of replicas change?"""
        return self.min_replicas < self.max_replicas
