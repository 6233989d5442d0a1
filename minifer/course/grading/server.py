"""The fork server: torch, pytest and the engine are loaded once, each exercise forks from here.

Started as a program with the file descriptor of a socket. A request is one line, a `Job` as JSON
and a secret, and comes with the descriptor of a pipe; everything that happens is written there, a
line each: the secret, a space, JSON. What does not begin with the secret was not written by us.

The process that is forked first, the keeper, forks the one that meets the answer, ends that with
all it has started when its time is up, and removes its folder. Hash randomisation is inherited, so
it is that of the server: whoever starts it sets PYTHONHASHSEED and writes it down.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from minifer.course.grading.worker import Job, work

_LONGEST = 1 << 20  # bytes of a request
_exit = os._exit  # an answer's process gets another one


def main() -> None:
    if sys.argv[1] == "once":
        _once()
        return
    orders = socket.socket(fileno=int(sys.argv[1]))
    preload(many=sys.argv[2:] == ["many"])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are nobody's zombies
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders.sendall(b"ready\n")
    while True:
        text, descriptors, _, _ = socket.recv_fds(orders, _LONGEST, 1)
        if not text:
            _exit(0)  # what libraries say at the end of a program is not for the reader
        if os.fork() == 0:
            orders.close()
            try:
                keep(json.loads(text), descriptors[0])
            finally:
                _exit(0)
        os.close(descriptors[0])


def preload(*, many: bool = False) -> None:
    """All that is the same for every exercise, so that a fork has it for nothing.

    many: torch's compiler as well, which some of torch's context managers import on first use.
    """
    import numpy.testing  # noqa: F401
    import torch
    import torch.nn.functional

    from minifer.course import example
    from minifer.course.grading.plugin import run_pytest
    from minifer.kernels.mode import interpret_without_gpu

    interpret_without_gpu()
    torch.set_num_threads(1)
    example.tiny()
    with tempfile.TemporaryDirectory() as folder:  # imports what pytest imports late
        from pathlib import Path

        empty = Path(folder) / "test_nothing.py"
        empty.write_text("def test_nothing():\n    pass\n")
        run_pytest(empty, object())
    if many:
        importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()


def keep(request: dict[str, Any], results: int) -> None:
    """Fork the worker, wait for it, end it when its time is up, clean up behind it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    job, secret = Job.from_json(request["job"]), request["secret"]
    send = _sender(results, secret)
    send("ready")
    folder = os.path.realpath(tempfile.mkdtemp(prefix="minifer-grade-"))
    end = time.monotonic() + job.seconds
    worker = os.fork()
    if worker == 0:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _become_worker(job, folder, send)
        _exit(0)
    status: int | None = None
    pause, server = 0.001, os.getppid()
    while status is None and time.monotonic() < end and os.getppid() == server:
        pid, code = os.waitpid(worker, os.WNOHANG)
        if pid:
            status = os.waitstatus_to_exitcode(code)
        else:
            time.sleep(pause)
            pause = min(0.02, pause * 1.5)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing may be left of it
        os.killpg(worker, signal.SIGKILL)
    if status is None:
        os.waitpid(worker, 0)
    shutil.rmtree(folder, ignore_errors=True)
    send("exit", status=status)


def _become_worker(job: Job, folder: str, send: Callable[..., None]) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    os.chdir(folder)
    try:
        work(job, send)
    except BaseException as error:
        send("crash", reason=f"{type(error).__name__}: {error}")


def _sender(results: int, secret: str) -> Callable[..., None]:
    def send(kind: str, **fields: Any) -> None:
        line = f"{secret} {json.dumps({'kind': kind, **fields})}\n".encode()
        while line:
            line = line[os.write(results, line) :]

    return send


def _once() -> None:
    """Where there is no fork: one request on the standard input, results on the standard output."""
    request = json.loads(sys.stdin.readline())
    send = _sender(os.dup(1), request["secret"])
    preload()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        send("ready")
        _become_worker(Job.from_json(request["job"]), folder, send)
        send("exit", status=0)
        os.chdir(os.path.dirname(folder))


if __name__ == "__main__":
    main()
