"""A `minifer serve` of our own, for as long as a benchmark runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

_KEY = "MINIFER_API_KEY"  # a key of the user's own server is not this one's
_PATIENCE = 10.0  # seconds for a server to stop by itself


@contextmanager
def spawned_server(arguments: Sequence[str], timeout: float = 300.0) -> Iterator[str]:
    """Start `minifer serve ARGUMENTS` on a free port; its base URL, once it is healthy.

    timeout: seconds to load the model. Raises `RuntimeError` with the server's last words when it
    does not come up. It is stopped at the end, whatever happened in between.
    """
    port = _free_port()
    command = [sys.executable, "-m", "minifer", "serve", "--port", str(port), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != _KEY}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_healthy(url, process, time.monotonic() + timeout)
            yield url
        except _NotHealthyError as error:
            log.seek(0)
            last = log.read()[-2000:].decode(errors="replace").strip()
            raise RuntimeError(f"minifer serve {error}: {last or 'it said nothing'}") from None
        finally:
            process.terminate()
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class _NotHealthyError(Exception):
    pass


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], deadline: float) -> None:
    with httpx.Client(base_url=url, trust_env=False) as http:
        while True:
            if process.poll() is not None:
                raise _NotHealthyError(f"ended with status {process.returncode}")
            try:
                if http.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass  # it does not listen yet
            if time.monotonic() > deadline:
                raise _NotHealthyError("did not become healthy in time")
            time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
