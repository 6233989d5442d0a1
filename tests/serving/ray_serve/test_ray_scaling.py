"""A Ray of its own: replicas come and go with the load, and everything ends with the server."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray.serve", reason='Ray is not installed: pip install "minifer[ray]"')

from ray_live import PATIENCE, RayServer, wait_for

LONG = {"prompt": "a", "max_tokens": 900, "ignore_eos": True}
pytestmark = pytest.mark.slow


@pytest.fixture
def own_ray() -> Iterator[Any]:
    """Starts `minifer serve --ray OPTIONS` without a cluster; of Ray nothing may be left."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    environment = {
        **os.environ,
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0" * 64,
        "OMP_NUM_THREADS": "1",
    }
    servers: list[RayServer] = []
    left: list[psutil.Process] = []

    def start(*options: str) -> RayServer:
        servers.append(RayServer(environment, folder, *options))
        left.extend(psutil.Process(servers[-1].process.pid).children(recursive=True))
        return servers[-1]

    try:
        yield start
        for server in servers:
            server.end()
        _, alive = psutil.wait_procs(left, timeout=PATIENCE)
        assert not alive
    finally:
        for server in servers:
            server.end(signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


class Load:
    """Long answers, so many at a time, until it is taken away; all of them must be complete."""

    def __init__(self, served: RayServer, number: int) -> None:
        self._served = served
        self.stop = threading.Event()
        self.reasons: list[str] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(number)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self.stop.is_set():
            answer = self._served.post("/v1/completions", **LONG).json()
            self.reasons.append(answer.get("choices", [{}])[0].get("finish_reason", str(answer)))

    def end(self) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)


def test_replicas_come_with_the_load_and_go_with_it(own_ray: Any):
    served = own_ray(
        *("--max-replicas", "2", "--target-requests", "2"),
        *("--upscale-delay", "1", "--downscale-delay", "1"),
    )
    assert served.num_running() == 1
    load = Load(served, 6)
    try:
        wait_for(lambda: served.num_running() == 2, 2 * PATIENCE)
        wait_for(lambda: served.metric("minifer:num_requests_running") > 0)
    finally:
        load.end()
    less = Load(served, 1)
    try:
        wait_for(lambda: served.num_running() == 1, 2 * PATIENCE)
    finally:
        less.end()
    assert set(load.reasons + less.reasons) == {"length"}  # no request is lost on the way


def test_a_key_is_asked_for_at_the_door(own_ray: Any):
    served = own_ray("--api-key", "secret")
    assert served.post("/v1/completions", **LONG).status_code == 401
    assert served.http.get("/metrics").status_code == 401
    assert served.http.get("/health").status_code == 200
    key = {"Authorization": "Bearer secret"}
    body = {**LONG, "max_tokens": 1}
    assert served.http.post("/v1/completions", json=body, headers=key).status_code == 200


def test_ctrl_c_cuts_short_what_takes_too_long(own_ray: Any):
    served = own_ray("--shutdown-timeout", "0.2", "--max-num-seqs", "1")
    load = Load(served, 2)
    wait_for(lambda: served.metric("minifer:num_requests_waiting") == 1)
    load.stop.set()
    os.killpg(served.process.pid, signal.SIGINT)  # as a terminal does: to all of the group
    load.end()
    assert load.reasons == ["abort", "abort"]
    assert served.end(0) == 0


def test_a_server_that_is_killed_takes_its_ray_along(own_ray: Any):
    served = own_ray()
    served.process.kill()
    served.process.wait()
