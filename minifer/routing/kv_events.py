"""What replicas tell a router about their KV: three events, in numbered batches of JSON.

::

    engine's thread           any thread                             the router's
    BlockPool, DramTier ─▶ KVEventPublisher.take, .snapshot ─▶ encode … decode ─▶ KVIndex.apply

The events and their fields are vLLM's (`vllm/distributed/kv_events.py`), without the tokens: a
digest names a block and everything before it.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from minifer.kv.watcher import DEVICE, DRAM

MEDIA = (DEVICE, DRAM)


@dataclass(frozen=True, slots=True)
class BlockStored:
    """These blocks can be found; each is the parent of the next, the first has this parent.

    parent_block_hash: None where a prompt begins. medium: one of `MEDIA`.
    """

    block_hashes: tuple[Hashable, ...]
    parent_block_hash: Hashable | None
    medium: str = DEVICE


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """These blocks can no longer be found in this medium."""

    block_hashes: tuple[Hashable, ...]
    medium: str = DEVICE


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing can be found in this medium any more; None: in none of them."""

    medium: str | None = None


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """What a replica says at once. No events at all is a sign of life.

    epoch: of the replica's process; a later one has a larger number. sequence: of the batch in its
    epoch, counted from 1. snapshot: the events are everything it holds, and `sequence` is the last
    batch that they contain.
    """

    replica: str
    epoch: int
    sequence: int
    events: tuple[KVEvent, ...] = ()
    snapshot: bool = False


def encode(batch: KVEventBatch) -> str:
    """One line of JSON, digests in hexadecimal. Raises `TypeError` for keys that are not bytes."""
    return json.dumps(
        {
            "replica": batch.replica,
            "epoch": batch.epoch,
            "sequence": batch.sequence,
            "snapshot": batch.snapshot,
            "events": [_event_to_dict(event) for event in batch.events],
        },
        separators=(",", ":"),
    )


def decode(text: str | bytes) -> KVEventBatch:
    """What `encode` made. Raises `ValueError` for anything else."""
    try:
        fields = json.loads(text)
        return KVEventBatch(
            replica=_typed(fields["replica"], str),
            epoch=_typed(fields["epoch"], int),
            sequence=_typed(fields["sequence"], int),
            events=tuple(_event_from_dict(event) for event in fields["events"]),
            snapshot=_typed(fields["snapshot"], bool),
        )
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a batch of KV events: {error!r}") from error


def _event_to_dict(event: KVEvent) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": type(event).__name__, "medium": event.medium}
    if not isinstance(event, AllBlocksCleared):
        fields["block_hashes"] = [_hex(digest) for digest in event.block_hashes]
    if isinstance(event, BlockStored):
        parent = event.parent_block_hash
        fields["parent_block_hash"] = None if parent is None else _hex(parent)
    return fields


def _event_from_dict(fields: dict[str, Any]) -> KVEvent:
    kind, medium = fields["type"], fields["medium"]
    if kind == "AllBlocksCleared" and medium is None:
        return AllBlocksCleared()
    if medium not in MEDIA:
        raise ValueError(f"medium must be one of {', '.join(MEDIA)}, got {medium!r}")
    if kind == "AllBlocksCleared":
        return AllBlocksCleared(medium)
    hashes = tuple(bytes.fromhex(digest) for digest in fields["block_hashes"])
    if kind == "BlockRemoved":
        return BlockRemoved(hashes, medium)
    if kind == "BlockStored":
        parent = fields["parent_block_hash"]
        return BlockStored(hashes, None if parent is None else bytes.fromhex(parent), medium)
    raise ValueError(f"unknown event {kind!r}")


def _hex(digest: Hashable) -> str:
    if not isinstance(digest, bytes):
        raise TypeError(f"only digests go over a wire, got {digest!r}")
    return digest.hex()


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} expected, got {value!r}")
    return value
