"""Faults of the prefix cache: a block is reused where it must not be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from minifer.engine import Engine
from minifer.faults.registry import Fault, github, patched
from minifer.faults.scenes import OTHER, QUESTIONS, SHARED, ask, written
from minifer.kv import manager, prefix_index
from minifer.kv.prefix_key import ExtraKeys, HashFunction, PrefixKey, make_key, sha256


@contextmanager
def hash_without_parent(engine: Engine) -> Iterator[None]:
    """A block's key covers its own tokens, and nothing of what stands before them."""

    def faulty(
        parent: PrefixKey | None, tokens: Sequence[int], extra: ExtraKeys, hash_: HashFunction
    ) -> PrefixKey:
        return make_key(None, tokens, extra, hash_)

    with patched(manager, make_key=faulty), patched(prefix_index, same_prefix=lambda a, b: True):
        yield


@contextmanager
def one_byte_hash(engine: Engine) -> Iterator[None]:
    """One byte of the hash is kept, and a hit is believed without comparing tokens."""
    index = engine.kv.pool.index

    def match(keys: Sequence[PrefixKey]) -> list[int]:
        found: list[int] = []
        for key in keys:
            entry = index._entries.get(key.digest)  # type: ignore[attr-defined]
            if entry is None:
                break
            found.append(entry[1])
        return found

    with patched(engine.kv, _hash=lambda data: sha256(data)[:1]), patched(index, match=match):
        yield


@contextmanager
def salt_ignored(engine: Engine) -> Iterator[None]:
    """The cache salt, which keeps tenants apart, does not reach the key."""
    with patched(manager, extra_keys=lambda request: ()):
        yield


def _same_words_elsewhere(engine: Engine) -> str:
    """The same words in two documents, at other places and after other words."""
    document, section = SHARED + f"{'Which types are ':.<48}", f"{'Section 1.':<16}"
    ask(engine, OTHER + document, section + OTHER)
    return written(ask(engine, section + document)[0])


def _many_conversations(engine: Engine) -> str:
    """The last three of many conversations that begin with different words."""
    prompts = [f"Section {i}. {SHARED}{QUESTIONS[i % 3]}" for i in range(40)]
    for prompt in prompts:
        ask(engine, prompt, max_tokens=1)
    return "\n".join(written(ask(engine, prompt + " ")[0]) for prompt in prompts[-3:])


def _two_tenants(engine: Engine) -> str:
    """Bob asks what Alice has asked. His reply is right; his time to it tells him that she did."""
    ask(engine, SHARED + QUESTIONS[0], cache_salt="alice")
    (bob,) = ask(engine, SHARED + QUESTIONS[0], cache_salt="bob")
    return f"Bob's prompt: {bob.num_cached_tokens} tokens found in the cache\n{written(bob)}"


FAULTS = (
    Fault(
        name="hash-without-parent",
        title="A block's hash does not cover what stands before it",
        mechanism="The keys and values of a block depend on every token before it. Hashed by its "
        "own tokens alone, the block of one conversation is found in another, where the same "
        "words stand after other words.",
        symptom="Fluent replies that have read another beginning than the prompt's. Templates and "
        "boilerplate, which repeat inside of prompts, make it common.",
        sources=(
            github("openvinotoolkit/openvino.genai", 3722, "a hit is not compared with its tokens"),
            github("vllm-project/aibrix", 2329, "only the last hash and the count are compared"),
        ),
        detectors=("pool-invariants", "hit-audit", "replay"),
        inject=hash_without_parent,
        scene=_same_words_elsewhere,
    ),
    Fault(
        name="one-byte-hash",
        title="A short hash, believed",
        mechanism="A hash only suggests that two blocks are equal. Cut to one byte, and with the "
        "tokens not compared, one look-up in a few finds a stranger's block. Of five "
        "billion blocks with hashes of 64 bits two share one with even odds, and whoever knows the "
        "function can make such a pair.",
        symptom="Replies that begin in the middle of somebody else's conversation.",
        sources=(
            github("openvinotoolkit/openvino.genai", 3722, "a hit is not compared with its tokens"),
            github("vllm-project/vllm", 15297, "SHA-256 where Python's own hash may collide"),
        ),
        detectors=("hit-audit", "pool-invariants", "shadow-kv", "replay"),
        inject=one_byte_hash,
        scene=_many_conversations,
        options={"num_kv_blocks": 512},
    ),
    Fault(
        name="salt-ignored",
        title="Tenants share a cache that should keep them apart",
        mechanism="The cache salt is part of what a block's key must cover. Left out, tenants hit "
        "each other's prefixes. The keys and values are right, so is the reply.",
        symptom="None in the text. The time to the first token tells Bob which prompts Alice has "
        "sent: a side channel.",
        sources=(
            github("vllm-project/vllm", 44701, "an adapter's name and a salt share a namespace"),
            github("vllm-project/vllm", 30931, "one adapter name, two adapters"),
            github("sgl-project/sglang", 24638, "the extra key is not part of the look-up"),
        ),
        detectors=("hit-audit", "canary", "shadow-kv"),
        inject=salt_ignored,
        scene=_two_tenants,
    ),
)
