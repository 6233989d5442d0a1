"""Tests of exercises 04: slots, tables and copies as the engine has them, attention as defined."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minifer import SamplingParams
from minifer.course.grading import compare, points, probe, unchanged
from minifer.execution.attention import dense_attention
from minifer.kv.manager import Allocation, KVCacheManager
from minifer.kv.step_input import prepare
from minifer.outputs import RequestGroup
from minifer.request import Request
from minifer.scheduling.plan import ScheduledRequest, SchedulePlan

# -- 4.1 slot mapping


def engine_slots(tables, computed, new, block_size):
    """What the engine's own stage 2 would hand to the model."""
    plan = SchedulePlan(step=1)
    for table, start, count in zip(tables, computed, new, strict=True):
        request = new_request("A", start + count + 1)  # one token is left for later
        request.block_table = table
        plan.scheduled.append(ScheduledRequest(request, start, count, Allocation()))
    return prepare(plan, block_size).slot_mapping


def check_slots(target, tables, computed, new, block_size):
    tried = f"slot_mapping({tables}, computed={computed}, new={new}, block_size={block_size})"
    with unchanged(tried, block_tables=tables, computed=computed, new=new):
        got = target.slot_mapping(tables, computed, new, block_size)
    compare(got, engine_slots(tables, computed, new, block_size), tried)


def random_step(rng, requests, largest_block=6):
    """Tables on shuffled blocks, some longer than they need to be."""
    P = rng.randint(1, largest_block)
    computed = [rng.randint(0, 3 * P) for _ in range(requests)]
    new = [rng.choice([0, 1, 1, P, rng.randint(1, 3 * P)]) for _ in range(requests)]
    sizes = [
        -(-(a + b) // P) + rng.randint(0, 1) for a, b in zip(computed, new, strict=True)
    ]
    blocks = rng.sample(range(sum(sizes) + 7), sum(sizes))
    tables = [[blocks.pop() for _ in range(size)] for size in sizes]
    return tables, computed, new, P


@points("4.1", 1)
@pytest.mark.parametrize(
    "table, new, block_size", [([3], 1, 4), ([3], 4, 4), ([2, 0], 2, 1), ([5, 1], 5, 4)]
)
def test_ex04_1_a_prompt_from_its_first_token(target, table, new, block_size):
    check_slots(target, [table], [0], [new], block_size)


@points("4.1", 1)
def test_ex04_1_tokens_that_follow_earlier_ones(target, rng):
    for block_size in (1, 2, 3, 8):
        table = rng.sample(range(20), 4)
        for start in range(4 * block_size):
            check_slots(target, [table], [start], [1], block_size)
        for start in range(3 * block_size):
            check_slots(target, [table], [start], [block_size], block_size)


@points("4.1", 1)
def test_ex04_1_a_step_of_many_requests(target, rng):
    check_slots(target, [], [], [], 4)
    check_slots(target, [[], [1]], [0, 0], [0, 2], 4)
    for requests in (2, 3, 5, 8):
        for _ in range(10):
            check_slots(target, *random_step(rng, requests))


@points("4.1", 1)
@pytest.mark.parametrize(
    "table, computed, new", [([], 0, 1), ([7], 4, 1), ([7], 3, 2), ([7, 2], 5, 4)]
)
def test_ex04_1_refuses_a_table_that_is_too_short(target, table, computed, new):
    check_slots(target, [[1], [*table, 9, 8]], [0, computed], [1, new], 4)
    call = f"slot_mapping([[1], {table}], computed=[0, {computed}], new=[1, {new}], block_size=4)"
    raises(
        ValueError,
        lambda: target.slot_mapping([[1], table], [0, computed], [1, new], 4),
        call,
    )


@probe("4.1")
def probe_slots(target):
    tables, computed, new = [[9, 4, 6], [2, 8], [5]], [3, 6, 0], [3, 1, 2]
    short = outcome(lambda: target.slot_mapping([[7]], [3], [2], 4))
    exact = outcome(lambda: target.slot_mapping([[7], [3]], [2, 0], [2, 4], 4))
    return [target.slot_mapping(tables, computed, new, 4), short, exact]


# -- 4.2 append across a block boundary


def check_append(target, table, num_tokens, num_new, free, block_size, taken):
    tried = f"append(table={table}, {num_tokens}, {num_new}, free={free}, {block_size})"
    grown, left = list(table), list(free)
    got = target.append(grown, num_tokens, num_new, left, block_size)
    compare(got, free[:taken], f"the result of {tried}")
    compare(grown, table + free[:taken], f"table after {tried}")
    compare(left, free[taken:], f"free after {tried}")


def engine_blocks(block_size, tokens):
    """How many blocks the engine gives a request of that many tokens."""
    kv = KVCacheManager(64, block_size, enable_prefix_caching=False)
    request = new_request("r", tokens)
    if tokens:
        kv.allocate(request, tokens)
    return len(request.block_table)


def new_request(name, tokens):
    params, prompt = SamplingParams(temperature=0, max_tokens=1), [0] * max(1, tokens)
    return Request(name, prompt, params, RequestGroup(name, None))


@points("4.2", 2)
def test_ex04_2_as_many_blocks_as_the_tokens_need(target, rng):
    for block_size in (1, 2, 4, 5):
        blocks = [engine_blocks(block_size, n) for n in range(6 * block_size + 2)]
        for num_tokens in range(3 * block_size + 1):
            for num_new in range(3 * block_size + 2):
                has = blocks[num_tokens]
                taken = blocks[num_tokens + num_new] - has
                ids = rng.sample(range(30), has + taken + 2)
                rest = (num_tokens, num_new, ids[has:], block_size, taken)
                check_append(target, ids[:has], *rest)


@points("4.2", 1)
def test_ex04_2_no_block_is_handed_out_twice_or_taken_early(target, rng):
    check_append(target, [3, 8, 1], 4, 1, [5, 0], 4, 0)  # room to spare
    check_append(target, [3, 8, 1], 4, 9, [5, 0], 4, 1)
    for block_size in (1, 3, 4):
        free = rng.sample(range(61), 61)  # 30 times at most 2: never all
        tables, lengths = [[] for _ in range(4)], [0] * 4
        for _ in range(30):
            who = rng.randrange(4)
            count = rng.randint(0, 2)
            target.append(tables[who], lengths[who], count, free, block_size)
            lengths[who] += count
            held = sorted(block for table in tables for block in table)
            tried = f"append again and again for four requests, block_size={block_size}"
            compare(sorted(held + free), list(range(61)), f"all blocks after {tried}")
            compare([len(t) * block_size >= n for t, n in zip(tables, lengths, strict=True)],
                    [True] * 4, f"room for all tokens after {tried}")  # fmt: skip


@points("4.2", 1)
@pytest.mark.parametrize(
    "table, num_tokens, num_new, free",
    [([], 0, 1, []), ([7], 4, 1, []), ([7], 3, 6, [2]), ([7, 1], 8, 9, [4, 5])],
)
def test_ex04_2_all_or_nothing(target, table, num_tokens, num_new, free):
    call = f"append(table={table}, {num_tokens}, {num_new}, free={free}, 4)"
    grown, left = list(table), list(free)
    raises(
        RuntimeError, lambda: target.append(grown, num_tokens, num_new, left, 4), call
    )
    compare(grown, table, f"table after the refused {call}")
    compare(left, free, f"free after the refused {call}")
    check_append(target, table, num_tokens, 0, free, 4, 0)


@probe("4.2")
def probe_append(target):
    seen = []
    cases = [
        ([], 0, 8, 5),
        ([7], 3, 1, 5),
        ([7], 4, 1, 5),
        ([7], 3, 5, 5),
        ([7, 8, 9], 4, 1, 5),
    ]
    for table, num_tokens, num_new, count in [*cases, ([7], 4, 9, 1)]:
        table, free = list(table), list(range(count))
        done = outcome(
            lambda t=table, f=free, a=num_tokens, b=num_new: target.append(
                t, a, b, f, 4
            )
        )
        seen.append([done, table, free])
    return seen


# -- 4.3 fork and copy-on-write


class Cache:
    """A learner's pool with a memory behind it: what every request would read back."""

    def __init__(self, target, num_blocks, block_size):
        self.pool = target.BlockPool(num_blocks, block_size)
        self.block_size = block_size
        self.memory = [None] * (num_blocks * block_size)
        self.written: dict[str, list[int]] = {}
        self.log: list[str] = []
        self.count = 0

    def start(self, name):
        self.log.append(f"start({name!r})")
        self.pool.start(name)
        self.written[name] = []

    def fork(self, parent, child):
        self.log.append(f"fork({parent!r}, {child!r})")
        self.pool.fork(parent, child)
        self.written[child] = list(self.written[parent])

    def append(self, name, times=1):
        done = None
        for _ in range(times):
            self.log.append(f"append({name!r})")
            done = slot, made = self.pool.append(name)
            if made is not None:
                P, (source, destination) = self.block_size, made
                block = self.memory[source * P : source * P + P]
                self.memory[destination * P : destination * P + P] = block
            self.count += 1
            self.memory[slot] = self.count
            self.written[name].append(self.count)
        return done

    def free(self, name):
        self.log.append(f"free({name!r})")
        self.pool.free(name)
        del self.written[name]

    def tried(self, what):
        shown = self.log if len(self.log) <= 14 else ["…", *self.log[-12:]]
        return f"{what} after {', '.join(shown)} (block_size={self.block_size})"

    def check(self):
        """Every request reads its own tokens; every count and every free block is right."""
        pool, P = self.pool, self.block_size
        compare(
            pool.lengths,
            {n: len(w) for n, w in self.written.items()},
            self.tried("lengths"),
        )
        compare(
            sorted(pool.tables), sorted(self.written), self.tried("names in tables")
        )
        held = [block for table in pool.tables.values() for block in table]
        counts = [held.count(block) for block in range(len(pool.ref_count))]
        compare(pool.ref_count, counts, self.tried("ref_count"))
        free = [block for block, count in enumerate(counts) if count == 0]
        compare(sorted(pool.free_blocks), free, self.tried("sorted(free_blocks)"))
        for name, wanted in self.written.items():
            slots = [block * P + i for block in pool.tables[name] for i in range(P)]
            read = [self.memory[slot] for slot in slots[: len(wanted)]]
            compare(
                read,
                wanted,
                self.tried(f"tokens that {name!r} reads, numbered as written,"),
            )

    def refuses(self, error, what, call):
        before = copy.deepcopy(vars(self.pool))
        raises(error, call, self.tried(what))
        for name in ("tables", "lengths", "ref_count", "free_blocks"):
            compare(
                vars(self.pool)[name],
                before[name],
                self.tried(f"{name}, {what} refused,"),
            )


@points("4.3", 1)
def test_ex04_3_a_fork_shares_all_blocks(target):
    for block_size, tokens in ((1, 1), (4, 4), (4, 6), (3, 0)):
        cache = Cache(target, 6, block_size)
        cache.start("a")
        cache.append("a", tokens)
        cache.check()
        cache.fork("a", "b")
        cache.check()
        tables = cache.pool.tables
        compare(tables["b"], tables["a"], cache.tried("table of 'b'"))
        if tables["b"] is tables["a"]:
            raise AssertionError(
                cache.tried("fork must give the child a list of its own")
            )
        cache.refuses(
            ValueError, "fork('a', 'b')", lambda c=cache: c.pool.fork("a", "b")
        )
        cache.refuses(
            ValueError, "fork('z', 'c')", lambda c=cache: c.pool.fork("z", "c")
        )


@points("4.3", 2)
def test_ex04_3_who_writes_into_a_shared_block_copies_it(target):
    cache = Cache(target, 8, 4)
    cache.start("a")
    cache.append("a", 6)
    cache.fork("a", "b")
    compare(cache.append("b"), (10, (1, 2)), cache.tried("append('b')"))
    cache.check()
    compare(cache.append("a"), (6, None), cache.tried("append('a')"))
    cache.check()
    compare(cache.append("b"), (11, None), cache.tried("append('b')"))
    cache.check()
    cache.fork("b", "c")  # block full: nothing to copy
    compare(cache.append("c"), (12, None), cache.tried("append('c')"))
    cache.check()
    cache.fork("a", "d")
    cache.fork("a", "e")  # three holders: two copies, and the last writes in place
    compare(cache.append("d"), (19, (1, 4)), cache.tried("append('d')"))
    compare(cache.append("a"), (23, (1, 5)), cache.tried("append('a')"))
    compare(cache.append("e"), (7, None), cache.tried("append('e')"))
    cache.check()


@points("4.3", 1)
def test_ex04_3_a_block_is_free_when_nobody_holds_it(target):
    cache = Cache(target, 5, 2)
    cache.start("a")
    cache.append("a", 3)
    cache.fork("a", "b")
    cache.append("b")
    cache.free("a")
    compare(cache.pool.free_blocks, [3, 4, 1], cache.tried("free_blocks"))
    cache.check()
    cache.refuses(ValueError, "free('a')", lambda: cache.pool.free("a"))
    cache.refuses(ValueError, "append('a')", lambda: cache.pool.append("a"))
    cache.append("b", 6)
    cache.refuses(RuntimeError, "append('b')", lambda: cache.pool.append("b"))
    cache.free("b")
    compare(cache.pool.free_blocks, [1, 4, 3, 2, 0], cache.tried("free_blocks"))
    cache.check()
    cache = Cache(target, 1, 4)
    cache.start("a")
    cache.append("a")
    cache.fork("a", "b")
    cache.refuses(RuntimeError, "append('b')", lambda: cache.pool.append("b"))
    cache.check()


@points("4.3", 2)
@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
def test_ex04_3_many_operations_end_as_in_the_engine(target, rng, block_size):
    for _ in range(6):
        cache = Cache(target, 24, block_size)
        kv = KVCacheManager(24, block_size, enable_prefix_caching=False)
        theirs: dict[str, Request] = {}
        for number in range(50):
            one_operation(rng, cache, kv, theirs, f"r{number}")
            cache.check()
            tables = {name: request.block_table for name, request in theirs.items()}
            compare(cache.pool.tables, tables, cache.tried("tables"))
            free = list(kv.pool.free_queue)
            compare(cache.pool.free_blocks, free, cache.tried("free_blocks"))
        for name in list(theirs):
            cache.free(name)
            cache.check()
        compare(cache.pool.ref_count, [0] * 24, cache.tried("ref_count"))


def one_operation(rng, cache, kv, theirs, new_name):
    """The same random step for the learner's pool and for the engine's."""
    kind = rng.choice(["start", "fork", "free", *["append"] * 6]) if theirs else "start"
    name = rng.choice(sorted(theirs)) if theirs else ""
    if kind == "start":
        cache.start(new_name)
        theirs[new_name] = new_request(new_name, 200)
    elif kind == "fork":
        cache.fork(name, new_name)
        child = theirs[new_name] = new_request(new_name, 200)
        kv.fork(theirs[name], child)
        child.num_computed_tokens = theirs[name].num_computed_tokens
    elif kind == "free":
        cache.free(name)
        kv.free(theirs.pop(name))
    elif kv.can_allocate(theirs[name], 1):
        request = theirs[name]
        done = kv.allocate(request, 1)
        position = request.num_computed_tokens
        request.num_computed_tokens += 1
        P = kv.block_size
        slot = request.block_table[position // P] * P + position % P
        copies = done.copies[0] if done.copies else None
        compare(cache.append(name), (slot, copies), cache.tried(f"append({name!r})"))
    else:
        cache.refuses(
            RuntimeError, f"append({name!r})", lambda: cache.pool.append(name)
        )


@probe("4.3")
def probe_pool(target):
    pool, seen = target.BlockPool(8, 2), []

    def note(call):
        seen.append(outcome(call))
        state = (pool.tables, pool.lengths, pool.ref_count, pool.free_blocks)
        seen.append(copy.deepcopy(state))

    pool.start("a")
    for _ in range(3):
        note(lambda: pool.append("a"))
    note(lambda: pool.fork("a", "b"))
    for name in ("b", "a"):
        note(lambda name=name: pool.append(name))
    note(lambda: pool.fork("a", "d"))  # its last block is full
    note(lambda: pool.append("d"))
    note(lambda: pool.append("b"))
    note(lambda: pool.fork("b", "c"))
    for call in (
        lambda: pool.append("c"),
        lambda: pool.free("b"),
        lambda: pool.free("b"),
        lambda: pool.free("d"),
        lambda: pool.free("c"),  # alone on several blocks
    ):
        note(call)
    note(lambda: pool.free("a"))
    tight = pool = target.BlockPool(1, 2)
    pool.start("a")
    note(lambda: tight.append("a"))
    note(lambda: tight.fork("a", "b"))
    note(lambda: tight.append("b"))
    return seen


# -- 4.4 paged attention


def attention_case(
    generator, lengths, *, P, H, K, C=16, dtype=torch.float64, poison=math.nan
):
    """Arguments of paged_attention on shuffled blocks, and the truth in float64.

    Whatever no request has written holds `poison`; the last block belongs to nobody.
    """
    needed = [-(-length // P) for length in lengths]
    N = sum(needed) + 2
    order = torch.randperm(N - 1, generator=generator).tolist()
    caches = torch.full((2, N, P, K, C), poison, dtype=torch.float64)
    tables = torch.full((len(lengths), max(needed)), -1)
    query = torch.randn(len(lengths), H, C, generator=generator, dtype=torch.float64)
    rows = []
    for b, length in enumerate(lengths):
        table = torch.tensor([order.pop() for _ in range(needed[b])])
        tables[b, : len(table)] = table
        kv = torch.randn(2, length, K, C, generator=generator, dtype=torch.float64)
        kv = kv.to(dtype).double()
        for p in range(length):
            caches[:, table[p // P], p % P] = kv[:, p]
        rows.append((query[b : b + 1].to(dtype).double(), kv[0], kv[1]))
    arguments = {
        "query": query.to(dtype),
        "key_cache": caches[0].to(dtype),
        "value_cache": caches[1].to(dtype),
        "block_tables": tables,
        "seq_lens": torch.tensor(lengths),
    }
    return arguments, rows


def check_attention(target, arguments, rows, scale, atol):
    query, cache = arguments["query"], arguments["key_cache"]
    tables = str(arguments["block_tables"].tolist())
    if len(tables) > 100:
        tables = f"{tables[:100]} …"
    tried = (
        f"paged_attention with seq_lens={arguments['seq_lens'].tolist()}, query "
        f"{list(query.shape)}, caches {list(cache.shape)}, {query.dtype}, scale={scale}, "
        f"block_tables={tables}"
    )
    with UnchangedBits(tried, arguments):
        got = target.paged_attention(**arguments, scale=scale)
    truth = torch.cat([dense_attention(q, k, v, scale) for q, k, v in rows])
    compare(got, truth.to(query.dtype), tried, atol=atol)
    compare(str(got.dtype), str(query.dtype), f"the dtype of {tried}")


class UnchangedBits:
    """Like `unchanged`, for tensors that hold NaN on purpose."""

    def __init__(self, tried, tensors):
        self.tried, self.tensors = tried, tensors

    def __enter__(self):
        self.before = {name: tensor.clone() for name, tensor in self.tensors.items()}

    def __exit__(self, kind, value, traceback):
        for name, tensor in self.tensors.items():
            if kind is None and not torch.equal(
                tensor.nan_to_num(nan=7e7), self.before[name].nan_to_num(nan=7e7)
            ):
                raise AssertionError(
                    f"tried     {self.tried}\ninput {name} must not be changed"
                )


# float64 against float64 in another order: a few hundred roundings of 1e-16
EXACT = 1e-12


@points("4.4", 1)
@pytest.mark.parametrize("length, P", [(1, 1), (2, 2), (4, 2), (3, 4), (4, 4), (5, 4)])
def test_ex04_4_one_request_one_head(target, generator, length, P):
    arguments, rows = attention_case(
        generator, [length], P=P, H=1, K=1, C=2, poison=0.0
    )
    check_attention(target, arguments, rows, 0.7, EXACT)


@points("4.4", 1)
@pytest.mark.parametrize("H, K", [(2, 2), (4, 2), (6, 3), (4, 1)])
def test_ex04_4_ragged_lengths_and_grouped_heads(target, generator, H, K):
    for lengths, P in (([1, 4], 4), ([8, 1, 5], 4), ([3, 7, 12, 2], 3), ([5, 1], 1)):
        arguments, rows = attention_case(generator, lengths, P=P, H=H, K=K, poison=1e3)
        check_attention(target, arguments, rows, 0.25, EXACT)


@points("4.4", 1)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_ex04_4_what_nobody_wrote_never_matters(target, generator, poison):
    for lengths, P in (([1], 4), ([5, 8, 1], 4), ([9, 2], 8)):
        arguments, rows = attention_case(
            generator, lengths, P=P, H=4, K=2, poison=poison
        )
        check_attention(target, arguments, rows, 0.25, EXACT)


@points("4.4", 1)
def test_ex04_4_large_scores_do_not_overflow(target, generator):
    arguments, rows = attention_case(generator, [6, 17, 1], P=4, H=4, K=2)
    check_attention(target, arguments, rows, 200.0, 1e-9)  # scores near ±2000
    arguments, rows = attention_case(
        generator, [6, 17, 1], P=4, H=4, K=2, dtype=torch.float32
    )
    # scores near ±100 carry an error of 1e-5 in float32, and so does each weight
    check_attention(target, arguments, rows, 10.0, 1e-3)


@points("4.4", 1)
def test_ex04_4_no_tensor_of_a_whole_context(target, generator):
    lengths, P, H, K, C = [64, 3], 1, 4, 2, 16
    arguments, rows = attention_case(generator, lengths, P=P, H=H, K=K, C=C)
    own = {t.untyped_storage().data_ptr() for t in arguments.values()}
    with LargestTensor(own) as seen:
        target.paged_attention(**arguments, scale=0.25)
    most = 4 * len(lengths) * H * P * C
    if seen.numel > most:
        raise AssertionError(
            f"tried     paged_attention with seq_lens={lengths}, P={P}, H={H}, K={K}, C={C}\n"
            f"got       a tensor of {seen.numel} elements (made by {seen.name})\n"
            f"expected  none above 4 · B · H · P · C = {most}: walk the table block by block"
        )
    check_attention(target, arguments, rows, 0.25, EXACT)


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that is made; views of `own` storages do not count."""

    def __init__(self, own):
        super().__init__()
        self.own, self.numel, self.name = own, 0, ""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if not isinstance(tensor, torch.Tensor):
                continue
            made = tensor.untyped_storage().data_ptr() not in self.own
            elements = tensor.untyped_storage().nbytes() // tensor.element_size()
            if made and elements > self.numel:
                self.numel, self.name = elements, function.__name__
        return result


@points("4.4", 1, hidden=True)
@pytest.mark.parametrize("P", [1, 7, 16, 32])
def test_ex04_4_larger_shapes(target, generator, P):
    lengths = [1, P, P + 1, 3 * P, 50, 97]
    arguments, rows = attention_case(generator, lengths, P=P, H=12, K=6)
    check_attention(target, arguments, rows, 0.25, EXACT)
    arguments, rows = attention_case(
        generator, lengths, P=P, H=12, K=6, dtype=torch.float32
    )
    check_attention(target, arguments, rows, 0.25, 1e-5)


@probe("4.4")
def probe_attention(target):
    generator, seen = torch.Generator().manual_seed(4), []
    for lengths, P, scale, poison in (
        ([5, 8, 1], 4, 0.5, 0.0),
        ([5, 8, 1], 4, 0.5, math.nan),
        ([9, 2], 4, 400.0, 0.0),
    ):
        arguments, _ = attention_case(
            generator, lengths, P=P, H=4, K=2, C=4, poison=poison
        )
        seen.append(
            target.paged_attention(**arguments, scale=scale)
            .nan_to_num(nan=9e9)
            .tolist()
        )
    arguments, _ = attention_case(generator, [40], P=1, H=4, K=2, C=4)
    own = {t.untyped_storage().data_ptr() for t in arguments.values()}
    with LargestTensor(own) as largest:
        target.paged_attention(**arguments, scale=1.0)
    return [*seen, largest.numel > 4 * 4 * 4]


# -- shared


def raises(error, call, tried):
    """The call must raise that error; its own stub's error passes through."""
    try:
        got = call()
    except error as caught:
        if isinstance(caught, NotImplementedError) and error is not NotImplementedError:
            raise
        return
    except (AssertionError, ValueError, RuntimeError, LookupError, TypeError) as other:
        if isinstance(other, NotImplementedError):
            raise
        raise AssertionError(
            f"tried     {tried}\ngot       {type(other).__name__}: {other}\n"
            f"expected  {error.__name__}"
        ) from other
    raise AssertionError(
        f"tried     {tried}\ngot       {got!r}\nexpected  {error.__name__}"
    )


def outcome(call):
    """What a call returns, or the kind of error it raises."""
    try:
        return call()
    except NotImplementedError:
        raise
    except Exception as error:
        return type(error).__name__
