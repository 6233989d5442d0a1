"""What the tiers did, counted where it happens. Every counter has one thread that writes it."""

from __future__ import annotations

from dataclasses import dataclass, field

TIERS = ("dram", "disk")


@dataclass
class Transfer:
    """What went one way: whole blocks, their bytes, and the seconds that took."""

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, blocks: int, num_bytes: int, seconds: float) -> None:
        self.blocks += blocks
        self.bytes += num_bytes
        self.seconds += seconds


def _per_tier() -> dict[str, int]:
    return dict.fromkeys(TIERS, 0)


@dataclass
class TierStats:
    """Tokens are counted at first admissions only, as in `PrefixCacheStats`; bytes always.

    num_queries: tokens the device did not have and that the tiers were asked for. hits: tokens
    loaded, by the tier where the request found them. refused: tokens a tier had and that were
    computed all the same, because that was faster.
    loads: dram → device and disk → dram; stores: device → dram and dram → disk.
    dropped: blocks not written to the disk because its queue was full; rejected: not stored
    because they held NaN or infinity; corrupt: files that failed a check; read_errors and
    write_errors: files the system would not read or write; timeouts: waits for the disk that were
    given up; evicted: blocks thrown out, by tier.
    """

    num_queries: int = 0
    hits: dict[str, int] = field(default_factory=_per_tier)
    refused: dict[str, int] = field(default_factory=_per_tier)
    loads: dict[str, Transfer] = field(default_factory=lambda: {t: Transfer() for t in TIERS})
    stores: dict[str, Transfer] = field(default_factory=lambda: {t: Transfer() for t in TIERS})
    evicted: dict[str, int] = field(default_factory=_per_tier)
    dropped: int = 0
    rejected: int = 0
    corrupt: int = 0
    read_errors: int = 0
    write_errors: int = 0
    timeouts: int = 0
