"""A Ray cluster and a `minifer serve --ray` for tests, both in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, ClassVar

import httpx
import openai
import psutil
from live import until

PATIENCE = 120  # seconds for anything that starts or ends, on a machine that is busy


class Child:
    """A process whose standard output is read line by line, with a deadline."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
                start_new_session=True,
            )
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,))
        self._reader.start()

    def _read(self, stream: IO[str]) -> None:
        self.said += iter(stream.readline, "")  # += takes them one by one, as they come

    def line(self, index: int) -> str:
        until(lambda: len(self.said) > index or self.process.poll() is not None, PATIENCE)
        assert len(self.said) > index, self.log.read_text(errors="replace")[-4000:]
        return self.said[index]

    def end(self, number: int = signal.SIGTERM) -> int:
        """Ask it to end, once; its status. Killed when it does not."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        if self.process.poll() is None and number:
            self.process.send_signal(number)
        try:
            return self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join(PATIENCE)
            self.process.stdout.close()


class RayCluster(Child):
    """See `ray_cluster.py` for the commands. folder: where Ray keeps its files and sockets."""

    def __init__(self, folder: Path, num_workers: int) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "RAY_TMPDIR": str(folder),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray writes one into the user's home
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": str(PATIENCE),
            "RAY_enable_worker_prestart": "0",  # processes for tasks that never come
            "OMP_NUM_THREADS": "1",
        }
        script = Path(__file__).with_name("ray_cluster.py")
        super().__init__([str(script), str(num_workers)], self.environment, folder / "cluster.log")
        self._num_answers = 0
        try:
            self.address: str = self._answer()["address"]
        except BaseException:
            self.end(0)
            raise

    def _answer(self) -> dict[str, Any]:
        self._num_answers += 1
        return json.loads(self.line(self._num_answers - 1))

    def command(self, *words: str) -> Any:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)
        return self._answer()

    def kill_a_node(self) -> None:
        """All processes of one worker node die at once."""
        self.command("kill", self.command("nodes")["nodes"][0])

    def replicas(self) -> list[psutil.Process]:
        """The processes of replicas, on all nodes."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # also one that Ray has not buried yet
                if process.cmdline()[0].startswith("ray::ServeReplica"):
                    found.append(process)
        return found

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def ray_cluster(num_workers: int) -> Iterator[RayCluster]:
    # Not pytest's folder: a socket's path has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    try:
        cluster = RayCluster(folder, num_workers)
        try:
            yield cluster
        finally:
            left = cluster.processes()
            cluster.end(0)  # the end of its standard input
            _, alive = psutil.wait_procs(left, timeout=PATIENCE)
            for process in alive:
                process.kill()
        assert not alive, alive
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class RayServer(Child):
    """`minifer serve --ray OPTIONS` with minifer-tiny, in a cluster or with a Ray of its own."""

    def __init__(self, environment: dict[str, str], folder: Path, *options: str) -> None:
        command = ["-m", "minifer", "serve", "--ray", "--model", "minifer-tiny", "--port", "0"]
        command += ["--num-kv-blocks", "256", *options]
        super().__init__(command, environment, folder / "server.log")
        try:
            found = re.search(r" at (http://\S+)$", self.line(0).rstrip())
            assert found is not None, self.said
        except BaseException:
            self.end()
            raise
        self.url = found[1]
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self.http.post(route, json=body)

    def end(self, number: int = signal.SIGTERM) -> int:
        if hasattr(self, "http"):
            self.http.close()
            self.openai.close()
        return super().end(number)

    def metric(self, name: str) -> float:
        """Sum over all replicas."""
        page = self.http.get("/metrics").text
        values = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", page, re.MULTILINE)
        return sum(map(float, values))

    def wait_until_idle(self) -> None:
        until(lambda: self.metric("minifer:num_requests_running") == 0, PATIENCE)
        until(lambda: self.metric("minifer:num_requests_waiting") == 0, PATIENCE)

    def num_running(self) -> int:
        """Replicas that Ray says are running."""
        return self.http.get("/replicas").json()["replicas"].get("RUNNING", 0)


@contextmanager
def ray_server(cluster: RayCluster, *options: str) -> Iterator[RayServer]:
    address = ("--ray-address", cluster.address)
    server = RayServer(cluster.environment, cluster.folder, *address, *options)
    try:
        yield server
    finally:
        server.end()


def wait_for(holds: Any, seconds: float = PATIENCE) -> None:
    """As `until`, without asking too often: each question goes through Ray."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.2)


class Asking(threading.Thread):
    """Asks one request after the other until it is told to stop, and says what came of each.

    outcomes: "right", the code of an error, or what should not be. Every second request of a
    thread is a stream.
    """

    BODY: ClassVar[dict[str, Any]] = {"prompt": "The for statement", "temperature": 0}

    def __init__(self, served: RayServer, expected: str, max_tokens: int) -> None:
        super().__init__()
        self.outcomes: list[str] = []
        self.stop = threading.Event()
        self._served, self._expected = served, expected
        self._body = {**self.BODY, "max_tokens": max_tokens}
        self.start()

    def run(self) -> None:
        while not self.stop.is_set():
            self.outcomes.append(self._ask(stream=len(self.outcomes) % 2 == 1))

    def _ask(self, stream: bool) -> str:
        completions = self._served.openai.completions
        try:
            if stream:
                chunks = completions.create(model="minifer-tiny", stream=True, **self._body)
                text = "".join(chunk.choices[0].text for chunk in chunks)
            else:
                text = completions.create(model="minifer-tiny", **self._body).choices[0].text
        except openai.APIError as error:
            return error.code or repr(error)
        return "right" if text == self._expected else f"wrong: {text}"


@contextmanager
def all_asking(
    served: RayServer, number: int, expected: str, max_tokens: int
) -> Iterator[list[Asking]]:
    """So many threads that ask; afterwards each has ended, and had its last answer."""
    threads = [Asking(served, expected, max_tokens) for _ in range(number)]
    try:
        yield threads
    finally:
        for thread in threads:
            thread.stop.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
