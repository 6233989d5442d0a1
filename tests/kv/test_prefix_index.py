"""The two prefix indexes behind their one interface, and the pool that evicts for them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fakes import ScheduleDriver, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from minifer.events import EventBus
from minifer.kv.block_pool import BlockPool
from minifer.kv.manager import KVCacheManager, extra_keys
from minifer.kv.prefix_index import HashChainIndex
from minifer.kv.prefix_key import make_key, same_prefix, sha256
from minifer.kv.radix_index import RadixIndex


def chain(tokens, block_size=2, extra=()):
    """Keys of the full blocks of `tokens`."""
    keys = []
    for i in range(0, len(tokens) - block_size + 1, block_size):
        parent = keys[-1] if keys else None
        keys.append(make_key(parent, tokens[i : i + block_size], extra))
    return keys


def publish(index, keys, blocks):
    for i, (key, block) in enumerate(zip(keys, blocks, strict=True)):
        index.insert(key, block, blocks[i - 1] if i else None)


@pytest.fixture(params=[HashChainIndex, RadixIndex])
def index(request):
    return request.param()


def test_match_is_the_longest_cached_run(index):
    publish(index, chain([1, 2, 3, 4, 5, 6]), [10, 11, 12])
    assert index.match(chain([1, 2, 3, 4, 9, 9])) == [10, 11]
    assert index.match(chain([1, 2, 3, 4, 5, 6, 7, 8])) == [10, 11, 12]
    assert index.match(chain([3, 4, 5, 6])) == []
    assert index.match([]) == []


def test_of_two_equal_blocks_the_oldest_stays(index):
    publish(index, chain([1, 2]), [10])
    assert not index.insert(chain([1, 2])[0], 20, None)
    assert index.match(chain([1, 2])) == [10]


def test_case_011_an_evicted_block_is_not_found(index):
    keys = chain([1, 2, 3, 4])
    publish(index, keys, [10, 11])
    assert 11 in index.remove(keys[1], 11)
    assert index.match(keys) == [10]
    assert index.remove(keys[1], 11) == []


def test_case_011_the_pool_evicts_from_the_index(index):
    pool = BlockPool(2, index, EventBus())
    keys = chain([1, 2])
    (block,) = pool.allocate(1)
    pool.publish(block, keys[0], None)
    pool.release([block])
    assert index.match(keys) == [block]
    pool.allocate(2)
    assert index.match(keys) == []
    assert pool.blocks[block].key is None


@pytest.mark.parametrize("name", ["hash", "radix"])
def test_case_013_a_four_bit_hash_shares_nothing_wrong(name):
    d = ScheduleDriver(
        40,
        prefix_index=name,
        block_size=2,
        hash_function=lambda data: bytes([sha256(data)[0] & 15]),
    )
    for i in range(30):  # the driver compares what is read with what must be there
        d.add(str(i), [i % 3, i % 2, i % 5, 4, 1, 2, 3], 2)
        d.step()
    d.run()
    assert d.kv.stats.num_hits > 0


def test_case_013_colliding_parents_are_told_apart():
    index = HashChainIndex()
    first = make_key(None, (1, 2), (), lambda data: b"same")
    second = make_key(None, (3, 4), (), lambda data: b"same")
    child_of_first = make_key(first, (5, 6), (), sha256)
    child_of_second = make_key(second, (5, 6), (), sha256)
    assert child_of_first.digest == child_of_second.digest
    assert not same_prefix(child_of_first, child_of_second)
    publish(index, [first, child_of_first], [10, 11])
    assert index.match([first, child_of_first]) == [10, 11]
    assert index.match([second, child_of_second]) == []
    index.remove(first, 10)
    publish(index, [second], [12])
    assert index.match([second, child_of_second]) == [12]


def test_case_014_whole_integers_are_hashed():
    assert make_key(None, [65] * 8).digest != make_key(None, [321] * 8).digest


def test_case_015_salt_and_adapter_cannot_imitate_each_other():
    tokens = [1, 2]
    salted, adapted = (("salt", "a"),), (("adapter", "a"),)
    digests = {make_key(None, tokens, extra).digest for extra in ((), salted, adapted)}
    assert len(digests) == 3
    glued = make_key(None, tokens, (("salt", "ab"), ("x", "c")))
    assert glued.digest != make_key(None, tokens, (("salt", "a"), ("bx", "c"))).digest


def test_requests_share_within_one_salt_only(index):
    d = ScheduleDriver(16, prefix_index="hash" if isinstance(index, HashChainIndex) else "radix")
    for salt in ("a", "b", None, "a"):
        d.add(repr(salt) + str(len(d.requests)), range(9), 1, cache_salt=salt)
        d.run()
    assert d.kv.stats.num_hits == 8
    assert extra_keys(make_request("r", [1], cache_salt="a")) == (("salt", "a"),)


def test_case_033_a_prompt_shorter_than_a_block_is_not_cached():
    for name in ("hash", "radix"):
        d = ScheduleDriver(4, block_size=32, prefix_index=name)
        for i in range(2):
            d.add(str(i), range(29), 1)
            d.run()
        assert d.kv.stats.num_hits == 0


def test_digests_are_the_same_in_every_process():
    code = (
        "from minifer.kv.prefix_key import make_key;"
        "print(make_key(make_key(None, [1, 2]), [3], (('salt', 'é'),)).digest.hex())"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    here = make_key(make_key(None, [1, 2]), [3], (("salt", "é"),)).digest.hex()
    assert {run.stdout.strip() for run in runs} == {here}


# -- the radix tree


def shape(index: RadixIndex, extra=()):
    """The tree as nested lists: [[blocks, children], …]."""

    def of(node):
        return [node.blocks, [of(child) for child in node.children.values()]]

    return [of(child) for child in index.roots[extra].children.values()]


def test_case_030_a_split_files_the_rest_under_its_own_first_block():
    index = RadixIndex()
    publish(index, chain([1, 2, 3, 4, 5, 6]), [0, 1, 2])
    assert shape(index) == [[[0, 1, 2], []]]
    publish(index, chain([1, 2, 7, 8]), [0, 3])
    assert shape(index) == [[[0], [[[1, 2], []], [[3], []]]]]
    assert index.match(chain([1, 2, 3, 4, 5, 6])) == [0, 1, 2]
    assert index.match(chain([1, 2, 7, 8])) == [0, 3]
    publish(index, chain([1, 2, 3, 4, 9, 9]), [0, 1, 4])
    assert shape(index) == [[[0], [[[1], [[[2], []], [[4], []]]], [[3], []]]]]


def test_removing_a_block_takes_what_lies_below_it():
    index = RadixIndex()
    publish(index, chain([1, 2, 3, 4, 5, 6]), [0, 1, 2])
    publish(index, chain([1, 2, 3, 4, 9, 9]), [0, 1, 3])
    gone = index.remove(chain([1, 2, 3, 4])[1], 1)
    assert sorted(gone) == [1, 2, 3]
    assert shape(index) == [[[0], []]]
    assert index.remove(chain([1, 2])[0], 0) == [0]
    assert index.roots == {}


def test_a_private_copy_starts_no_path_of_its_own():
    index = RadixIndex()
    publish(index, chain([1, 2]), [0])
    assert not index.insert(chain([1, 2])[0], 7, None)
    assert not index.insert(chain([1, 2, 3, 4])[1], 8, previous=7)
    assert index.match(chain([1, 2, 3, 4])) == [0]


def test_case_025_a_path_in_use_is_never_evicted():
    d = ScheduleDriver(6, block_size=2, prefix_index="radix")
    d.add("held", range(6), 50)
    d.step()
    d.scheduler.running[0].token_ids[-1:] = [6]
    held = list(d.requests[0].block_table)
    d.kv.pool.allocate(d.kv.pool.num_free)  # evict all that can be
    assert d.kv.find_cached(make_request("probe", [*range(6), 9])) == held[:3]


def test_case_026_a_partial_match_refreshes_only_what_matched():
    d = ScheduleDriver(8, block_size=1, prefix_index="radix")
    d.add("old", range(1, 9), 1)
    d.run()
    d.add("head", [1, 2, 3, 4, 99], 1)
    d.run()  # touches 1..4; its own fifth block evicts one block of 5..8
    d.kv.pool.allocate(4)
    assert d.kv.find_cached(make_request("probe", [1, 2, 3, 4, 5, 6])) == [0, 1, 2, 3]


def test_case_029_eviction_frees_what_was_asked_and_no_more():
    d = ScheduleDriver(10, block_size=1, prefix_index="radix")
    d.add("old", range(10), 1)
    d.run()
    d.kv.pool.allocate(3)
    assert len(d.kv.find_cached(make_request("probe", [*range(10), 10]))) == 7


@pytest.mark.parametrize(("new", "blocks"), [(1, 1), (3, 1), (4, 1), (5, 2)])
def test_case_031_needed_blocks_are_rounded_up_per_request(new, blocks):
    kv = KVCacheManager(8, 4, index="radix")
    a, b = make_request("a", range(new)), make_request("b", range(50, 50 + new))
    for request in (a, b):
        kv.allocate(request, new)
        assert len(request.block_table) == blocks


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=12))
def test_case_027_both_indexes_agree_with_a_list_of_prefixes(sequences):
    """A dictionary of all published prefixes is the truth for both."""
    truth: dict[tuple[int, ...], int] = {}
    hashed, radix = HashChainIndex(), RadixIndex()
    for number, tokens in enumerate(sequences):
        keys = chain(tokens, 1)
        table = []
        for i, key in enumerate(keys):
            prefix = tuple(tokens[: i + 1])
            block = truth.setdefault(prefix, number * 100 + i)
            table.append(block)
            previous = table[i - 1] if i else None
            new = block == number * 100 + i
            assert hashed.insert(key, block, previous) == new
            assert radix.insert(key, block, previous) == new
    in_tree = [b for root in radix.roots.values() for n in root.subtree() for b in n.blocks]
    assert sorted(in_tree) == sorted(truth.values())
    for tokens in sequences:
        expected = [truth[tuple(tokens[: i + 1])] for i in range(len(tokens))]
        assert hashed.match(chain(tokens, 1)) == radix.match(chain(tokens, 1)) == expected
