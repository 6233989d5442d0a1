"""Energy counters of this machine's CPU packages (Intel RAPL, through Linux' powercap)."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True)
class Energy:
    """What was used while something ran: joules of all packages, over `seconds`."""

    joules: float
    seconds: float


def readable(root: Path = POWERCAP) -> bool:
    """May this process read an energy counter? Most virtual machines have none."""
    return bool(_counters(root))


def measure(work: Callable[[], object], root: Path = POWERCAP) -> Energy:
    """Run `work` and read the counters around it; one that wraps meanwhile is put right.

    Raises `RuntimeError` where no counter is readable.
    """
    before = _counters(root)
    if not before:
        raise RuntimeError(f"no energy counter is readable under {root}")
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    used = 0
    for zone, after in _counters(root).items():
        used += (after - before[zone]) % _range(zone)
    return Energy(used / 1e6, seconds)


def _counters(root: Path) -> dict[Path, int]:
    """Package → microjoules. Packages only: what lies below one is part of it."""
    counters = {}
    for zone in sorted(root.glob("intel-rapl:[0-9]*")):
        if zone.name.count(":") == 1:
            with suppress(OSError, ValueError):
                counters[zone] = int((zone / "energy_uj").read_text())
    return counters


def _range(zone: Path) -> int:
    return int((zone / "max_energy_range_uj").read_text()) + 1
