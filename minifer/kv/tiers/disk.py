"""The tier on disk: a folder of block files that several processes share and that survives them.

The folder is the truth; what is kept in memory is a copy of its names. A block is written under a
temporary name, flushed, synced and renamed, so that a file under its own name is whole, whenever
the writer was killed. What cannot be read is missing; what cannot be written is not.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from minifer.kv.prefix_key import PrefixKey
from minifer.kv.tiers.block_file import BlockFormat, Bytes
from minifer.kv.tiers.stats import TierStats

LOW_WATERMARK = 0.9  # eviction goes on until this share of the limit is left
RESCAN_SHARE = 0.05  # of the limit, written since we last saw what the others have written
STALE_SECONDS = 60  # a temporary file this old has lost its writer
_BLOCK_FILE = re.compile(r"([0-9a-f]{2})([0-9a-f]{2})[0-9a-f]{60}\.safetensors")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")
_DIGEST_BYTES = 32  # a shorter digest may collide, and on disk nobody compares a whole prefix


class DiskTier:
    """aa/bb/aabb….safetensors below `folder`; only such names are ever read or deleted.

    capacity: bytes of all block files, whoever wrote them; each process may overshoot it by 5 %,
    because it looks at the others' files only so often. Raises `ValueError` when the folder
    cannot be made or the capacity holds not one block. After that no method raises `OSError`:
    a failed read is a miss, a failed write ends all writing, with a warning.

    Thread-safe. `read` is one thread's, `write` and `touch` another's.
    """

    def __init__(
        self, folder: Path, block_format: BlockFormat, capacity: int, stats: TierStats
    ) -> None:
        if capacity < 2 * block_format.num_bytes:
            raise ValueError(
                f"kv_disk_bytes must hold at least two blocks of {block_format.num_bytes} bytes, "
                f"got {capacity}"
            )
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"kv_disk_path must be a folder that can be made, got {str(folder)!r}: {error}"
            ) from error
        self.folder = folder
        self.format = block_format
        self.capacity = capacity
        self.writable = True
        self._stats = stats
        self._lock = threading.Lock()  # of the names
        self._sizes: dict[str, int] = {}
        self._unscanned = 0  # bytes written since the folder was read
        self._unusable: set[str] = set()  # files that failed and could not be deleted
        self._scan()

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return sum(self._sizes.values())

    def __len__(self) -> int:
        return len(self._sizes)

    def path(self, key: PrefixKey) -> Path:
        return self._path(self.format.file_name(key))

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / name[2:4] / f"{name}.safetensors"

    def __contains__(self, key: PrefixKey) -> bool:
        """Is there a file? What it holds is found out when it is read."""
        name = self.format.file_name(key)
        if name in self._sizes:
            return True
        if name in self._unusable or len(key.digest) != _DIGEST_BYTES:
            return False
        with suppress(OSError):
            size = self._path(name).stat().st_size  # another process may have written it
            with self._lock:
                self._sizes[name] = size
            return True
        return False

    # -- reading

    def read(self, key: PrefixKey) -> memoryview | None:
        """A copy of the block, every byte of it checked; None when there is no such block."""
        name, content = self.format.file_name(key), bytearray()
        try:
            with open(self._path(name), "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size <= 2 * self.format.num_bytes + 65536:  # else it is no file of ours
                    content = bytearray(size)
                    view = memoryview(content)
                    while view and (count := file.readinto(view)):
                        view = view[count:]
        except FileNotFoundError:  # evicted by another process
            self._forget(name)
            return None
        except OSError:  # says nothing about the file: it stays, but is not asked again
            self._stats.read_errors += 1
            self._unusable.add(name)
            self._forget(name)
            return None
        payload = self.format.decode(key, content)
        if payload is None:
            self._stats.corrupt += 1
            self._quarantine(name)
        return payload

    def _quarantine(self, name: str) -> None:
        """A file that is not what its name says: out of the way, for everybody."""
        self._unusable.add(name)
        with suppress(OSError):
            self._path(name).unlink()
            self._unusable.discard(name)
        self._forget(name)

    def _forget(self, name: str) -> None:
        with self._lock:
            self._sizes.pop(name, None)

    # -- writing

    def write(self, key: PrefixKey, payload: Bytes) -> bool:
        """Store a block; False when it is there already, or cannot be written."""
        if not self.writable or len(key.digest) != _DIGEST_BYTES or key in self:
            return False
        name = self.format.file_name(key)
        content = self.format.encode(key, payload)
        target = self._path(name)
        temporary = target.with_name(f".{name}.{secrets.token_hex(8)}.tmp")
        try:
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                _write_synced(temporary, content)
                self._date(temporary, key)
                os.replace(temporary, target)  # from here on others can see it
            except BaseException:
                with suppress(OSError):
                    temporary.unlink()
                raise
            _sync_folder(target.parent)
        except FileNotFoundError:  # somebody cleaned up behind us: this block is lost, no more
            self._stats.write_errors += 1
            return False
        except OSError as error:
            self._stats.write_errors += 1
            self.writable = False
            warnings.warn(
                f"kv_disk_path {str(self.folder)!r} cannot be written, nothing more is stored "
                f"there: {error}",
                stacklevel=2,
            )
            return False
        with self._lock:
            self._sizes[name] = len(content)
            self._unusable.discard(name)
        self._unscanned += len(content)
        if self._unscanned > RESCAN_SHARE * self.capacity:
            self._scan()
        if self.num_bytes > self.capacity:
            self._evict()
        return True

    def _date(self, path: Path, key: PrefixKey) -> None:
        """As recent as the block in front of it, and a little less, so that it goes first."""
        used = time.time_ns()
        if key.parent is not None:
            with suppress(OSError):
                used = self.path(key.parent).stat().st_mtime_ns - 1
        os.utime(path, ns=(used, used))

    def touch(self, keys: Sequence[PrefixKey]) -> None:
        """A prefix is used: set its files' times, given from the tail to the head."""
        now = time.time_ns()
        for age, key in enumerate(keys, start=-len(keys)):
            with suppress(OSError):  # no such file
                os.utime(self.path(key), ns=(now + age, now + age))

    # -- the folder

    def _scan(self) -> list[tuple[int, str]]:
        """Read the folder's names again; returns (time of last use, name) of every block."""
        self._unscanned = 0
        found: list[tuple[int, str]] = []
        sizes: dict[str, int] = {}
        stale = time.time() - STALE_SECONDS
        for entry in _files(self.folder):
            with suppress(OSError):  # it may vanish while we look
                if _TEMPORARY.fullmatch(entry.name):
                    if entry.stat(follow_symlinks=False).st_mtime < stale:
                        os.unlink(entry)
                elif _BLOCK_FILE.fullmatch(entry.name):
                    status, name = entry.stat(follow_symlinks=False), entry.name[:64]
                    found.append((status.st_mtime_ns, name))
                    sizes[name] = status.st_size
        with self._lock:
            self._sizes = {n: size for n, size in sizes.items() if n not in self._unusable}
        return found

    def _evict(self) -> None:
        """Delete what was used least recently, by whichever process, down to the low watermark."""
        oldest_first = sorted(self._scan())
        excess = self.num_bytes - int(LOW_WATERMARK * self.capacity)
        for _, name in oldest_first:
            if excess <= 0:
                break
            with suppress(OSError):
                self._path(name).unlink()
                self._stats.evicted["disk"] += 1
            excess -= self._sizes.get(name, 0)
            self._forget(name)


def _files(folder: Path) -> Iterator[os.DirEntry[str]]:
    """The files two levels below, whose folders have the names of ours."""
    for parent in folder.glob("[0-9a-f][0-9a-f]/[0-9a-f][0-9a-f]"):
        with suppress(OSError), os.scandir(parent) as entries:
            yield from entries


def _write_synced(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """The new name survives a power failure too. Where folders cannot be opened: no-op."""
    with suppress(PermissionError):  # Windows
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
