"""The folder of block files: what survives, what is refused, what is never believed."""

from __future__ import annotations

import errno
import os
import random
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tier_helpers import FORMAT, content, disk_tier, make_chain, numbered

from minifer.kv.prefix_key import make_key
from minifer.kv.tiers import disk as disk_module
from minifer.kv.tiers.block_file import BlockFormat
from minifer.kv.tiers.disk import DiskTier

HERE = Path(__file__)
FILE_BYTES = len(FORMAT.encode(numbered(1)[0], content(numbered(1)[0])))


def temporaries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.tmp") if path.is_file()]


def test_case_146_what_was_stored_is_found_and_survives(tmp_path):
    tier, keys = disk_tier(tmp_path), numbered(3)
    for key in keys:
        assert tier.write(key, content(key))
        assert not tier.write(key, content(key))  # it is there
    for reader in (tier, disk_tier(tmp_path)):
        assert len(reader) == 3
        assert [reader.read(key) for key in keys] == [content(key) for key in keys]
        assert reader._stats.corrupt == 0
    assert temporaries(tmp_path) == []


def test_nobody_else_may_read_it(tmp_path):
    tier, (key,) = disk_tier(tmp_path / "kv"), numbered(1)
    tier.write(key, content(key))
    path = tier.path(key)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (path.parent, tmp_path / "kv"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert path.parent.name + path.parent.parent.name == path.name[2:4] + path.name[:2]


def test_what_cannot_be_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"kv_disk_path must be a folder that can be made"):
            disk_tier(path)
    with pytest.raises(ValueError, match=r"kv_disk_bytes must hold at least two blocks"):
        disk_tier(tmp_path, capacity=FORMAT.num_bytes)


# -- what is on the disk may be anything


def damaged(good: bytes, rng: random.Random) -> bytes:
    bad = bytearray(good)
    for _ in range(rng.randint(1, 4)):
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
    kind = rng.randrange(3)
    if kind == 0:
        return bytes(bad) if bytes(bad) != good else b""
    if kind == 1:
        return good[: rng.randrange(len(good))]  # torn
    return good[: len(good) // 2] + bytes(len(good) - len(good) // 2)  # lost pages


def test_k06_a_damaged_file_is_a_miss_counted_and_gone(tmp_path):
    tier, (key,) = disk_tier(tmp_path), numbered(1)
    rng = random.Random(0)
    for i in range(60):
        tier.write(key, content(key))
        tier.path(key).write_bytes(damaged(tier.path(key).read_bytes(), rng))
        assert tier.read(key) is None
        assert tier._stats.corrupt == i + 1
        assert key not in tier and not tier.path(key).exists()
    assert tier.write(key, content(key)) and tier.read(key) == content(key)


def test_a_foreign_file_under_a_blocks_name_is_a_miss(tmp_path):
    tier, keys = disk_tier(tmp_path), numbered(2)
    for key in keys:
        tier.write(key, content(key))
    os.replace(tier.path(keys[0]), tier.path(keys[1]))
    assert tier.read(keys[1]) is None
    tier.path(keys[0]).parent.mkdir(parents=True, exist_ok=True)
    with open(tier.path(keys[0]), "wb") as file:
        file.truncate(1 << 40)  # must not be read into memory
    assert tier.read(keys[0]) is None
    assert tier._stats.corrupt == 2


def test_a_file_that_cannot_be_deleted_is_asked_once(tmp_path, monkeypatch):
    tier, (key,) = disk_tier(tmp_path), numbered(1)
    tier.write(key, content(key))
    tier.path(key).write_bytes(b"")

    def refuse(self, missing_ok=False):
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert tier.read(key) is None
    assert key not in tier
    tier._scan()
    assert key not in tier


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.EACCES])
def test_a_file_the_system_will_not_read_is_a_miss_and_stays(tmp_path, monkeypatch, code):
    """Too many open sockets say nothing about a block."""
    tier, (key,) = disk_tier(tmp_path), numbered(1)
    tier.write(key, content(key))

    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(disk_module, "open", fail, raising=False)
    assert tier.read(key) is None and key not in tier
    monkeypatch.undo()
    assert (tier._stats.read_errors, tier._stats.corrupt) == (1, 0)
    assert disk_tier(tmp_path).read(key) == content(key)


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    mine = [
        tmp_path / "notes.txt",
        tmp_path / "ab" / "cd" / "notes.safetensors",
        tmp_path / "ab" / ".x.tmp",
    ]
    mine[1].parent.mkdir(parents=True)
    for path in mine:
        path.write_text("mine")
        os.utime(path, (0, 0))
    tier = disk_tier(tmp_path, capacity=4 * FILE_BYTES)
    for key in numbered(10):
        tier.write(key, content(key))
    assert all(path.read_text() == "mine" for path in mine)


def test_another_model_misses_and_deletes_nothing(tmp_path):
    tier, (key,) = disk_tier(tmp_path), numbered(1)
    tier.write(key, content(key))
    changed = type(FORMAT)((("config", "other"),), FORMAT.dtype, FORMAT.shape)
    stranger = disk_tier(tmp_path, block_format=changed)
    assert key not in stranger and stranger.read(key) is None
    assert tier.read(key) == content(key)


def test_k07_a_short_digest_names_no_file(tmp_path):
    """On disk no whole prefix is compared, so a hash that may collide is not good enough."""
    key = make_key(None, (1, 2), hash_function=lambda data: bytes([len(data) % 256]))
    tier = disk_tier(tmp_path)
    assert not tier.write(key, content(make_key(None, (1,))))
    assert key not in tier and list(tmp_path.iterdir()) == []


# -- the limit


def test_the_limit_holds_and_the_least_recently_used_goes(tmp_path):
    tier = disk_tier(tmp_path, capacity=10 * FILE_BYTES)
    keys = [make_key(None, (i,)) for i in range(40)]
    tier.write(keys[0], content(keys[0]))
    for key in keys[1:]:
        tier.touch([keys[0]])
        tier.write(key, content(key))
        assert tier.num_bytes <= 10 * FILE_BYTES
        assert tier.num_bytes == sum(p.stat().st_size for p in tmp_path.rglob("*.safetensors"))
        assert keys[0] in tier and key in tier
    assert tier._stats.evicted["disk"] == 40 - len(tier)


def test_k04_on_disk_too_the_front_of_a_prefix_outlives_its_tail(tmp_path):
    tier = disk_tier(tmp_path, capacity=12 * FILE_BYTES)
    prefixes = [numbered(5, start=100 * i) for i in range(4)]
    for keys in prefixes:
        for key in keys:
            tier.write(key, content(key))
        here = [[key in tier for key in prefix] for prefix in prefixes]
        assert all(flags == sorted(flags, reverse=True) for flags in here)
    assert all(key in tier for key in prefixes[-1])
    used = prefixes[-2] if prefixes[-2][0] in tier else prefixes[-1]
    tier.touch(used[::-1])
    for i in range(6):
        key = make_key(None, (-i - 1,))
        tier.write(key, content(key))
    assert used[0] in tier


def test_what_other_processes_wrote_counts(tmp_path):
    first, second = (disk_tier(tmp_path, capacity=8 * FILE_BYTES) for _ in range(2))
    keys = [make_key(None, (i,)) for i in range(30)]
    for i, key in enumerate(keys):
        (first, second)[i % 2].write(key, content(key))
    assert sum(p.stat().st_size for p in tmp_path.rglob("*.safetensors")) <= 9 * FILE_BYTES
    assert keys[-1] in first and keys[-2] in second
    for tier in (first, second):
        for key in keys:
            assert tier.read(key) in (None, content(key))
        assert tier._stats.corrupt == 0


# -- writing fails


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_a_disk_that_cannot_be_written_is_left_alone(tmp_path, monkeypatch, call, code):
    tier, keys = disk_tier(tmp_path), numbered(3)
    tier.write(keys[0], content(keys[0]))

    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(disk_module.os, call, fail)
    with pytest.warns(UserWarning, match="cannot be written") as warned:
        assert not tier.write(keys[1], content(keys[1]))
        assert not tier.write(keys[2], content(keys[2]))
    monkeypatch.undo()
    assert len(warned) == 1 and not tier.writable and tier._stats.write_errors == 1
    assert temporaries(tmp_path) == []
    assert tier.read(keys[0]) == content(keys[0])  # what is there is still good
    assert disk_tier(tmp_path).read(keys[1]) is None


def test_a_full_disk_leaves_nothing_half_written(tmp_path):
    """RLIMIT_FSIZE stops a write in the middle, as a full disk does."""
    script = """
import resource, signal, sys, warnings
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from tier_helpers import content, disk_tier, numbered
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
tier, keys = disk_tier(Path(sys.argv[1])), numbered(2)
assert tier.write(keys[0], content(keys[0]))
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert not tier.write(keys[1], content(keys[1]))
assert not tier.writable and len(caught) == 1, caught
"""
    python(script, tmp_path)
    assert temporaries(tmp_path) == []
    tier, keys = disk_tier(tmp_path), numbered(2)
    assert tier.read(keys[0]) == content(keys[0]) and tier.read(keys[1]) is None


def test_somebody_cleans_up_behind_the_writer(tmp_path, monkeypatch):
    """A vanished temporary file loses one block, not the tier."""
    tier, keys = disk_tier(tmp_path), numbered(2)
    replace = os.replace

    def remove_first(source, target):
        os.unlink(source)
        replace(source, target)

    monkeypatch.setattr(disk_module.os, "replace", remove_first)
    assert not tier.write(keys[0], content(keys[0]))
    monkeypatch.undo()
    assert tier.writable and tier.write(keys[1], content(keys[1]))


# -- writers die


def python(script: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess:
    tests = HERE.parents[2]
    command = [sys.executable, "-c", script, *map(str, arguments), str(tests), str(HERE.parent)]
    environment = {**os.environ, "PYTHONPATH": str(tests.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert not check or done.returncode == 0, done.stderr
    return done


DIE = """
import io, os, sys
from pathlib import Path
folder, when = sys.argv[1:3]
sys.path[:0] = sys.argv[3:]
from tier_helpers import content, disk_tier, numbered
tier, keys = disk_tier(Path(folder)), numbered(2)
tier.write(keys[0], content(keys[0]))

def die_at(name, after):
    real = getattr(os, name)
    def die(*args, **kwargs):
        if after:
            real(*args, **kwargs)
        os._exit(9)
    setattr(os, name, die)

class Half(io.RawIOBase):
    def __init__(self, descriptor):
        self.descriptor = descriptor
    def write(self, data):
        os.write(self.descriptor, data[: len(data) // 2])
        os._exit(9)

step, _, after = when.partition("-")
if step == "write":
    os.fdopen = lambda descriptor, mode: Half(descriptor)
else:
    die_at(step, after == "after")
tier.write(keys[1], content(keys[1]))
os._exit(0)
"""
STEPS = ["open-before", "open-after", "write", "fsync-before", "fsync-after", "utime-before"]
STEPS += ["utime-after", "replace-before", "replace-after"]


@pytest.mark.parametrize("when", STEPS)
def test_k05_a_writer_that_dies_at_this_step_leaves_a_whole_block_or_none(tmp_path, when):
    assert python(DIE, tmp_path, when, check=False).returncode == 9
    tier, keys = disk_tier(tmp_path), numbered(2)
    assert tier.read(keys[0]) == content(keys[0])
    expected = content(keys[1]) if when == "replace-after" else None
    assert tier.read(keys[1]) == expected
    assert tier._stats.corrupt == 0
    left = temporaries(tmp_path)
    assert len(left) == (when not in ("open-before", "replace-after"))
    for path in left:  # its writer may be alive: it gets a minute
        os.utime(path, (time.time() - 61, time.time() - 61))
    again = disk_tier(tmp_path)
    assert temporaries(tmp_path) == []
    again.write(keys[1], content(keys[1]))
    assert again.read(keys[1]) == content(keys[1])


WRITE_ON = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from test_disk import BIG, BIG_LIMIT, content, disk_tier, numbered
tier = disk_tier(Path(sys.argv[1]), BIG_LIMIT, BIG)
print("ready", flush=True)
while True:
    for keys in (numbered(20, start=1000 * i) for i in range(5)):
        for key in keys:
            tier.write(key, content(key, BIG.num_bytes))
"""
BIG = BlockFormat((("config", "big"),), "F32", (64, 1024))  # 256 KiB: a write takes its time
BIG_LIMIT = 40 * (BIG.num_bytes + 4096)


def start_writer(folder: Path) -> subprocess.Popen:
    tests = HERE.parents[2]
    command = [sys.executable, "-c", WRITE_ON, str(folder), "x", str(tests), str(HERE.parent)]
    environment = {**os.environ, "PYTHONPATH": str(tests.parent)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def check_folder(folder: Path) -> int:
    """Every block is whole or missing; returns how many are there."""
    tier, found = disk_tier(folder, BIG_LIMIT, BIG), 0
    for keys in (numbered(20, start=1000 * i) for i in range(5)):
        for key in keys:
            payload = tier.read(key)
            assert payload in (None, content(key, BIG.num_bytes))
            found += payload is not None
    assert tier._stats.corrupt == 0
    return found


def kill_writers(folder: Path, times: int) -> None:
    rng, total = random.Random(0), 0
    for _ in range(times):
        with start_writer(folder) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0, 0.05))
            writer.kill()
        total += check_folder(folder)
        for path in folder.rglob("*.safetensors"):
            if rng.random() < 0.5:
                path.unlink()
    assert total > 0


def test_k05_killed_in_the_middle(tmp_path):
    kill_writers(tmp_path, 2)


@pytest.mark.slow
def test_k05_killed_in_the_middle_fifty_times(tmp_path):
    kill_writers(tmp_path, 50)


def test_two_processes_on_one_folder(tmp_path):
    """One writes and evicts, one reads and deletes what it finds damaged."""
    with start_writer(tmp_path) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        rng, found = random.Random(1), 0
        tier = disk_tier(tmp_path, BIG_LIMIT // 2, BIG)
        deadline = time.monotonic() + 20
        for round_ in range(10_000):
            if (found > 200 and round_ > 100) or time.monotonic() > deadline:
                break
            for key in numbered(20, start=1000 * rng.randrange(5)):
                payload = tier.read(key)
                assert payload in (None, content(key, BIG.num_bytes))
                found += payload is not None
                if rng.random() < 0.1:
                    tier.write(key, content(key, BIG.num_bytes))
        assert found > 200 and tier.writable
        assert tier._stats.corrupt == 0
        writer.kill()
    check_folder(tmp_path)


def test_threads_share_a_tier(tmp_path):
    """`read` belongs to one thread, `write` to another, `in` to a third."""
    from concurrent.futures import ThreadPoolExecutor

    tier = disk_tier(tmp_path, capacity=20 * FILE_BYTES)
    keys = [key for i in range(5) for key in numbered(10, start=1000 * i)]

    def write():
        for _ in range(3):
            for key in keys:
                tier.write(key, content(key))

    def read():
        for _ in range(6):
            assert all(tier.read(key) in (None, content(key)) for key in keys)

    def look():
        for _ in range(20):
            assert sum(key in tier for key in keys) >= 0 and tier.num_bytes >= 0

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(work) for work in (write, read, look)]:
            done.result()
    assert tier._stats.corrupt == 0 and isinstance(tier, DiskTier)
    assert make_chain((1,))[0] not in tier


def test_the_limit_counts_what_other_processes_write(tmp_path):
    """Two writers that opened the folder when it was empty share one limit."""
    capacity = 100 * 1000
    first, second = disk_tier(tmp_path, capacity), disk_tier(tmp_path, capacity)
    for i in range(300):
        for tier, (key,) in ((first, numbered(1, 2 * i)), (second, numbered(1, 2 * i + 1))):
            assert tier.write(key, content(key))
        used = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
        assert used <= 1.1 * capacity + 2000
