"""Which blocks are worth keeping: all of them, or those that are used again.

In a trace of real conversations three of four blocks are never used again (Mooncake, FAST 2025):
waiting for the second use writes a quarter as much, and forgoes the first reuse of the others.
SGLang calls the two policies write_through and write_through_selective.
"""

from __future__ import annotations

from collections import OrderedDict

GHOSTS_PER_BLOCK = 8  # names remembered for each block a tier holds


class WriteThrough:
    """Everything is stored."""

    def admits(self, digest: bytes) -> bool:
        return True


class SecondTouch:
    """A block is stored when its name comes up for the second time.

    capacity: names remembered, the least recently seen are forgotten first.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ghosts)

    def admits(self, digest: bytes) -> bool:
        seen = digest in self._ghosts
        self._ghosts[digest] = None
        self._ghosts.move_to_end(digest)
        if len(self._ghosts) > self.capacity:
            self._ghosts.popitem(last=False)
        return seen
