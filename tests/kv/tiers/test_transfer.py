"""The two threads: they do their work, survive faults, and end when they are told to."""

from __future__ import annotations

import threading
import time

import pytest
from tier_helpers import MemoryDisk, content, numbered

from minifer.kv.tiers.dram import StoredBlock
from minifer.kv.tiers.stats import TierStats
from minifer.kv.tiers.transfer import Prefetch, Transfers, WriteJob

SECONDS = 20.0  # for a machine with other things to do; nothing below takes that long


class GatedDisk(MemoryDisk):
    """Answers while `gate` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.calls = 0

    def _wait(self) -> None:
        self.calls += 1
        assert self.gate.wait(SECONDS)

    def read(self, key):
        self._wait()
        return super().read(key)

    def write(self, key, payload):
        self._wait()
        return super().write(key, payload)


@pytest.fixture
def disk():
    disk = GatedDisk()
    yield disk
    disk.gate.set()


def blocks(keys) -> list[StoredBlock]:
    return [StoredBlock(key, content(key)) for key in keys]


def until(condition) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_blocks_are_written_and_read_back(disk):
    disk.gate.set()
    stats, keys = TierStats(), numbered(5)
    transfers = Transfers(disk, 10, stats)
    jobs = blocks(keys)
    assert transfers.write(WriteJob(jobs, keys[-1])) == 5
    assert transfers.flush(SECONDS)
    assert transfers.written() == jobs and transfers.written() == []
    assert disk.touched == [keys[::-1]]  # from the tail to the head
    assert stats.stores["disk"].blocks == 5 and stats.stores["disk"].bytes == 5 * 64
    read = Prefetch([*keys, *numbered(1, start=9)])
    transfers.start(read)
    transfers.wait([read], SECONDS)
    assert read.done and read.payloads == [content(key) for key in keys]
    assert transfers.close(SECONDS)


def test_a_full_queue_takes_no_more(disk):
    transfers = Transfers(disk, 3, TierStats())
    assert transfers.write(WriteJob(blocks(numbered(2)), None)) == 2
    assert transfers.write(WriteJob(blocks(numbered(5, start=50)), None)) == 1
    assert transfers.write(WriteJob(blocks(numbered(1, start=90)), None)) == 0
    disk.gate.set()
    assert transfers.flush(SECONDS)
    assert len(disk.blocks) == 3 == len(transfers.written())
    assert transfers.write(WriteJob(blocks(numbered(1, start=90)), None)) == 1
    assert transfers.close(SECONDS)
    assert len(disk.blocks) == 4  # closing writes what is queued


def test_a_cancelled_read_stops_between_two_blocks(disk):
    keys = numbered(5)
    disk.blocks = {key.digest: content(key) for key in keys}
    transfers = Transfers(disk, 3, TierStats())
    read = Prefetch(keys)
    transfers.start(read)
    until(lambda: disk.calls == 1)
    read.cancelled = True
    disk.gate.set()
    transfers.wait([read], SECONDS)
    assert read.done and len(read.payloads) == 1
    assert transfers.close(SECONDS)


def test_waiting_ends_at_its_limit(disk):
    keys = numbered(1)
    transfers = Transfers(disk, 3, TierStats())
    read = Prefetch(keys)
    transfers.start(read)
    transfers.wait([read], 0.01)
    assert not read.done
    assert not transfers.flush(0) or not transfers._writes
    assert not transfers.close(0.01)  # it is stuck, and stays behind
    disk.gate.set()
    transfers.wait([read], SECONDS)
    assert read.done


def test_after_the_end_nothing_is_taken(disk):
    disk.gate.set()
    transfers = Transfers(disk, 3, TierStats())
    assert transfers.close(SECONDS)
    assert transfers.write(WriteJob(blocks(numbered(1)), None)) == 0


def test_a_fault_costs_blocks_not_the_thread(disk, capsys):
    disk.gate.set()
    keys = numbered(3)
    transfers = Transfers(disk, 10, TierStats())

    def fail(*_):
        raise RuntimeError("a fault of the store")

    disk.read, disk.write = fail, fail
    job, read = blocks(keys), Prefetch(keys)
    transfers.write(WriteJob(list(job), None))
    transfers.start(read)
    assert transfers.flush(SECONDS)
    transfers.wait([read], SECONDS)
    assert read.done and read.payloads == [] and transfers.written() == job
    assert capsys.readouterr().err.count("a fault of the store") >= 2
    del disk.read, disk.write
    disk.blocks = {key.digest: content(key) for key in keys}
    again = Prefetch(keys)
    transfers.start(again)
    transfers.wait([again], SECONDS)
    assert len(again.payloads) == 3
    assert transfers.close(SECONDS)
