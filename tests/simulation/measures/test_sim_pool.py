"""Processes that share runs end with the one that made them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

POOL = """\
import os, time
from minifer.simulation.measures.pool import new_pool

if __name__ == "__main__":
    pool = new_pool(2)
    busy = [pool.submit(time.sleep, 600) for _ in range(ONES)]
    print(pool.submit(os.getpid).result(), *pool._processes, flush=True)
    time.sleep(600)
"""


def runs(pid: int) -> bool:
    """A zombie does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(") ")[2][0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("busy", [0, 1])
def test_workers_end_when_the_process_that_made_them_is_killed(busy: int) -> None:
    script = POOL.replace("ONES", str(busy))
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert workers and all(map(runs, workers))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    end = time.monotonic() + 30
    while any(map(runs, workers)):
        assert time.monotonic() < end, "workers live on"
        time.sleep(0.05)
    parent.stdout.close()
