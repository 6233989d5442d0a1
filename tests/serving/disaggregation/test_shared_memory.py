"""Segments that cannot be left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minifer.serving.disaggregation import shared_memory
from minifer.serving.disaggregation.shared_memory import Segment, open_segment, sweep

SHM = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not SHM.is_dir(), reason="names cannot be listed here")


def names() -> set[str]:
    return {entry.name for entry in SHM.iterdir() if entry.name.startswith("minifer-kv-")}


def until(holds, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)


def test_without_its_name_the_memory_is_still_there():
    with Segment(10_000) as segment:
        assert segment.name in names()
        other = open_segment(segment.name, 10_000)
        segment.take_name_away()
        segment.take_name_away()
        assert segment.name not in names()
        segment.write(5000, b"hello")
        assert other[5000:5005] == b"hello"
        other.close()


def test_a_segment_that_nobody_opened_goes_with_its_owner():
    with pytest.raises(KeyError), Segment(100) as segment:
        assert segment.name in names()
        raise KeyError
    assert segment.name not in names()


def test_opening_checks_name_and_size():
    with pytest.raises(OSError, match="no segment of ours"):
        open_segment("../shm/passwd", 10)
    with pytest.raises(FileNotFoundError):
        open_segment("minifer-kv-1-00000000", 10)
    with Segment(100) as segment, pytest.raises(OSError, match="fewer than"):
        open_segment(segment.name, 1 << 20)


def test_memory_that_is_not_there_is_refused_not_promised(monkeypatch):
    """tmpfs promises more than it has, and kills who writes there."""

    def full(*_):
        raise OSError(28, "No space left on device")

    before = names()
    monkeypatch.setattr(shared_memory.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        Segment(100)
    assert names() == before


def test_real_memory_that_is_not_there_is_refused():
    room = os.statvfs(SHM)
    with pytest.raises(OSError):
        Segment(room.f_bavail * room.f_frsize + (1 << 30))


OPEN = """
import sys
from minifer.serving.disaggregation.shared_memory import open_segment
memory = open_segment(sys.argv[1], 100)
print(bytes(memory[:5]).decode())
"""


def run(code: str, *arguments: str, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_another_process_that_opened_it_does_not_take_the_name_away():
    with Segment(100) as segment:
        segment.write(0, b"hello")
        for _ in range(2):
            said, complaints = run(OPEN, segment.name).communicate(timeout=60)
            assert (said, complaints) == ("hello\n", "")
            assert segment.name in names()


HOLD = """
import os, signal, sys
from multiprocessing import resource_tracker
from minifer.serving.disaggregation.shared_memory import Segment
segment = Segment(100)
print(segment.name, resource_tracker._resource_tracker._pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("tracker_too", [False, True])
def test_a_killed_owner_leaves_nothing(tracker_too: bool):
    """In the moment when the name exists. Who cleans up then is the tracker, or the next worker."""
    owner = run(HOLD, stdin=subprocess.PIPE)
    name, tracker = owner.stdout.readline().split()
    assert name in names()
    if tracker_too:
        os.kill(int(tracker), signal.SIGKILL)
    owner.kill()
    owner.communicate(timeout=30)
    if tracker_too:
        assert name in names()
        assert name in sweep()
    until(lambda: name not in names())


def test_sweeping_leaves_what_belongs_to_the_living_or_to_others():
    stranger = SHM / f"minifer-kv-test-{os.getpid()}"
    stranger.write_bytes(b"")
    try:
        with Segment(100) as segment:
            sweep()
            assert segment.name in names()
        assert stranger.exists()
    finally:
        stranger.unlink()
