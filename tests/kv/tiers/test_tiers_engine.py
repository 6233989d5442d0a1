"""A whole engine with tiers: the same tokens as without, whatever the tiers do."""

from __future__ import annotations

import gc
import itertools
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
from fakes import ListSink, check_engine, run_engine, tiny_engine

from minifer.config import EngineConfig
from minifer.engine import Engine
from minifer.kv.tiers.opening import STAGING_BYTES
from minifer.request import SamplingParams

BLOCK = 2 * 2 * 4 * 2 * 8 * 4  # bytes: K and V, layers, P, K, C, float32
GREEDY = SamplingParams(max_tokens=10, temperature=0)
SAMPLED = SamplingParams(max_tokens=10, temperature=0.9, top_p=0.95, seed=7)


def workload(seed: int = 0) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that share beginnings, come back, and are too many for the device."""
    rng = random.Random(seed)
    stems = [[rng.randrange(40) for _ in range(rng.randint(9, 30))] for _ in range(4)]
    requests = []
    for _ in range(16):
        tail = [rng.randrange(40) for _ in range(rng.randint(0, 9))]
        requests.append((rng.choice(stems) + tail, rng.choice([GREEDY, SAMPLED])))
    return requests


def answers(engine: Engine, requests, at_once: int = 4) -> list[list[int]]:
    """Tokens of every request, `at_once` of them running together."""
    out: dict[str, list[int]] = {}
    for begin in range(0, len(requests), at_once):
        for i, (prompt, params) in enumerate(requests[begin : begin + at_once], begin):
            engine.add_request(str(i), prompt, params)
        for name, output in run_engine(engine).items():
            assert output.outputs[0].finish_reason == "length"
            out[name] = list(output.outputs[0].token_ids)
    return [out[str(i)] for i in range(len(requests))]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with tiny_engine(enable_prefix_caching=False) as engine:
        return answers(engine, workload())


SHAPES = [
    {"num_kv_blocks": 24},
    {"num_kv_blocks": 24, "prefix_index": "radix"},
    {"num_kv_blocks": 14, "max_num_batched_tokens": 7},  # preempts
    {"num_kv_blocks": 40, "block_size": 2, "max_prefill_chunk": 5},
    {"num_kv_blocks": 8, "block_size": 7, "scheduling_policy": "lpm"},
    {"num_kv_blocks": 60, "block_size": 1, "scheduling_policy": "priority"},
]
TIERS = [
    {"kv_dram_bytes": 200 * BLOCK},
    {"kv_dram_bytes": 12 * BLOCK},
    {"kv_dram_bytes": 200 * BLOCK, "kv_write_policy": "second_touch"},
    {"kv_dram_bytes": 30 * BLOCK, "kv_disk_bytes": 1 << 22},
    {"kv_disk_bytes": 40 * BLOCK},
]


PAIRS = [(shape, TIERS[(i + k) % 5]) for i, shape in enumerate(SHAPES) for k in (0, 2)]


def check_same_tokens(folder: Path, expected, shape, tiers) -> None:
    """float32, temperature 0 and above: the same tokens, with everything that can be loaded."""
    if "kv_disk_bytes" in tiers:
        tiers = {**tiers, "kv_disk_path": folder}
    with tiny_engine(**shape, **tiers, kv_load_policy="always") as engine:
        assert answers(engine, workload()) == expected
        stats = engine.kv.tiers.stats
        assert stats.loads["dram"].blocks > 0 or tiers["kv_dram_bytes"] == 12 * BLOCK
        assert stats.corrupt == stats.write_errors == stats.rejected == 0


@pytest.mark.parametrize(("shape", "tiers"), PAIRS)
def test_k11_load_is_recompute(tmp_path, expected, shape, tiers):
    check_same_tokens(tmp_path, expected, shape, tiers)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "tiers"), list(itertools.product(SHAPES, TIERS)))
def test_k11_load_is_recompute_in_every_combination(tmp_path, expected, shape, tiers):
    check_same_tokens(tmp_path, expected, shape, tiers)


def test_k11_what_is_loaded_is_what_was_stored_to_the_bit(tmp_path):
    import torch

    with tiny_engine(num_kv_blocks=16, kv_disk_path=tmp_path) as engine:
        storage = engine.runner.kv
        engine.add_request("a", list(range(33)), SamplingParams(max_tokens=1))
        run_engine(engine)
        blocks = [b for b in engine.kv.pool.blocks if b.key is not None]
        before = {
            b.key.digest: [t[b.block_id].clone() for t in (*storage.keys, *storage.values)]
            for b in blocks
        }
        assert len(before) == 8 and engine.kv.tiers.flush()
    with tiny_engine(num_kv_blocks=16, kv_disk_path=tmp_path) as engine:
        storage = engine.runner.kv
        engine.add_request("a", list(range(33)), SamplingParams(max_tokens=1))
        run_engine(engine)
        assert engine.kv.tiers.stats.hits["disk"] == 32
        loaded = {b.key.digest: b.block_id for b in engine.kv.pool.blocks if b.key is not None}
        for digest, tensors in before.items():
            after = [t[loaded[digest]] for t in (*storage.keys, *storage.values)]
            assert all(torch.equal(a, b) for a, b in zip(tensors, after, strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_dtype_survives_the_way_down_and_up(dtype):
    import torch

    from minifer.execution.kv_storage import KVStorage
    from minifer.kv.prefix_key import make_key
    from minifer.kv.tiers.dram import StoredBlock

    storage = KVStorage(3, 5, 4, 2, 8, getattr(torch, dtype), debug=True)
    for tensor in (*storage.keys, *storage.values):
        tensor[:4] = torch.randn(4, 4, 2, 8).to(tensor.dtype)
    payload = storage.read_block(2)
    assert len(payload) == KVStorage.bytes_per_block(3, 4, 2, 8, getattr(torch, dtype))
    assert storage.read_block(4) is None  # poison
    before = [tensor[2].clone() for tensor in (*storage.keys, *storage.values)]
    storage.poison([2])
    stored = StoredBlock(make_key(None, (1, 2, 3, 4)), payload)
    storage.write_blocks([(0, stored), (3, stored)])
    for tensor, wanted in zip((*storage.keys, *storage.values), before, strict=True):
        assert torch.equal(tensor[0], wanted) and torch.equal(tensor[3], wanted)
        assert bool(tensor[2].isnan().all()) and bool(tensor[1].isfinite().all())
    storage.check_guard_bands()
    one_inf = storage.keys[0][1]
    one_inf[0, 0, 0] = torch.inf
    assert storage.read_block(1) is None


# -- counted by hand


def test_hit_statistics_are_exact(tmp_path):
    """P = 4, and every request one after the other: each number below can be counted."""
    prompt, other = list(range(1, 22)), [30] * 21
    one = SamplingParams(max_tokens=1)
    options = {"num_kv_blocks": 6, "kv_dram_bytes": 64 * BLOCK, "kv_load_policy": "always"}
    with tiny_engine(**options, kv_disk_path=tmp_path) as engine:
        stats = engine.kv.tiers.stats
        engine.add_request("a", prompt, one)  # nothing anywhere: 21 tokens looked up
        run_engine(engine)
        assert (stats.num_queries, stats.hits) == (21, {"dram": 0, "disk": 0})
        assert stats.stores["dram"].blocks == 5
        engine.add_request("b", prompt, one)  # 20 on the device, 1 looked up
        run_engine(engine)
        assert (stats.num_queries, stats.hits) == (22, {"dram": 0, "disk": 0})
        engine.add_request("c", other, one)  # takes the device
        run_engine(engine)
        engine.add_request("d", prompt, one)  # 20 from DRAM
        (output,) = run_engine(engine).values()
        assert output.num_cached_tokens == 20
        assert (stats.num_queries, stats.hits) == (22 + 21 + 21, {"dram": 20, "disk": 0})
        assert stats.loads["dram"].blocks == 5 and stats.loads["dram"].bytes == 5 * BLOCK
        assert stats.stores["dram"].blocks == 10
        assert engine.kv.tiers.flush()
        assert stats.stores["disk"].blocks == 10
        assert engine.kv.stats.num_hits == 20 and engine.kv.stats.num_queries == 84
    with tiny_engine(**options, kv_disk_path=tmp_path) as engine:  # after a restart
        stats = engine.kv.tiers.stats
        engine.add_request("e", [*prompt, 5, 6, 7], one)
        run_engine(engine)
        assert (stats.num_queries, stats.hits) == (24, {"dram": 0, "disk": 20})
        assert stats.loads["disk"].blocks == stats.loads["dram"].blocks == 5
        assert stats.loads["disk"].seconds > 0
        assert engine.kv.tiers.flush() and stats.stores["disk"].blocks == 1
        assert stats.evicted == {"dram": 0, "disk": 0} and stats.timeouts == stats.dropped == 0


def test_events_tell_where_blocks_came_from(tmp_path):
    for _ in range(2):
        sink = ListSink()
        with tiny_engine(sinks=(sink,), kv_disk_path=tmp_path) as engine:
            engine.add_request("a", list(range(14)), SamplingParams(max_tokens=1))
            run_engine(engine)
    names = [event.name for event in sink.events if event.name.startswith("kv.")]
    assert names.index("kv.prefetch_started") < names.index("kv.prefetch_done")
    assert names.index("kv.prefetch_done") < names.index("kv.tier_hit")
    (hit,) = (event for event in sink.events if event.name == "kv.tier_hit")
    assert hit.token_range == (0, 12) and hit.data == {"dram": 0, "disk": 12}


# -- restarts, other processes, bad disks

SERVE = """
import sys
sys.path[:0] = sys.argv[2:]
from fakes import tiny_engine
from test_tiers_engine import answers, workload
engine = tiny_engine(num_kv_blocks=24, kv_disk_path=sys.argv[1], kv_load_policy="always")
print(answers(engine, workload()))
print(engine.kv.tiers.stats.hits["disk"])
engine.add_request("last", [39] * 24, workload()[0][1])
engine.step()
"""  # not closed: what is queued is written when the process ends


def test_a_second_process_hits_what_the_first_stored(tmp_path, expected):
    with tiny_engine(num_kv_blocks=24, kv_disk_path=tmp_path) as engine:
        assert answers(engine, workload()) == expected
        assert engine.kv.tiers.stats.hits["disk"] == 0
    here = Path(__file__)
    paths = [str(here.parents[2]), str(here.parent)]
    environment = {**os.environ, "PYTHONPATH": str(here.parents[3]), "OMP_NUM_THREADS": "1"}
    before = len(list(tmp_path.rglob("*.safetensors")))
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(tmp_path), *paths],
        env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tokens, from_disk = done.stdout.splitlines()
    assert tokens == str(expected) and int(from_disk) > 50
    assert len(list(tmp_path.rglob("*.safetensors"))) == before + 6


def test_every_block_damaged_costs_time_not_tokens(tmp_path, expected):
    options = {"num_kv_blocks": 24, "kv_disk_path": tmp_path, "kv_load_policy": "always"}
    with tiny_engine(**options) as engine:
        answers(engine, workload())
    files = sorted(tmp_path.rglob("*.safetensors"))
    rng = random.Random(0)
    assert len(files) > 20
    for file in files:
        data = bytearray(file.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
    with tiny_engine(**options) as engine:
        assert answers(engine, workload()) == expected
        assert engine.kv.tiers.stats.corrupt > 0
        assert engine.kv.tiers.stats.hits["disk"] == 0


def test_a_disk_that_cannot_be_written_serves_on(tmp_path, expected, monkeypatch):
    from minifer.kv.tiers import disk

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.os, "fsync", full)
    with pytest.warns(UserWarning, match="cannot be written"):  # noqa: SIM117
        with tiny_engine(num_kv_blocks=24, kv_disk_path=tmp_path) as engine:
            assert answers(engine, workload()) == expected
            assert engine.kv.tiers.flush()
            assert engine.kv.tiers.stats.write_errors == 1
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_another_model_finds_nothing(tmp_path):
    from fakes import tiny_config

    for config in (tiny_config(), tiny_config(num_heads=2), tiny_config(rms_norm_eps=1e-5)):
        with tiny_engine(config=config, kv_disk_path=tmp_path) as engine:
            engine.add_request("a", list(range(20)), SamplingParams(max_tokens=1))
            run_engine(engine)
            assert sum(engine.kv.tiers.stats.hits.values()) == 0


class Stuck:
    """A disk that has everything and hands nothing over until it is let go."""

    def __init__(self, disk) -> None:
        self.disk, self.let_go, self.writable = disk, threading.Event(), True

    def __contains__(self, key) -> bool:
        return key in self.disk

    def read(self, key):
        self.let_go.wait(30)
        return self.disk.read(key)

    def write(self, key, payload) -> bool:
        return self.disk.write(key, payload)

    def touch(self, keys) -> None:
        self.disk.touch(keys)


def stick(engine: Engine) -> Stuck:
    stuck = Stuck(engine.kv.tiers.disk)
    engine.kv.tiers.disk = engine.kv.tiers._transfers.store = stuck
    return stuck


def filled(folder: Path, **options) -> Engine:
    """An engine whose disk knows range(20), and nothing else does."""
    with tiny_engine(kv_disk_path=folder) as engine:
        engine.add_request("first", list(range(20)), SamplingParams(max_tokens=1))
        run_engine(engine)
    return tiny_engine(kv_disk_path=folder, **options)


def test_case_050_a_stuck_disk_delays_a_request_by_its_timeout_and_no_other(tmp_path):
    with filled(tmp_path, kv_load_timeout=0.2) as engine:
        stuck = stick(engine)
        engine.add_request("waits", list(range(20)), SamplingParams(max_tokens=3))
        engine.add_request("passes", [3] * 9, SamplingParams(max_tokens=3))
        order = []
        deadline = time.monotonic() + 20
        while engine.has_unfinished_requests and time.monotonic() < deadline:
            order += [out.request_id for out in engine.step() if out.finished]
            check_engine(engine)
        assert order == ["passes", "waits"]
        assert engine.kv.tiers.stats.timeouts == 1
        stuck.let_go.set()


def test_a_step_that_waits_sleeps(tmp_path):
    """No busy loop: a hundred steps a second at most, and hardly any work."""
    with filled(tmp_path, kv_load_timeout=60) as engine:
        stuck = stick(engine)
        engine.add_request("waits", list(range(20)), SamplingParams(max_tokens=1))
        steps, cpu, end = 0, time.process_time(), time.monotonic() + 0.5
        while time.monotonic() < end:
            assert engine.step() == []
            steps += 1
        assert steps <= 60 and time.process_time() - cpu < 0.4
        assert engine.abort("waits").outputs[0].finish_reason == "abort"
        assert not engine.has_unfinished_requests and engine.step() == []
        stuck.let_go.set()


@pytest.mark.parametrize("steps", range(4))
def test_case_049_an_abort_at_any_step_leaves_nothing(tmp_path, steps):
    with filled(tmp_path) as engine:
        engine.add_request("a", list(range(20)), SamplingParams(max_tokens=5))
        for _ in range(steps):
            engine.step()
        engine.abort("a")
        check_engine(engine)
        until_idle(engine)
        engine.add_request("b", list(range(20)), SamplingParams(max_tokens=1))
        run_engine(engine)


def until_idle(engine: Engine) -> None:
    deadline = time.monotonic() + 20
    tiers = engine.kv.tiers
    while tiers._prefetcher._reading or any(block.pinned for block in tiers.dram):
        assert time.monotonic() < deadline
        time.sleep(0.001)
        tiers.collect()
    assert tiers.dram.reserved == 0 and not tiers._prefetcher._waits


# -- what must not be stored


def test_f02_a_block_with_nan_is_never_stored():
    """NaN in the cache: that request ends, nothing of it is kept, the next one is clean."""
    import torch

    prompt = list(range(20))
    with tiny_engine(debug=False, kv_dram_bytes=64 * BLOCK) as engine:
        real = engine.runner.forward

        def forward(step):
            logits = real(step)
            for tensor in engine.runner.kv.values:
                tensor.fill_(torch.nan)
            return logits

        engine.runner.forward = forward
        engine.add_request("bad", prompt, SamplingParams(max_tokens=4))
        (output,) = run_engine(engine).values()
        assert output.outputs[0].finish_reason == "error"
        assert len(engine.kv.tiers.dram) == 0 and engine.kv.tiers.stats.rejected > 0
        engine.runner.forward = real
        engine.add_request("good", prompt, GREEDY)
        (again,) = run_engine(engine).values()
    with tiny_engine() as engine:
        engine.add_request("good", prompt, GREEDY)
        (clean,) = run_engine(engine).values()
    assert again.outputs[0].token_ids == clean.outputs[0].token_ids


def test_a_salt_separates_tenants_in_every_tier(tmp_path):
    one = SamplingParams(max_tokens=1)
    for salt, hits in (("a", 0), ("b", 0), (None, 0), ("a", 16)):
        with tiny_engine(kv_disk_path=tmp_path, kv_dram_bytes=64 * BLOCK) as engine:
            engine.add_request("x", list(range(20)), one.with_(cache_salt=salt))
            run_engine(engine)
            assert engine.kv.tiers.stats.hits["disk"] == hits


# -- options


def test_sizes_that_hold_no_block_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"kv_dram_bytes must hold at least one block"):
        tiny_engine(kv_dram_bytes=BLOCK - 1)
    with pytest.raises(ValueError, match=r"kv_disk_bytes must hold at least two blocks"):
        tiny_engine(kv_disk_path=tmp_path, kv_disk_bytes=BLOCK)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"kv_disk_path must be a folder"):
        tiny_engine(kv_disk_path=tmp_path / "file")


def test_an_engine_that_is_built_by_hand_is_told_about_tiers():
    with tiny_engine() as engine, pytest.raises(ValueError, match="kv_dram_bytes and kv_disk_path"):
        Engine(EngineConfig(kv_dram_bytes=1 << 20), engine.runner, engine.limits)


def test_without_tiers_there_are_none():
    with tiny_engine() as engine:
        assert engine.kv.tiers is None


def test_a_disk_alone_gets_a_staging_area(tmp_path):
    with tiny_engine(kv_disk_path=tmp_path) as engine:
        assert engine.kv.tiers.dram.capacity == STAGING_BYTES // BLOCK


def test_closing_ends_the_threads_and_frees_the_memory(tmp_path):
    def threads() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name.startswith("kv-")}

    before = threads()
    engine = filled(tmp_path)
    engine.add_request("a", [*range(20), 9, 9, 9, 9], SamplingParams(max_tokens=1))
    run_engine(engine)
    assert len(threads() - before) == 2
    storage = weakref.ref(engine.runner.kv)
    engine.close()
    engine.close()
    gc.collect()
    assert threads() == before and storage() is None
    assert len(list(tmp_path.rglob("*.safetensors"))) == 6  # what was queued has been written


def test_a_forgotten_engine_ends_its_threads_too(tmp_path):
    before = threading.active_count()
    engine = filled(tmp_path)
    engine.add_request("a", list(range(20)), SamplingParams(max_tokens=1))
    run_engine(engine)
    assert threading.active_count() > before
    del engine
    gc.collect()
    assert threading.active_count() == before


# -- everything at once


def churn(folder: Path, rounds: int, seed: int) -> int:
    """Random requests, aborts and restarts on real threads; returns how many answers compared."""
    rng = random.Random(seed)
    stems = [[rng.randrange(40) for _ in range(rng.randint(8, 40))] for _ in range(6)]
    known: dict[tuple[int, ...], list[int]] = {}
    compared = 0
    with tiny_engine(enable_prefix_caching=False, debug=False) as plain:
        for _ in range(rounds):
            options = {"num_kv_blocks": rng.choice([20, 40]), "kv_load_policy": "always"}
            options["prefix_index"] = rng.choice(["hash", "radix"])
            options["kv_dram_bytes"] = rng.choice([8, 30, 100]) * BLOCK
            options["kv_disk_bytes"] = rng.choice([30, 1000]) * (BLOCK + 1024)
            options["kv_load_timeout"] = rng.choice([0.002, 5.0])
            options["max_num_batched_tokens"] = rng.choice([9, 64])
            with tiny_engine(**options, kv_disk_path=folder) as engine:
                prompts: dict[str, tuple[int, ...]] = {}
                for i in range(60):
                    tail = [rng.randrange(40) for _ in range(rng.randint(0, 6))]
                    prompts[str(i)] = tuple(rng.choice(stems) + tail)
                    engine.add_request(str(i), list(prompts[str(i)]), GREEDY)
                    for _ in range(rng.randint(0, 4)):
                        for output in engine.step():
                            if output.finished:
                                tokens = list(output.outputs[0].token_ids)
                                prompt = prompts.pop(output.request_id)
                                if prompt not in known:
                                    known[prompt] = answers(plain, [(list(prompt), GREEDY)])[0]
                                assert tokens == known[prompt]
                                compared += 1
                        check_engine(engine)
                    if prompts and rng.random() < 0.3:
                        name = rng.choice(list(prompts))
                        engine.abort(name)
                        del prompts[name]
                for name in prompts:
                    engine.abort(name)
                check_engine(engine)
                until_idle(engine)
                assert engine.kv.tiers.stats.corrupt == 0
    return compared


def test_everything_at_once(tmp_path):
    assert churn(tmp_path, rounds=2, seed=0) > 20


@pytest.mark.slow
def test_everything_at_once_for_long(tmp_path):
    assert churn(tmp_path, rounds=60, seed=1) > 1000
