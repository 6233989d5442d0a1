"""The blocks: who uses which, which are free, and which free one is reused next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from minifer.events import EventBus
from minifer.kv.prefix_index import PrefixIndex
from minifer.kv.prefix_key import PrefixKey
from minifer.kv.watcher import DEVICE, KVWatcher


class Block:
    """A fixed stretch of KV memory. `ref_count` is the number of block tables that hold it."""

    __slots__ = ("block_id", "key", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: PrefixKey | None = None  # set while the index can find the block

    def __repr__(self) -> str:
        return f"Block({self.block_id}, refs {self.ref_count}, {'cached' if self.key else '-'})"


class BlockPool:
    """All N blocks. A block is in use (ref_count > 0) or in the free queue, never both.

    The free queue is the LRU list: blocks are reused from its front and freed to its back. A free
    block that is still published keeps its content until it is reused; a prefix hit takes it
    back out of the queue.

    track_lost: note in `lost` which blocks were freed or handed out since it was last emptied, so
    that debug mode can poison what they held.
    """

    def __init__(
        self, num_blocks: int, index: PrefixIndex, events: EventBus, track_lost: bool = False
    ) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free_queue: OrderedDict[int, None] = OrderedDict((i, None) for i in range(num_blocks))
        self.index = index
        self.lost: list[int] | None = [] if track_lost else None
        self.watcher: KVWatcher | None = None
        self._events = events

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        """Free blocks, those that still hold a cached prefix included."""
        return len(self.free_queue)

    def allocate(self, count: int, request_id: str | None = None) -> list[int]:
        """Take the `count` least recently used free blocks; what they cached is evicted.

        Raises `RuntimeError` when fewer are free: the caller has to ask first.
        """
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} are free")
        taken = []
        for _ in range(count):
            block_id, _ = self.free_queue.popitem(last=False)
            if self.blocks[block_id].key is not None:
                self.unpublish(block_id, "kv.block_evicted")
            self.blocks[block_id].ref_count = 1
            taken.append(block_id)
        self._lose(taken)
        if self._events and taken:
            self._events.emit("kv", "kv.block_allocated", request_id, blocks=taken)
        return taken

    def acquire(self, block_ids: Iterable[int]) -> None:
        """One more table holds these blocks; free ones leave the free queue."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.ref_count == 0:
                del self.free_queue[block_id]
            block.ref_count += 1

    def release(
        self, block_ids: Iterable[int], request_id: str | None = None, reuse_first: bool = False
    ) -> None:
        """One table fewer holds these blocks; unused ones join the free queue in this order.

        reuse_first: at its front, for blocks that hold nothing.
        """
        freed = []
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.ref_count < 1:
                raise RuntimeError(f"block {block_id} is freed twice")
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free_queue[block_id] = None
                if reuse_first:
                    self.free_queue.move_to_end(block_id, last=False)
                freed.append(block_id)
        self._lose(freed)
        if self._events and freed:
            self._events.emit("kv", "kv.block_freed", request_id, blocks=freed)

    def reset(self) -> None:
        """All blocks are free, and none can be found: nobody knows what they hold."""
        for block in self.blocks:
            block.ref_count, block.key = 0, None
        self.free_queue = OrderedDict((block.block_id, None) for block in self.blocks)
        self.index = type(self.index)()
        self._lose(self.free_queue)
        if self.watcher is not None:
            self.watcher.cleared(DEVICE)

    def publish(self, block_id: int, key: PrefixKey, previous: int | None) -> bool:
        """Let others find this block under `key`; False when an equal one is there already."""
        if not self.index.insert(key, block_id, previous):
            return False
        self.blocks[block_id].key = key
        if self.watcher is not None:
            self.watcher.stored(key, DEVICE)
        return True

    def unpublish(self, block_id: int, event: str = "kv.block_unpublished") -> None:
        """Take a block, and what can only be found through it, out of the index."""
        key = self.blocks[block_id].key
        if key is None:
            return
        gone = self.index.remove(key, block_id)
        for other in gone:
            block = self.blocks[other]
            if self.watcher is not None and block.key is not None:
                self.watcher.removed(block.key, DEVICE)
            block.key = None
        self._lose(other for other in gone if self.blocks[other].ref_count == 0)
        if self._events:
            self._events.emit("kv", event, None, blocks=gone)

    def _lose(self, block_ids: Iterable[int]) -> None:
        """These blocks changed hands; what one holds is lost unless the index can find it."""
        if self.lost is not None:
            self.lost += [b for b in block_ids if self.blocks[b].key is None]
