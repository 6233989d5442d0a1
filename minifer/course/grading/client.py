"""The grader's end of the fork server: send a job, read what happens, never wait for ever."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from minifer.course.grading.plugin import TestResult
from minifer.course.grading.worker import Job

_GRACE = 20.0  # seconds after which even the keeper is given up
_LONGEST_LINE = 1 << 22


class GraderError(RuntimeError):
    """The grader, or a test file, does not work: nobody's points may depend on it."""


@dataclass
class Outcome:
    """What a job sent. ended: what ended it early, "" for nothing. tests: name, points, hidden.
    said: by the test file, for beside the result."""

    tests: list[dict[str, Any]] = field(default_factory=list)
    results: list[TestResult] = field(default_factory=list)
    running: str | None = None
    ended: str = ""
    tampered: str = ""
    fingerprint: str = ""
    printed: str = ""
    blocked: list[str] = field(default_factory=list)
    said: str = ""
    crash: str = ""
    seconds: float = 0.0


def hash_seed(seed: int) -> int:
    """PYTHONHASHSEED of a run. It does not give the seed away: an answer can read it."""
    return int.from_bytes(hashlib.sha256(f"hash {seed}".encode()).digest()[:4], "big")


class ForkServer:
    """Loads torch, pytest and the engine once; `run` is cheap and may be called from threads.

    seed: that of the run; PYTHONHASHSEED of all its processes follows from it. Where there is no
    fork (Windows), or with fork=False, every job starts a fresh interpreter. many: so many jobs
    are coming that what few of them need is worth loading, too.
    """

    def __init__(self, seed: int, *, fork: bool | None = None, many: bool = False) -> None:
        self.hash_seed = hash_seed(seed)
        self._environment = os.environ | {
            "PYTHONHASHSEED": str(self.hash_seed),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "TRITON_INTERPRET": "1",  # kernels are graded on the CPU, whatever else is there
        }
        self._environment.pop("PYTEST_ADDOPTS", None)
        self._command = [sys.executable, "-m", "minifer.course.grading.server"]
        self._lock = threading.Lock()
        self._fork = hasattr(os, "fork") if fork is None else fork
        if self._fork:
            self._orders, theirs = socket.socketpair()
            self._process = subprocess.Popen(
                [*self._command, str(theirs.fileno()), *(["many"] if many else [])],
                pass_fds=[theirs.fileno()],
                env=self._environment,
                stdin=subprocess.DEVNULL,
            )
            theirs.close()
            if self._orders.recv(16) != b"ready\n":
                raise GraderError("the fork server did not start; its error is above")

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fork:
            self._orders.close()
            self._process.wait(_GRACE)

    def run(self, job: Job) -> Outcome:
        """Run a job to its end, or to the end of its time."""
        begin, secret = time.monotonic(), secrets.token_hex(16)
        request = json.dumps({"job": job.to_json(), "secret": secret}).encode() + b"\n"
        outcome = Outcome()
        with self._started(request) as lines:
            _read(lines, job, secret, outcome)
        outcome.seconds = time.monotonic() - begin
        return outcome

    @contextlib.contextmanager
    def _started(self, request: bytes) -> Iterator[queue.Queue[bytes]]:
        if self._fork:
            reads, writes = os.pipe()
            with self._lock:  # one request a message
                socket.send_fds(self._orders, [request], [writes])
                os.close(writes)
                stream = os.fdopen(reads, "rb")
                first = stream.readline()
            if not first:
                raise GraderError("the fork server is gone")
            with stream:
                yield _pump(stream)
            return
        process = subprocess.Popen(
            [*self._command, "once"],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
            process.stdout.readline()  # "ready": the libraries are loaded, the clock starts
            yield _pump(process.stdout)
        finally:
            process.kill()
            process.wait()
            process.stdin.close()


def _pump(stream: IO[bytes]) -> queue.Queue[bytes]:
    """Lines of a stream as they come, b"" at its end: a queue can be waited for, a file cannot."""
    lines: queue.Queue[bytes] = queue.Queue(maxsize=100)

    def read() -> None:
        with contextlib.suppress(OSError, ValueError):
            while line := stream.readline(_LONGEST_LINE):
                lines.put(line)
        lines.put(b"")

    threading.Thread(target=read, daemon=True).start()
    return lines


def _read(lines: queue.Queue[bytes], job: Job, secret: str, outcome: Outcome) -> None:
    deadline = time.monotonic() + job.seconds + _GRACE
    ended = False
    while True:
        try:
            line = lines.get(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            outcome.ended = f"stopped after {job.seconds:g} s"
            return
        if not line:
            outcome.ended = outcome.ended or ("" if ended else "the answer ended the process")
            return
        if not line.startswith(secret.encode() + b" "):
            outcome.tampered = "the answer wrote to the grader's channel"
            return
        message = json.loads(line[len(secret) + 1 :])
        ended = ended or message["kind"] == "end"
        if message["kind"] == "exit":
            if not ended:
                outcome.ended = _why(message["status"], job)
            return
        _take(message, outcome)


def _take(message: dict[str, Any], outcome: Outcome) -> None:
    kind = message.pop("kind")
    if kind == "collected":
        outcome.tests = message["tests"]
    elif kind == "begin":
        outcome.running = message["name"]
    elif kind == "result":
        outcome.results.append(TestResult(**message))
        outcome.running = None
    elif kind == "tampered":
        outcome.tampered = message["reason"]
    elif kind == "fingerprint":
        outcome.fingerprint = message["value"]
    elif kind == "notes":
        outcome.printed, outcome.blocked = message["printed"], message["blocked"]
        outcome.said = message.get("said", "")
    elif kind == "crash":
        outcome.crash = message["reason"]


def _why(status: int | None, job: Job) -> str:
    if status is None:
        return f"stopped after {job.seconds:g} s"
    if status in (-getattr(signal, "SIGXCPU", 24), -9):
        return f"stopped after {job.cpu_seconds:g} s of CPU time, or out of memory"
    if status < 0:
        return f"the answer crashed the process ({signal.Signals(-status).name})"
    return "the answer ended the process"
