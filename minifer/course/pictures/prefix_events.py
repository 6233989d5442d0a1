"""What the events of a prefix cache say: the tree of prefixes, occupancy, evictions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from minifer.events import Event
from minifer.kv.radix_index import RadixIndex, RadixNode

TIERS = ("device", "DRAM", "disk")


@dataclass(frozen=True)
class TreeBlock:
    """A block in the tree of prefixes. row, place: where it is drawn; place is its block index.

    above: row of the block in front of it, None for a first one. found_by: requests that hit it.
    """

    row: int
    place: int
    above: int | None
    block_id: int
    tokens: tuple[int, ...]
    owner: str
    found_by: tuple[str, ...]


def tree_data(index: RadixIndex, events: Iterable[Event]) -> list[TreeBlock]:
    """The blocks of a radix index, depth first; owners and hits from the events of its engine."""
    owner: dict[int, str] = {}
    found: dict[int, list[str]] = {}
    for event in events:
        for block_id in event.data.get("blocks", ()) if event.stage == "kv" else ():
            if event.name == "kv.block_published":
                owner[block_id] = event.request_id or ""
            elif event.name == "kv.prefix_hit":
                found.setdefault(block_id, []).append(event.request_id or "")
    rows = 0
    blocks: list[TreeBlock] = []

    def walk(node: RadixNode, place: int, above: int | None) -> None:
        nonlocal rows
        row = rows
        for offset, (tokens, block_id) in enumerate(zip(node.tokens, node.blocks, strict=True)):
            hits = tuple(found.get(block_id, ()))
            upper = above if offset == 0 else row
            blocks.append(
                TreeBlock(row, place + offset, upper, block_id, tokens, owner[block_id], hits)
            )
        end = place + len(node.blocks)
        for number, child in enumerate(node.children.values()):
            rows += number > 0
            walk(child, end, row if node.blocks else None)

    for root in index.roots.values():
        walk(root, 0, None)
    return blocks


@dataclass(frozen=True)
class Occupancy:
    """Blocks on the device and in DRAM after a step that computed something.

    cached: free, but can be found. hits: tokens this step found, by tier.
    """

    number: int
    request: str
    in_use: int
    cached: int
    dram: int
    hits: Mapping[str, int] = field(default_factory=dict)


def occupancy_data(events: Iterable[Event], dram_blocks: int) -> list[Occupancy]:
    """From the events alone: DRAM evicts only when it is full, and so holds what came in, at most
    its capacity.
    """
    refs: dict[int, int] = {}
    published: set[int] = set()
    come_in = 0
    request, hits = "", dict.fromkeys(TIERS, 0)
    columns: list[Occupancy] = []
    for event in events:
        blocks: Any = event.data.get("blocks", ())  # ids; of the tiers' events a number
        match event.name:
            case "kv.block_allocated" | "kv.prefix_hit":
                for block in blocks:
                    refs[block] = refs.get(block, 0) + 1
                if event.name == "kv.prefix_hit" and event.token_range:
                    hits["device"] += event.token_range[1]
            case "kv.block_freed":
                for block in blocks:
                    del refs[block]
            case "kv.block_published":
                published.update(blocks)
            case "kv.block_evicted" | "kv.block_unpublished":
                published.difference_update(blocks)
            case "kv.tier_hit":
                hits["DRAM"] += event.data["dram"]
                hits["disk"] += event.data["disk"]
            case "kv.block_stored" | "kv.prefetch_done":
                come_in += event.data["blocks"]
            case "request.scheduled":
                request = event.request_id or ""
            case "step.postprocessed":
                columns.append(
                    Occupancy(
                        len(columns) + 1,
                        request,
                        len(refs),
                        len(published - refs.keys()),
                        min(dram_blocks, come_in),
                        dict(hits),
                    )
                )
                request, hits = "", dict.fromkeys(TIERS, 0)
    return columns


def evictions(events: Iterable[Event]) -> tuple[int, int]:
    """(blocks evicted, how many of them a request was using at that moment), on the device."""
    refs: dict[int, int] = {}
    count = used = 0
    for event in events:
        match event.name:
            case "kv.block_allocated" | "kv.prefix_hit":
                for block in event.data["blocks"]:
                    refs[block] = refs.get(block, 0) + 1
            case "kv.block_freed":
                for block in event.data["blocks"]:
                    del refs[block]
            case "kv.block_evicted":
                count += len(event.data["blocks"])
                used += sum(block in refs for block in event.data["blocks"])
    return count, used
