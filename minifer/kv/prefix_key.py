"""The name of a cached block: everything its keys and values depend on.

The KV of a block is a function of the tokens in it, of every token before it, and of what else
shaped them: the cache salt, an adapter, for a loop model its depth. A `PrefixKey` holds exactly
that as a chain, each key pointing at its parent, with a SHA-256 digest for look-up.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ExtraKeys = tuple[tuple[str, str], ...]
HashFunction = Callable[[bytes], bytes]


def sha256(data: bytes) -> bytes:
    """The default hash: the same digest in every process, and no known collisions."""
    return hashlib.sha256(data).digest()


@dataclass(frozen=True, eq=False, slots=True)
class PrefixKey:
    """One full block in its context. Compare with `same_prefix`, look up by `digest`."""

    parent: PrefixKey | None
    token_ids: tuple[int, ...]
    extra: ExtraKeys
    digest: bytes


def extra_keys_of(
    salt: str | None, num_loops: int | None = None, loop_kv_policy: str = "full"
) -> ExtraKeys:
    """What besides its tokens the KV of a request depends on, each tagged with its kind."""
    extra = () if salt is None else (("salt", salt),)
    return extra if num_loops is None else (*extra, ("loops", f"{num_loops} {loop_kv_policy}"))


def make_key(
    parent: PrefixKey | None,
    token_ids: Sequence[int],
    extra: ExtraKeys = (),
    hash_function: HashFunction = sha256,
) -> PrefixKey:
    """Key of the block that holds `token_ids` after `parent`.

    extra: (kind, value) pairs; the kind is hashed too, so that a salt "a" is not an adapter "a".
    Tokens are hashed as 64-bit integers, every variable part with its length.
    """
    parts = [parent.digest if parent else b"", array("q", token_ids).tobytes()]
    parts += [text.encode() for pair in extra for text in pair]
    data = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return PrefixKey(parent, tuple(token_ids), extra, hash_function(data))


def same_prefix(a: PrefixKey | None, b: PrefixKey | None) -> bool:
    """Do two keys name the same tokens in the same context? Decides what a digest only suggests.

    Walks both chains until they meet in one object, which on a look-up that came down the chain
    is one step.
    """
    while a is not b:
        if a is None or b is None or a.token_ids != b.token_ids or a.extra != b.extra:
            return False
        a, b = a.parent, b.parent
    return True
