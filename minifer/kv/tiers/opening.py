"""From an engine's options to its tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from minifer.config import EngineConfig
from minifer.kv.tiers.block_file import BlockFormat, Namespace
from minifer.kv.tiers.disk import DiskTier
from minifer.kv.tiers.dram import Payload
from minifer.kv.tiers.stats import TierStats
from minifer.kv.tiers.tiers import KVTiers

# Memory of an engine with a disk and no DRAM tier: blocks pass through it both ways.
STAGING_BYTES = 256 * 1024**2


class DeviceBlocks(Protocol):
    """The device's side: how a block looks as bytes (`KVStorage`)."""

    @property
    def payload_dtype(self) -> str: ...

    @property
    def payload_shape(self) -> tuple[int, ...]: ...

    def read_block(self, block_id: int) -> Payload | None: ...


def open_tiers(config: EngineConfig, device: DeviceBlocks, namespace: Namespace) -> KVTiers | None:
    """The tiers `config` asks for, or None. Raises `ValueError` for sizes that hold no block."""
    if not config.has_kv_tiers:
        return None
    block_format = BlockFormat(namespace, device.payload_dtype, device.payload_shape)
    block_bytes = block_format.num_bytes
    budget = config.kv_dram_bytes
    if budget is None:
        budget = max(STAGING_BYTES, 2 * block_bytes)
    if budget < block_bytes:
        raise ValueError(
            f"kv_dram_bytes must hold at least one block of {block_bytes} bytes, got {budget}"
        )
    stats = TierStats()
    disk = None
    if config.kv_disk_path is not None:
        folder = Path(config.kv_disk_path).expanduser()
        disk = DiskTier(folder, block_format, config.kv_disk_bytes, stats)
    capacity = budget // block_bytes
    return KVTiers(config, device.read_block, block_bytes, capacity, disk, stats)
