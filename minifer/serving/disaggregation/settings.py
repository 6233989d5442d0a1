"""What whoever runs the workers decides; checked when it is built."""

from __future__ import annotations

from dataclasses import dataclass, field

from minifer.serving.disaggregation.link_faults import LinkFaults
from minifer.serving.settings import check_number

TOKEN_VARIABLE = "MINIFER_KV_TOKEN"
TRANSPORTS = ("shm", "tcp")
MIN_TOKEN = 16  # characters
# Memory for blocks on their way, where `kv_dram_bytes` says nothing else.
HAND_OVER_BYTES = 512 * 1024**2


@dataclass(frozen=True)
class TransferSettings:
    """How blocks go from one worker to another. Raises `ValueError` naming setting, value, limit.

    token: a secret that all workers and their router know. It authenticates them to each other; it
        does not encrypt what they send.
    transport: shm: through shared memory where both sides are on one machine, else as tcp. tcp:
        through the connection.
    host, port: where a prefill worker waits for connections; port 0 takes a free one.
    timeout: seconds a request waits for its blocks, in all. silence: seconds without a sign of
        life after which a link is given up. Whoever gives up computes the prompt itself.
    lease: seconds that a computed prompt can be fetched, from the last time somebody did.
    window: blocks that may be in shared memory at a time.
    faults: of links, for tests.
    """

    token: str = field(repr=False)
    transport: str = "shm"
    host: str = "127.0.0.1"
    port: int = 0
    timeout: float = 60.0
    silence: float = 5.0
    lease: float = 30.0
    window: int = 8
    faults: LinkFaults | None = None

    def __post_init__(self) -> None:
        if not self.token.isascii() or not self.token.isprintable() or len(self.token) < MIN_TOKEN:
            raise ValueError(
                f"token must be at least {MIN_TOKEN} printable ASCII characters: set "
                f"{TOKEN_VARIABLE} to the same for all workers and their router"
            )
        if self.transport not in TRANSPORTS:
            names = ", ".join(TRANSPORTS)
            raise ValueError(f"transport must be one of {names}, got {self.transport!r}")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be in [0, 65536), got {self.port}")
        for name in ("timeout", "silence", "lease"):
            check_number(name, getattr(self, name), (int, float), 0.01, "at least 0.01 seconds")
        check_number("window", self.window, int, 1, "an integer of at least 1")
