"""Shared memory that cannot be left behind.

A segment has a name only until the other side has opened it: then the owner takes the name away,
and the system frees the memory when both have let go or died, however they died. A SIGKILL within
these milliseconds leaves the name; `multiprocessing`'s resource tracker, a process of its own,
removes it then, and where that was killed too, the next worker on this machine does (`sweep`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import TracebackType

from minifer.serving.disaggregation.frames import Bytes

_NAMES = Path("/dev/shm")  # where Linux shows them; elsewhere they cannot be listed
_OURS = re.compile(r"minifer-kv-(\d+)-[0-9a-f]{8}")


class Segment:
    """The owner's side. A context manager whose end takes name and memory away.

    Raises `OSError` when there is no room: memory that the system promised and does not have would
    kill the process that writes to it (as in a container with 64 MB of shared memory).
    """

    def __init__(self, num_bytes: int) -> None:
        name = f"minifer-kv-{os.getpid()}-{secrets.token_hex(4)}"
        self._memory = SharedMemory(name, create=True, size=num_bytes)
        self._named = True
        try:
            if hasattr(os, "posix_fallocate"):
                with _opened(name) as descriptor:
                    os.posix_fallocate(descriptor, 0, num_bytes)
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        return self._memory.name

    def write(self, offset: int, content: Bytes) -> None:
        buffer = self._memory.buf
        assert buffer is not None  # only once it is closed
        buffer[offset : offset + len(content)] = content

    def take_name_away(self) -> None:
        """The other side has opened it, or never will. Twice is once."""
        if self._named:
            self._named = False
            self._memory.unlink()

    def close(self) -> None:
        self.take_name_away()
        self._memory.close()

    def __enter__(self) -> Segment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def open_segment(name: str, num_bytes: int) -> mmap.mmap:
    """The other side: the memory of a segment, to read; close it. Raises `OSError`.

    Not `SharedMemory(name)`: before Python 3.13 that would make this process' tracker an owner too,
    which takes the name away when this process ends (python/cpython#82300).
    """
    if not _OURS.fullmatch(name):
        raise OSError(f"no segment of ours: {name!r:.60}")
    with _opened(name) as descriptor:
        if os.fstat(descriptor).st_size < num_bytes:
            raise OSError(f"the segment holds fewer than {num_bytes} bytes")
        return mmap.mmap(descriptor, num_bytes)


@contextlib.contextmanager
def _opened(name: str) -> Iterator[int]:
    """A file descriptor of a named segment, for the length of a block."""
    try:
        from _posixshmem import shm_open  # what SharedMemory itself is made of
    except ImportError:
        raise OSError("this system has no POSIX shared memory") from None
    descriptor = shm_open(f"/{name}", os.O_RDWR, mode=0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sweep() -> list[str]:
    """Remove segments whose owner is dead; returns their names."""
    removed = []
    with contextlib.suppress(OSError):
        for entry in _NAMES.iterdir():
            ours = _OURS.fullmatch(entry.name)
            if ours is not None and not _is_alive(int(ours[1])):
                with contextlib.suppress(OSError):  # another user's, or somebody was quicker
                    entry.unlink()
                    removed.append(entry.name)
    return removed


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # there, and not ours
        return True
    return True
