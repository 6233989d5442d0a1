"""Lecture 5 as plain values: what a look-up finds, who is evicted, which tier holds what.

Owners are known by name: a block is labelled after the request that published it, "A0" is the first
block of A. At the end: what a reload takes on this machine, timed. `prefix_tiers_views` draws.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from minifer import Engine, EngineConfig, SamplingParams
from minifer.course.example import TRIO, Recorder, tiny
from minifer.course.pictures.prefix_events import TIERS as TIERS
from minifer.course.pictures.prefix_events import Occupancy as Occupancy
from minifer.course.pictures.prefix_events import TreeBlock as TreeBlock
from minifer.course.pictures.prefix_events import evictions as evictions
from minifer.course.pictures.prefix_events import occupancy_data as occupancy_data
from minifer.course.pictures.prefix_events import tree_data as tree_data
from minifer.events import Event, EventBus, ListSink
from minifer.kv.block_pool import BlockPool
from minifer.kv.prefix_index import HashChainIndex, PrefixIndex
from minifer.kv.prefix_key import PrefixKey, make_key
from minifer.kv.radix_index import RadixIndex
from minifer.kv.tiers.block_file import BlockFormat
from minifer.kv.tiers.dram import StoredBlock
from minifer.outputs import RequestOutput
from minifer.perf.costs import ElementBytes, prefill_cost
from minifer.perf.devices import Device

BLOCK_SIZE = 8
BLOCK_BYTES = 24_576  # of minifer-tiny in float32: 2 · 4 layers · 8 tokens · 6 heads · 16 · 4 bytes
QUESTION, FOLLOW_UP = "What is a list? ", " And a tuple?"
# (visit, tokens wanted); a chat's second turn sends all of the first one back, answer included
VISITS = (
    ("A", 12),
    ("B", 9),
    ("C", 6),
    ("chat", 16),
    ("chat 2", 8),
    ("C again", 6),
    ("A again", 12),
)
# Bytes a second of links, at most. PCIe 5: 32 GT/s, 16 lanes, 128 of 130 bits; PCIe 4: 16 GT/s, 4
# lanes; the last is an assumption.
LINKS = {"PCIe 5 x16": 63.0e9, "100 Gb/s net": 12.5e9, "NVMe, PCIe 4 x4": 7.9e9, "slow net": 0.5e9}
# Model and chips: FLOP/s, D, query heads a KV head, bytes an element; for `mooncake_break_even`.
SYSTEMS = {
    "70B, 8 x A800": (8 * 312e12, 8192, 8, 2),
    "70B, 8 x H800": (8 * 989e12, 8192, 8, 2),
    "8B, H200 at half its peak": (989e12 / 2, 4096, 4, 2),
    "SmolLM2-135M, a CPU of 100 GFLOP/s": (100e9, 576, 3, 4),
}
_INDEXES: Mapping[str, type[PrefixIndex]] = {"hash": HashChainIndex, "radix": RadixIndex}


# -- data: a run, request after request


@dataclass(frozen=True)
class Shelves:
    """What lies where: labels such as "A0", the first block of A. device: by block id, "" free.

    dram: least recently used first. disk: in the order in which blocks were first published.
    """

    device: tuple[str, ...]
    in_use: tuple[bool, ...]
    dram: tuple[str, ...] = ()
    disk: tuple[str, ...] = ()


@dataclass(frozen=True)
class Visit:
    """One request, served alone. found: tokens by tier. shelves: after it has gone."""

    name: str
    num_prompt_tokens: int
    found: Mapping[str, int]
    tokens: tuple[int, ...]
    shelves: Shelves


@dataclass(frozen=True)
class VisitsRun:
    """What came out of `serve_visits`. held: (DRAM, disk) blocks after each step that computed.

    engine: still open.
    """

    visits: tuple[Visit, ...]
    events: list[Event]
    engine: Engine
    held: tuple[tuple[int, int], ...]

    def found(self, name: str) -> dict[str, int]:
        return dict(next(visit.found for visit in self.visits if visit.name == name))


def open_engine(**options: Any) -> tuple[Engine, ListSink]:
    """minifer-tiny with blocks of 8 tokens, and a clock of a millisecond a step."""
    sink = ListSink()
    settings = {"block_size": BLOCK_SIZE, "num_kv_blocks": 8, "max_num_batched_tokens": 16}
    engine: Engine = Engine.from_loaded(
        tiny(),
        EngineConfig(**{**settings, **options}),
        sinks=[sink],
        clock=lambda: engine.events.step / 1000,
    )
    return engine, sink


def serve_visits(
    visits: Sequence[tuple[str, int]] = VISITS,
    *,
    folder: Path | str | None = None,
    dram_blocks: int | None = None,
    **options: Any,
) -> VisitsRun:
    """Serve A, B, C and a chat, one after the other, so that each finds what the others left.

    folder, dram_blocks: the tiers below the device, None for none. What is to be written is on disk
    before the next step, and whatever a tier has is loaded: no speed decides what is found.
    """
    if folder is not None:
        options |= {"kv_disk_path": folder, "kv_load_timeout": 60.0}
    if dram_blocks is not None:
        options["kv_dram_bytes"] = dram_blocks * BLOCK_BYTES
    engine, sink = open_engine(kv_load_policy="always", **options)
    labels: dict[bytes, str] = {}
    answers: dict[str, list[int]] = {}
    held: list[tuple[int, int]] = []
    done = []
    for name, count in visits:
        prompt = visit_prompt(name, answers)
        before = _stored_hits(engine)
        output = serve_one(engine, name, prompt, count, held)
        tokens = [*output.outputs[0].token_ids]
        answers[name] = [*prompt, *tokens]
        for place, key in enumerate(keys_of(answers[name][:-1])):
            labels.setdefault(key.digest, f"{name.split()[0]}{place}")
        loaded = {tier: n - before[tier] for tier, n in _stored_hits(engine).items()}
        device = output.num_cached_tokens - sum(loaded.values())
        shelves = shelves_of(engine, labels)
        found = {"device": device, **loaded}
        done.append(Visit(name, len(prompt), found, tuple(tokens), shelves))
    return VisitsRun(tuple(done), sink.events, engine, tuple(held))


def visit_prompt(name: str, answers: Mapping[str, list[int]]) -> list[int]:
    """Prompt of a visit; a second turn begins with everything of the first."""
    if name == "chat":
        return list(QUESTION.encode())
    if name == "chat 2":
        return [*answers["chat"], *FOLLOW_UP.encode()]
    return list(TRIO[name.split()[0]][0].encode())


def serve_one(
    engine: Engine,
    name: str,
    prompt: str | Sequence[int],
    count: int,
    held: list[tuple[int, int]] | None = None,
    **sampling: Any,
) -> RequestOutput:
    """Serve one request alone, greedily; what it leaves for the disk is written at once.

    held: (DRAM, disk) blocks after each step that computed something are added here.
    """
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=count, **sampling)
    engine.add_request(name, prompt, params)
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
        tiers = engine.kv.tiers
        if tiers is not None:
            tiers.flush()
        if held is not None and engine.num_step_tokens:
            on_disk = 0 if tiers is None or tiers.disk is None else len(tiers.disk)  # type: ignore
            held.append((0 if tiers is None else len(tiers.dram), on_disk))
    return outputs[-1]


@dataclass(frozen=True)
class Served:
    """What `serve_last` returns. logits: float32 [1, V], from which the first token is drawn."""

    num_found: int
    text: str
    logits: Tensor


def serve_last(texts: Sequence[str], count: int, index: Any = None, **options: Any) -> Served:
    """Serve all but the last text for a token each, then the last one for `count` tokens.

    index: stands in the engine in place of its own prefix index.
    """
    engine, _ = open_engine(**{"num_kv_blocks": 32, **options})
    if index is not None:
        engine.kv.pool.index = index
    for text in texts[:-1]:
        serve_one(engine, text, text, 1)
    engine.runner = recorder = Recorder(engine.runner)
    output = serve_one(engine, "last", texts[-1], count)
    logits = next(rows for _, rows in recorder.steps if len(rows))
    return Served(output.num_cached_tokens, output.outputs[0].text, logits)


def block_differences(one: str, other: str) -> dict[str, list[float]]:
    """Largest difference of the keys, and of the values, of tokens 8 to 15 of two texts, by layer.

    Each text is computed alone.
    """

    def second_block(text: str) -> dict[str, Tensor]:
        engine, _ = open_engine(enable_prefix_caching=False)
        serve_one(engine, "alone", text, 1)
        storage = engine.runner.kv  # type: ignore[attr-defined]
        parts = {"keys": storage.keys, "values": storage.values}
        return {name: torch.stack([layer[1] for layer in part]) for name, part in parts.items()}

    a, b = second_block(one), second_block(other)
    return {name: (a[name] - b[name]).abs().amax(dim=(1, 2, 3)).tolist() for name in a}


def _stored_hits(engine: Engine) -> dict[str, int]:
    hits = {} if engine.kv.tiers is None else engine.kv.tiers.stats.hits
    return {"DRAM": hits.get("dram", 0), "disk": hits.get("disk", 0)}


def shelves_of(engine: Engine, labels: Mapping[bytes, str]) -> Shelves:
    """Look into an engine's pool and tiers. labels: digest → label; others are "?"."""
    blocks = engine.kv.pool.blocks
    device = tuple(labels.get(b.key.digest, "?") if b.key else "" for b in blocks)
    in_use = tuple(b.ref_count > 0 for b in blocks)
    tiers = engine.kv.tiers
    if tiers is None:
        return Shelves(device, in_use)
    dram = tuple(labels.get(stored.key.digest, "?") for stored in tiers.dram)
    on_disk = []
    if tiers.disk is not None:
        names = {tiers.disk.path(_Digest(digest)).stem: digest for digest in labels}  # type: ignore
        there = {path.stem for path in tiers.disk.folder.glob("*/*/*.safetensors")}  # type: ignore
        on_disk = [labels[digest] for name, digest in names.items() if name in there]
    return Shelves(device, in_use, dram, tuple(on_disk))


@dataclass(frozen=True)
class _Digest:
    """All that a file's name is made of."""

    digest: bytes


def keys_of(tokens: Sequence[int], block_size: int = BLOCK_SIZE) -> list[PrefixKey]:
    """The engine's keys of the full blocks of `tokens`."""
    keys: list[PrefixKey] = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = list(tokens[start : start + block_size])  # of bytes, too
        keys.append(make_key(keys[-1] if keys else None, block))
    return keys


def random_prompts(rng: Random, count: int) -> list[list[int]]:
    """Prompts over four tokens: a part of one of six stems, then a token a few times, whole
    blocks or not.
    """
    stems = [[rng.randrange(4) for _ in range(40)] for _ in range(6)]
    prompts = []
    for _ in range(count):
        stem = rng.choice(stems)[: rng.randrange(41)]
        prompts.append(stem + [rng.randrange(4)] * rng.randrange(20))
    return prompts


def names_of(prompts: Iterable[Sequence[int]]) -> set[tuple[bytes, tuple[int, ...]]]:
    """(name, whole beginning) of every full block of some prompts."""
    return {
        (key.digest, tuple(tokens[: place * BLOCK_SIZE]))
        for tokens in prompts
        for place, key in enumerate(keys_of(tokens), start=1)
    }


def found_under_one_name(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """How many blocks each of two blocks' tokens finds when a broken hash gives both one name and
    the first is published.
    """
    keys = [make_key(None, tokens, (), lambda data: bytes(32)) for tokens in (first, second)]
    index = HashChainIndex()
    index.insert(keys[0], 0, None)
    return [len(index.match([key])) for key in keys]


def names_of_file(layout: BlockFormat, key: PrefixKey) -> int:
    """How many file names one block has: as it is, of other weights, another dtype and shape."""
    variants = (
        layout,
        replace(layout, namespace=(("weights", "others"),)),
        replace(layout, dtype="BF16"),
        replace(layout, shape=(1, *layout.shape)),
    )
    return len({variant.file_name(key) for variant in variants})


# -- data: hits of a pool of blocks


def replay(
    prompts: Sequence[Sequence[PrefixKey]], num_blocks: int, index: str = "hash"
) -> list[int]:
    """Blocks that each prompt finds, served one after the other by the engine's pool and index.

    prompts: keys of their full blocks, at most `num_blocks`; what is left over is not modelled.
    """
    pool = BlockPool(num_blocks, _INDEXES[index](), EventBus())
    found = []
    for keys in prompts:
        hits = pool.index.match(keys)
        pool.acquire(hits)
        table = hits + pool.allocate(len(keys) - len(hits))
        for place in range(len(hits), len(keys)):
            pool.publish(table[place], keys[place], table[place - 1] if place else None)
        pool.release(reversed(table))
        found.append(len(hits))
    return found


def hit_rate(prompts: Sequence[Sequence[PrefixKey]], num_blocks: int) -> float:
    """Share of the prompts' blocks that are found."""
    return sum(replay(prompts, num_blocks)) / sum(map(len, prompts))


def workload(kind: str, rng: Random, count: int = 240) -> list[list[PrefixKey]]:
    """Prompts of 12 blocks: "shared" (16 beginnings of 8 blocks, the n-th as likely as 1 / n),
    "circle" (12 documents, over and over in the same order) or "new" (nothing comes twice).
    """

    def text(num_blocks: int) -> list[int]:
        return [rng.randrange(256) for _ in range(num_blocks * BLOCK_SIZE)]

    if kind == "new":
        return [keys_of(text(12)) for _ in range(count)]
    if kind == "circle":
        documents = [keys_of(text(12)) for _ in range(12)]
        return [documents[number % 12] for number in range(count)]
    if kind != "shared":
        raise ValueError(f'kind must be "shared", "circle" or "new", got {kind!r}')
    stems = [text(8) for _ in range(16)]
    picks = rng.choices(stems, weights=[1 / n for n in range(1, 17)], k=count)
    return [keys_of([*stem, *text(4)]) for stem in picks]


# -- data: load or recompute, timed here


@dataclass(frozen=True)
class ReloadTimes:
    """Seconds for the first n tokens of a prompt on this machine, by n."""

    num_tokens: tuple[int, ...]
    recompute: tuple[float, ...]
    dram: tuple[float, ...]
    disk: tuple[float, ...]


def time_reload(folder: Path | str, lengths: Sequence[int], repeats: int = 3) -> ReloadTimes:
    """Time the engine's own parts: a step of prefill, a copy from DRAM, files read and checked.

    Files are dropped from the system's memory before they are read, where the system lets us.
    The best of `repeats` counts.
    """
    longest = -(-max(lengths) // BLOCK_SIZE)
    options = {"num_kv_blocks": longest + 2}
    engine, _ = open_engine(  # in small steps: the queue to the disk holds half of DRAM
        **options,
        max_num_batched_tokens=64,
        kv_dram_bytes=max(32, longest + 2) * BLOCK_BYTES,
        kv_disk_path=folder,
    )
    prompt = [(7 * n) % 250 for n in range(max(lengths) + 1)]
    serve_one(engine, "write", prompt, 1)  # fills the tiers, and warms everything up
    tiers, storage = engine.kv.tiers, engine.runner.kv  # type: ignore[attr-defined]
    assert tiers is not None and tiers.disk is not None
    stored = tiers.dram.match(keys_of(prompt))
    plain, _ = open_engine(
        **options, max_num_batched_tokens=max(lengths), enable_prefix_caching=False
    )
    serve_one(plain, "warm", prompt[:64], 1)

    def recompute(count: int) -> None:
        serve_one(plain, "again", prompt[:count], 1)

    def from_dram(blocks: Sequence[StoredBlock]) -> None:
        storage.write_blocks(list(enumerate(blocks)))

    def from_disk(blocks: Sequence[StoredBlock]) -> None:
        read = [StoredBlock(block.key, tiers.disk.read(block.key)) for block in blocks]  # type: ignore
        from_dram(read)

    def best(function: Any, argument: Any, before: Any = None) -> float:
        seconds = []
        for _ in range(repeats):
            if before is not None:
                before(argument)
            started = time.perf_counter()
            function(argument)
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    def forget(blocks: Sequence[StoredBlock]) -> None:
        for block in blocks:
            drop_from_memory(tiers.disk.path(block.key))  # type: ignore[union-attr]

    parts = [stored[: count // BLOCK_SIZE] for count in lengths]
    times = ReloadTimes(
        tuple(lengths),
        tuple(best(recompute, count) for count in lengths),
        tuple(best(from_dram, blocks) for blocks in parts),
        tuple(best(from_disk, blocks, forget) for blocks in parts),
    )
    engine.close()
    plain.close()
    return times


def time_names(num_tokens: int) -> float:
    """Seconds for the names of all blocks of a prompt."""
    tokens = [n % 250 for n in range(num_tokens)]
    started = time.perf_counter()
    keys_of(tokens)
    return time.perf_counter() - started


def predict_reload(
    lengths: Sequence[int], machine: Device, disk_rate: float, tiers: Mapping[str, float]
) -> dict[str, list[float]]:
    """Seconds that `time_reload` cannot be faster than, by what is done, for each length.

    disk_rate: bytes/s of the disk. tiers: name → bytes/s of further tiers.
    """
    element = ElementBytes(4.0, 4.0, 4.0)  # float32
    work = [prefill_cost(tiny().config, n, element=element).total() for n in lengths]
    num_bytes = [n // BLOCK_SIZE * BLOCK_BYTES for n in lengths]
    rates = {"from disk": disk_rate, "from DRAM": machine.memory_bandwidth / 2, **tiers}
    seconds = {name: [n / rate for n in num_bytes] for name, rate in rates.items()}
    return {"recompute": [machine.seconds(c.flops, c.bytes) for c in work], **seconds}


def drop_from_memory(path: Path) -> None:
    """Ask the system to forget its copy of a file, so that the next read goes to the disk."""
    if not hasattr(os, "posix_fadvise"):
        return
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def file_read_rate(folder: Path | str, num_bytes: int = 32 << 20) -> float:
    """Bytes a second of reading one large file, from the disk where the system lets us."""
    path = Path(folder) / "large"
    with open(path, "wb") as file:
        file.write(os.urandom(1 << 20) * (num_bytes >> 20))
        file.flush()
        os.fsync(file.fileno())
    drop_from_memory(path)
    started = time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(1 << 20)
        while file.readinto(buffer):
            pass
    seconds = time.perf_counter() - started
    path.unlink()
    return num_bytes / seconds
