"""One block as a file: a safetensors file whose every byte is known before it is read.

The header says which block this is and carries the payload's checksum; the payload follows. Header
and name are functions of the block's key, so a file is checked by writing its header a second
time: whatever is not byte for byte the same - another model, another prefix, a torn write, a
flipped bit - is not this block. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import dataclass
from functools import cached_property
from math import prod

from minifer.kv.prefix_key import PrefixKey

VERSION = "1"
ELEMENT_BYTES = {"F32": 4, "BF16": 2, "F16": 2}  # by safetensors' name of a dtype
Bytes = bytes | bytearray | memoryview
Namespace = tuple[tuple[str, str], ...]


def namespace_digest(namespace: Namespace) -> bytes:
    """SHA-256 of (kind, value) pairs: everything KV depends on that is not in a `PrefixKey`.

    The kinds are hashed too, and every part with its length: no two namespaces are written alike.
    """
    parts = [text.encode() for pair in (("version", VERSION), *namespace) for text in pair]
    return hashlib.sha256(b"".join(len(p).to_bytes(8, "little") + p for p in parts)).digest()


@dataclass(frozen=True)
class BlockFormat:
    """How blocks of one engine lie in files.

    namespace: what the blocks depend on beside their prefix, dtype and shape. dtype: "F32", "BF16"
    or "F16". shape: [2 · slots, P, K, C], the keys of all slots, then the values.
    """

    namespace: Namespace
    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def num_bytes(self) -> int:
        """Of one payload."""
        return prod(self.shape) * ELEMENT_BYTES[self.dtype]

    @cached_property
    def digest(self) -> bytes:
        layout = (("dtype", self.dtype), ("shape", repr(self.shape)))
        return namespace_digest((*self.namespace, *layout))

    def file_name(self, key: PrefixKey) -> str:
        """64 hexadecimal digits, the same in every process: SHA-256 of namespace and prefix."""
        return hashlib.sha256(self.digest + key.digest).hexdigest()

    def encode(self, key: PrefixKey, payload: Bytes) -> bytes:
        """The file's content."""
        return self.header(key, payload) + payload

    def decode(self, key: PrefixKey, content: bytearray) -> memoryview | None:
        """The payload, writable and sharing `content`'s memory; None unless it is `key`'s file."""
        split = len(content) - self.num_bytes
        payload = memoryview(content)[max(0, split) :]
        if split <= 0 or content[:split] != self.header(key, payload):
            return None
        return payload

    def header(self, key: PrefixKey, payload: Bytes) -> bytes:
        """Length, JSON and padding to 8 bytes. `extra` holds secrets (salts): only its digest."""
        parent = "" if key.parent is None else self.file_name(key.parent)
        extra = json.dumps(key.extra).encode()
        metadata = {
            "version": VERSION,
            "namespace": self.digest.hex(),
            "block": self.file_name(key),
            "parent": parent,
            "extra": hashlib.sha256(extra).hexdigest(),
            "token_ids": json.dumps(key.token_ids),
            "crc32": f"{zlib.crc32(payload):08x}",
        }
        tensor = {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "data_offsets": [0, self.num_bytes],
        }
        text = json.dumps({"__metadata__": metadata, "kv": tensor}).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text
