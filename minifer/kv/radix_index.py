"""The prefix index as a radix tree (SGLang's RadixAttention, arXiv 2312.07104, section 3).

Edges are compressed: a node holds a run of blocks that nobody has branched off. With P = 2 and
the requests [1 2 3 4 5 6] and [1 2 7 8], inserted in this order::

    before                       after the second
    (1 2 | 3 4 | 5 6)            (1 2) ─┬─ (3 4 | 5 6)
                                        └─ (7 8)

Tokens themselves are compared on the way down, so there is nothing that could collide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from minifer.kv.prefix_key import ExtraKeys, PrefixKey

BlockTokens = tuple[int, ...]


class RadixNode:
    """A run of blocks: `tokens[i]` are in block `blocks[i]`. The root of a tree is empty."""

    __slots__ = ("blocks", "children", "parent", "tokens")

    def __init__(
        self, tokens: list[BlockTokens], blocks: list[int], parent: RadixNode | None
    ) -> None:
        self.tokens = tokens
        self.blocks = blocks
        self.parent = parent
        self.children: dict[BlockTokens, RadixNode] = {}  # by the first block of the child

    def subtree(self) -> Iterator[RadixNode]:
        """This node and everything below it."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class RadixIndex:
    """A tree for each set of extra keys (salt, adapter, …), below one interface.

    A request publishes only below blocks of its own table, so whoever uses a block uses the path
    to it: a child is never in more tables than its parent.
    """

    def __init__(self) -> None:
        self.roots: dict[ExtraKeys, RadixNode] = {}
        self._node_of: dict[int, RadixNode] = {}

    def match(self, keys: Sequence[PrefixKey]) -> list[int]:
        node = self.roots.get(keys[0].extra) if keys else None
        found: list[int] = []
        while node is not None and len(found) < len(keys):
            node = node.children.get(keys[len(found)].token_ids)
            if node is None:
                break
            for tokens, block_id in zip(node.tokens, node.blocks, strict=True):
                if len(found) == len(keys) or keys[len(found)].token_ids != tokens:
                    return found  # inside an edge
                found.append(block_id)
        return found

    def insert(self, key: PrefixKey, block_id: int, previous: int | None) -> bool:
        if previous is None:
            node = self.roots.setdefault(key.extra, RadixNode([], [], None))
        elif previous in self._node_of:
            node = self._node_of[previous]
            if previous != node.blocks[-1]:
                at = node.blocks.index(previous) + 1
                if node.tokens[at] == key.token_ids:
                    return False
                self._split(node, at)
        else:
            return False  # the block before is a private copy: no path of its own leads here
        if key.token_ids in node.children:
            return False
        if node.parent is not None and not node.children:
            node.tokens.append(key.token_ids)
            node.blocks.append(block_id)
            self._node_of[block_id] = node
        else:
            child = RadixNode([key.token_ids], [block_id], node)
            node.children[key.token_ids] = child
            self._node_of[block_id] = child
        return True

    def remove(self, key: PrefixKey, block_id: int) -> list[int]:
        node = self._node_of.get(block_id)
        if node is None:
            return []
        at = node.blocks.index(block_id)
        gone = node.blocks[at:]
        for child in node.children.values():
            gone += [block for below in child.subtree() for block in below.blocks]
        if at == 0 and node.parent is not None:
            del node.parent.children[node.tokens[0]]
            if not node.parent.children and node.parent.parent is None:
                self.roots.pop(key.extra, None)
        node.tokens, node.blocks, node.children = node.tokens[:at], node.blocks[:at], {}
        for block in gone:
            del self._node_of[block]
        return gone

    def _split(self, node: RadixNode, at: int) -> None:
        """Cut a node's run at `at`: the upper part keeps the node, the rest becomes its child."""
        lower = RadixNode(node.tokens[at:], node.blocks[at:], node)
        lower.children = node.children
        for child in lower.children.values():
            child.parent = lower
        node.tokens, node.blocks = node.tokens[:at], node.blocks[:at]
        node.children = {lower.tokens[0]: lower}
        for block in lower.blocks:
            self._node_of[block] = lower
