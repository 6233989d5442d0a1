"""Who wants to know which prefixes an engine holds: a router, which keeps a copy of the index."""

from __future__ import annotations

from typing import Protocol

from minifer.kv.prefix_key import PrefixKey

DEVICE = "device"
DRAM = "dram"


class KVWatcher(Protocol):
    """Told of each block that can be found from now on, and of each that no longer can.

    Called on the engine's thread, in order; raises nothing. A block is stored once for each medium
    it is in, and is held as long as one has it. A block of the device is stored when the step that
    computes it is planned; a step that fails removes it. The disk is not watched: its folder is
    shared.
    """

    def stored(self, key: PrefixKey, medium: str) -> None: ...

    def removed(self, key: PrefixKey, medium: str) -> None: ...

    def cleared(self, medium: str) -> None:
        """Nothing in this medium can be found any more."""
        ...
