"""Tests of exercises 05: names, look-ups, evictions and files are those of a correct cache."""

from __future__ import annotations

import zlib

import pytest
import torch

from minifer.course.grading import compare, points, probe, unchanged
from minifer.kv.prefix_key import make_key
from minifer.kv.tiers.dram import DramTier
from minifer.kv.tiers.stats import TierStats

# -- 5.1


def engine_names(tokens, block_size, extra=()):
    """Digests of the engine's own keys."""
    keys = []
    for start in range(0, len(tokens) // block_size * block_size, block_size):
        keys.append(
            make_key(
                keys[-1] if keys else None, tokens[start : start + block_size], extra
            )
        )
    return [key.digest for key in keys]


def check_names(target, tokens, block_size, salt=None, adapter=None):
    pairs = (("salt", salt), ("adapter", adapter))
    extra = tuple(pair for pair in pairs if pair[1] is not None)
    tried = f"block_names({tokens}, {block_size}, salt={salt!r}, adapter={adapter!r})"
    with unchanged(tried, token_ids=tokens):
        got = target.block_names(tokens, block_size, salt=salt, adapter=adapter)
    compare(got, engine_names(tokens, block_size, extra), tried)


@points("5.1", 1)
@pytest.mark.parametrize("length", [0, 1, 3, 4, 5])
def test_ex05_1_names_the_full_blocks_only(target, rng, length):
    check_names(target, [rng.randrange(300) for _ in range(length)], 4)


@points("5.1", 1)
@pytest.mark.parametrize("block_size", [1, 2, 3, 8])
def test_ex05_1_a_name_depends_on_all_before_it(target, rng, block_size):
    same = [rng.randrange(300)] * (3 * block_size)
    check_names(target, same, block_size)
    check_names(target, [1, *same], block_size)
    check_names(target, [rng.randrange(300) for _ in range(29)], block_size)


@points("5.1", 1)
def test_ex05_1_salt_and_adapter_are_told_apart(target, rng):
    tokens = [rng.randrange(300) for _ in range(9)]
    for salt, adapter in [
        ("a", None),
        (None, "a"),
        ("", None),
        (None, ""),
        ("a", "b"),
        ("ab", ""),
        ("Schlüssel", "模型"),
    ]:
        check_names(target, tokens, 4, salt, adapter)
    for wrong in (0, -1):
        with pytest.raises(ValueError):
            target.block_names(tokens, wrong)


@points("5.1", 1, hidden=True)
def test_ex05_1_long_prompts_and_large_ids(target, rng):
    tokens = [rng.randrange(1 << 62) for _ in range(2000)]
    tokens[5] = 255
    tokens[6] = (1 << 63) - 1
    for block_size in (1, 16, 37):
        check_names(target, tokens, block_size, "tenant", "lora-7")


@probe("5.1")
def probe_names(target):
    tokens = [1, 2, 3, 4, 1, 2, 3, 4, 300, 70_000, 0]
    return [
        target.block_names(tokens, 4),
        target.block_names(tokens, 4, salt="s"),
        target.block_names(tokens, 4, adapter="s"),
        target.block_names(tokens, 2, salt=""),
        target.block_names(tokens, 2, salt="a", adapter="b"),
    ]


# -- 5.2


class Blocks:
    """A cache filled block by block; `whole` remembers whole beginnings, not names."""

    def __init__(self, block_size, name):
        self.block_size, self.name = block_size, name
        self.cache, self.whole, self.number = {}, {}, 0

    def names(self, tokens):
        P = self.block_size
        return [
            self.name(tuple(tokens[: end + P]))
            for end in range(0, len(tokens) - P + 1, P)
        ]

    def add(self, tokens, first=0):
        """Put the full blocks from `first` on there, the oldest of equal names stays."""
        P, previous = self.block_size, None
        for place, name in enumerate(self.names(tokens)):
            beginning = tuple(tokens[: (place + 1) * P])
            if place >= first and name not in self.cache:
                self.cache[name] = (self.number, beginning[-P:], previous)
                self.whole[beginning] = self.number
            previous = self.whole.get(beginning, self.number)
            self.number += 1

    def expected(self, tokens):
        """By whole beginnings: the run of those that are there, one token left over."""
        P, found = self.block_size, []
        for end in range(P, len(tokens), P):
            if tuple(tokens[:end]) not in self.whole:
                break
            found.append(self.whole[tuple(tokens[:end])])
        return found

    def check(self, target, tokens):
        names, P = self.names(tokens), self.block_size
        shown = [n for n in names if n in self.cache]
        tried = (
            f"cached_blocks({tokens}, {P}, names, cache) where of the {len(names)} names "
            f"{len(shown)} are in the cache: "
            + str({names.index(n): self.cache[n] for n in shown})
        )
        with unchanged(tried, token_ids=tokens, names=names, cache=self.cache):
            got = target.cached_blocks(tokens, P, names, self.cache)
        compare(got, self.expected(tokens), tried)


@points("5.2", 1)
def test_ex05_2_finds_the_longest_beginning(target):
    blocks = Blocks(2, lambda beginning: repr(beginning).encode())
    blocks.add([1, 2, 3, 4, 5, 6])
    for prompt in (
        [1, 2, 9],
        [1, 2, 3, 4, 9],
        [7, 7, 7],
        [1, 2, 3, 9, 5, 6, 7],
        [1, 9, 3],
    ):
        blocks.check(target, prompt)


@points("5.2", 1)
@pytest.mark.parametrize("block_size", [1, 2, 3, 8])
def test_ex05_2_leaves_a_token_to_compute(target, block_size):
    blocks = Blocks(block_size, lambda beginning: repr(beginning).encode())
    tokens = list(range(10, 10 + 3 * block_size + 1))
    blocks.add(tokens)
    for length in range(len(tokens) + 1):
        blocks.check(target, tokens[:length])


@points("5.2", 1)
def test_ex05_2_stops_at_a_gap(target):
    blocks = Blocks(2, lambda beginning: repr(beginning).encode())
    blocks.add([1, 2, 3, 4, 5, 6, 7, 8], first=1)
    blocks.check(target, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    blocks.add([1, 2])
    blocks.cache[b"gap"] = blocks.cache.pop(blocks.names([1, 2, 3, 4])[1])
    blocks.whole.pop((1, 2, 3, 4))
    blocks.check(target, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    # block 1 held [3, 4] in front of [5, 6]; that is gone, and [1, 2] has moved into it
    blocks = Blocks(2, lambda beginning: repr(beginning).encode())
    blocks.add([1, 2, 3, 4, 5, 6])
    first, second, _ = blocks.names([1, 2, 3, 4, 5, 6])
    del blocks.cache[second], blocks.whole[1, 2, 3, 4]
    blocks.cache[first], blocks.whole[1, 2] = (1, (1, 2), None), 1
    blocks.check(target, [1, 2, 3, 4, 5, 6, 7])


@points("5.2", 1)
def test_ex05_2_a_name_is_a_hint_tokens_decide(target, rng):
    """Names of two bits: most prefixes have the name of another."""
    for _ in range(60):
        blocks = Blocks(2, lambda beginning: bytes([sum(beginning) % 4]))
        prompts = [
            [rng.randrange(3) for _ in range(rng.randrange(9))] for _ in range(5)
        ]
        for prompt in prompts:
            blocks.add(prompt)
        for prompt in prompts:
            blocks.check(target, [*prompt, 1])
    # the same tokens in the same place, after another beginning, under the same name
    blocks = Blocks(1, lambda beginning: bytes([len(beginning), beginning[-1]]))
    blocks.add([1, 5, 6])
    blocks.add([2])
    blocks.check(target, [2, 5, 6, 7])


@points("5.2", 1, hidden=True)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_ex05_2_many_long_prompts(target, rng, block_size):
    blocks = Blocks(block_size, lambda beginning: repr(beginning).encode())
    stems = [[rng.randrange(9) for _ in range(rng.randrange(150))] for _ in range(5)]
    prompts = []
    for _ in range(40):
        stem = rng.choice(stems)
        cut = stem[: rng.randrange(len(stem) + 1)]
        prompts.append(cut + [rng.randrange(9) for _ in range(rng.randrange(40))])
    for prompt in prompts[:20]:
        blocks.add(prompt)
    for prompt in prompts:
        blocks.check(target, prompt)


@probe("5.2")
def probe_lookup(target):
    names = [b"a", b"b", b"c"]
    chain = {b"a": (0, (1, 2), None), b"b": (1, (3, 4), 0), b"c": (2, (5, 6), 1)}
    gap = {b"a": (0, (1, 2), None), b"c": (2, (5, 6), 0)}
    other = {b"a": (0, (1, 2), None), b"b": (1, (3, 4), 7)}
    prompt = [1, 2, 3, 4, 5, 6]
    return [
        target.cached_blocks(prompt, 2, names, chain),
        target.cached_blocks([*prompt, 7], 2, names, chain),
        target.cached_blocks([*prompt, 7], 2, names, gap),
        target.cached_blocks([1, 2, 8, 4, 5], 2, names[:2], chain),
        target.cached_blocks([1, 2, 3, 4, 5], 2, names[:2], other),
        target.cached_blocks([1, 2, 3], 2, names[:1], chain),
    ]


# -- 5.3


class Recorded:
    """An answer's PrefixLRU, with the calls so far for the message."""

    def __init__(self, target, capacity):
        self.calls = [f"PrefixLRU({capacity})"]
        self.lru = target.PrefixLRU(capacity)

    @property
    def tried(self):
        shown = self.calls if len(self.calls) < 14 else ["…", *self.calls[-12:]]
        return "; ".join(shown)

    def call(self, name, argument, expected=None):
        self.calls.append(f"{name}({argument!r})")
        with unchanged(self.tried, argument=argument):
            got = getattr(self.lru, name)(argument)
        if expected is not None:
            compare(got, expected, self.tried)
        return got

    def holds(self, held, others=()):
        compare(len(self.lru), len(held), self.tried + "; len(lru)")
        for name in (*held, *others):
            compare(name in self.lru, name in held, self.tried + f"; {name!r} in lru")


def paths(rng, count, names=5, depth=4):
    """Beginnings over a few letters; a name is the whole beginning, as a string."""
    result = []
    for _ in range(count):
        text = "".join(
            rng.choice("abcde"[:names]) for _ in range(rng.randint(1, depth))
        )
        result.append([text[: end + 1] for end in range(len(text))])
    return result


def run_beside_the_engine(target, rng, capacity, count, pins):
    """The same calls on the engine's own DRAM tier; pins hold whole paths, as there."""
    keys = {}

    def key(name):
        if name not in keys:
            before = key(name[:-1]) if len(name) > 1 else None
            keys[name] = make_key(before, [ord(name[-1])])
        return keys[name]

    engine, answer = DramTier(capacity, TierStats()), Recorded(target, capacity)
    pinned = []
    for path in paths(rng, count):
        if pinned and rng.random() < 0.4:
            for name in pinned.pop(rng.randrange(len(pinned))):
                engine.get(key(name)).pins -= 1
                answer.call("unpin", name)
        if rng.random() < 0.4:
            run = engine.match([key(name) for name in path])
            answer.call("lookup", path, len(run))
            engine.touch(run[-1].key if run else None)
            continue
        before = [block.key for block in engine]
        keep = {key(name).digest for name in path}
        for name in path:
            if engine.put(key(name), name, keep) is None:
                break
        engine.touch(key(path[-1]))
        gone = [k for k in before if engine.get(k) is None]
        evicted = answer.call("insert", path)
        compare(evicted, [n for k in gone for n in keys if keys[n] is k], answer.tried)
        held = [block.payload for block in engine]
        answer.holds(held, path)
        if pins and rng.random() < 0.5 and all(name in held for name in path):
            pinned.append(path)
            for name in path:
                engine.get(key(name)).pins += 1
                answer.call("pin", name)


@points("5.3", 1)
def test_ex05_3_the_example(target):
    answer = Recorded(target, 3)
    answer.call("insert", ["a", "b"], [])
    answer.call("insert", ["c"], [])
    answer.call("insert", ["a", "d"], ["b"])
    answer.call("pin", "c")
    answer.call("insert", ["e"], ["d"])
    answer.call("pin", "e")
    answer.call("insert", ["f", "g"], ["a"])
    answer.holds(["c", "e", "f"], ["a", "b", "d", "g"])
    answer.call("insert", [], [])
    answer.call("lookup", [], 0)
    for wrong in (0, -3):
        with pytest.raises(ValueError):
            target.PrefixLRU(wrong)


@points("5.3", 2)
def test_ex05_3_evicts_in_the_order_of_use(target, rng):
    answer = Recorded(target, 3)
    answer.call("insert", ["a", "ab", "abc"], [])
    answer.call("lookup", ["a", "ab"], 2)
    answer.call("insert", ["x", "xy"], ["abc", "ab"])
    answer.holds(["a", "x", "xy"], ["ab", "abc"])
    for capacity in (1, 2, 3, 6):
        for _ in range(6):
            run_beside_the_engine(target, rng, capacity, 25, pins=False)


@points("5.3", 1)
def test_ex05_3_a_miss_changes_nothing(target):
    answer = Recorded(target, 2)
    answer.call("insert", ["a"], [])
    answer.call("lookup", ["x", "xy"], 0)
    answer.holds(["a"], ["x", "xy"])
    answer.call("insert", ["b"], [])
    answer.call("lookup", ["a", "ax", "axy"], 1)
    answer.holds(["a", "b"], ["ax", "axy"])
    answer.call("insert", ["c"], ["b"])


@points("5.3", 1)
def test_ex05_3_leaves_go_before_inner_names(target):
    """A pinned leaf holds those in front of it, though they are the oldest."""
    answer = Recorded(target, 4)
    answer.call("insert", ["a", "ab", "abc"], [])
    answer.call("pin", "abc")
    answer.call("insert", ["x"], [])
    answer.call("insert", ["y"], ["x"])
    answer.call("insert", ["z", "zz"], ["y"])
    answer.holds(["a", "ab", "abc", "z"], ["x", "y", "zz"])
    answer.call("unpin", "abc")
    answer.call("insert", ["w", "wv"], ["abc", "ab"])
    answer.holds(["a", "z", "w", "wv"], ["ab", "abc"])


@points("5.3", 1)
def test_ex05_3_pins_are_counted(target, rng):
    answer = Recorded(target, 2)
    answer.call("insert", ["a"], [])
    answer.call("insert", ["b"], [])
    answer.call("pin", "a")
    answer.call("pin", "a")
    answer.call("unpin", "a")
    answer.call("insert", ["c"], ["b"])
    answer.call("unpin", "a")
    answer.call("insert", ["d"], ["a"])  # neither pin nor unpin counts as a use
    with pytest.raises(KeyError):
        answer.lru.unpin("c")
    with pytest.raises(KeyError):
        answer.lru.pin("z")
    answer.holds(["c", "d"], ["a", "b", "z"])
    for capacity in (2, 4, 7):
        for _ in range(6):
            run_beside_the_engine(target, rng, capacity, 30, pins=True)


@probe("5.3")
def probe_lru(target):
    out = []
    lru = target.PrefixLRU(3)
    out += [lru.insert(["a", "ab", "abc"]), lru.lookup(["a", "ab"]), lru.lookup(["q"])]
    out += [len(lru), lru.insert(["x", "xy"]), "a" in lru, "ab" in lru, "q" in lru]
    lru = target.PrefixLRU(3)
    lru.insert(["a", "ab"])
    lru.pin("ab")
    lru.pin("ab")
    out += [lru.insert(["x"]), lru.insert(["y", "yz"]), "a" in lru]
    lru.unpin("ab")
    out += [lru.insert(["z"]), "ab" in lru]
    lru.unpin("ab")
    out += [lru.insert(["u", "uv"]), "ab" in lru, "a" in lru]
    lru = target.PrefixLRU(2)
    lru.insert(["a"])
    lru.insert(["b"])
    lru.lookup(["a", "ax"])
    out += [lru.insert(["c"]), lru.insert(["c", "cd", "cde"]), len(lru)]
    return out


# -- 5.4

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAME, OTHER = bytes(range(32)), bytes(range(1, 33))


def random_bits(generator, shape, dtype):
    """A tensor of any bits: NaN, infinities and -0.0 are among them."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def bits(tensor):
    """Bytes of a tensor in row-major order, a number after the other."""
    kind = {2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
    return [int(number) for number in tensor.clone().view(kind).flatten()]


def check_round_trip(target, kv):
    tried = f"unseal(name, seal(name, kv), …) with kv {kv.dtype} {list(kv.shape)}"
    before = bits(kv.contiguous())
    content = target.seal(NAME, kv)
    compare(bits(kv.contiguous()), before, tried + ": kv must not be changed")
    compare(type(content), bytes, tried + ": type of the file")
    got = target.unseal(NAME, content, tuple(kv.shape), kv.dtype)
    compare(isinstance(got, torch.Tensor), True, tried + ": a tensor came back")
    compare((got.dtype, list(got.shape)), (kv.dtype, list(kv.shape)), tried)
    compare(bits(got), before, tried + ", as integers of the same bits")
    return content


@points("5.4", 1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ex05_4_a_file_has_three_parts(target, generator, dtype):
    for shape in ((1,), (2, 3), (2, 4, 1, 2)):
        kv = random_bits(generator, shape, dtype)
        content = check_round_trip(target, kv)
        tried = f"seal(name, kv) with kv {kv.dtype} {list(shape)}"
        compare(len(content), 36 + kv.numel() * dtype.itemsize, tried + ": length")
        compare(content[:32], NAME, tried + ": the name comes first")
        number = int.from_bytes(content[32:36], "little")
        compare(
            number, zlib.crc32(content[36:]), tried + ": the checksum of the payload"
        )


@points("5.4", 1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ex05_4_every_bit_comes_back(target, generator, dtype):
    whole = random_bits(generator, (4, 6, 5), dtype)
    for kv in (whole, whole.transpose(0, 2), whole[1:3, ::2], whole[:, :, 1]):
        check_round_trip(target, kv)
    for number in (0.0, -0.0, float("inf"), float("nan"), 1e-7):
        check_round_trip(target, torch.tensor([number, 1.0], dtype=dtype))


@points("5.4", 1)
def test_ex05_4_no_bit_may_flip(target, generator):
    shape, dtype = (2, 2), torch.bfloat16
    content = target.seal(NAME, random_bits(generator, shape, dtype))
    for position in range(len(content)):
        for bit in range(8):
            broken = bytearray(content)
            broken[position] ^= 1 << bit
            tried = (
                f"unseal of a file with bit {bit} of byte {position} flipped is None"
            )
            got = target.unseal(NAME, bytes(broken), shape, dtype)
            compare(got is None, True, tried)
    compare(target.unseal(OTHER, content, shape, dtype) is None, True, "another name")


@points("5.4", 1)
def test_ex05_4_no_byte_may_be_missing_or_left_over(target, generator):
    shape, dtype = (3, 2), torch.float32
    content = target.seal(NAME, random_bits(generator, shape, dtype))
    for length in range(len(content)):
        tried = f"unseal of the first {length} of {len(content)} bytes is None"
        got = target.unseal(NAME, content[:length], shape, dtype)
        compare(got is None, True, tried)
    for rest in (b"\0", b"\0" * 4, content):
        tried = f"unseal of a file with {len(rest)} bytes after its end is None"
        compare(target.unseal(NAME, content + rest, shape, dtype) is None, True, tried)
    for other in ((4, 2), (3, 1), (3,)):
        tried = f"unseal of a file of shape {shape} as {other} is None"
        compare(target.unseal(NAME, content, other, dtype) is None, True, tried)
    got = target.unseal(NAME, content, shape, torch.float16)
    compare(got is None, True, "unseal of a float32 file as float16 is None")


@points("5.4", 1)
def test_ex05_4_the_memory_is_its_own(target, generator):
    kv = random_bits(generator, (4, 4), torch.float16)
    content = target.seal(NAME, kv)
    kept = bytes(bytearray(content))
    first = target.unseal(NAME, content, (4, 4), torch.float16)
    second = target.unseal(NAME, content, (4, 4), torch.float16)
    before = bits(second)
    first.fill_(1.5)
    kv.fill_(2.5)
    compare(content == kept, True, "content after writing into what unseal returned")
    compare(bits(second), before, "another call's tensor after writing into the first")
    third = target.unseal(NAME, content, (4, 4), torch.float16)
    compare(third is not None, True, "unseal of the same content once more")


@probe("5.4")
def probe_files(target):
    kv = torch.arange(12, dtype=torch.float32).reshape(3, 4).T
    content = target.seal(NAME, kv)
    flipped = content[:-1] + bytes([content[-1] ^ 64])
    nan = torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    shape = (4, 3)
    first = target.unseal(NAME, content, shape, torch.float32)
    first[0, 0] = 7.0
    try:
        smaller = target.unseal(NAME, content, (4, 2), torch.float32) is None
    except (RuntimeError, ValueError):
        smaller = "raises"
    return [
        smaller,
        content[32:],
        target.unseal(NAME, flipped, shape, torch.float32) is None,
        target.unseal(OTHER, content, shape, torch.float32) is None,
        target.unseal(NAME, content + bytes(4), shape, torch.float32) is None,
        target.seal(NAME, nan)[32:],
        target.unseal(NAME, content, shape, torch.float32) is None,
    ]
