"""The end of a server: what is running is finished or told, and nothing is left behind."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from live import Live, live, until

import minifer.serving.run as serving_run
from minifer.cli import main
from minifer.serving.run import bind, is_public, listen, url_of
from minifer.serving.settings import ServerSettings

LONG = {"prompt": "a", "max_tokens": 900, "ignore_eos": True}


class Asking(threading.Thread):
    """One request on its own thread."""

    def __init__(self, server: Live, **body) -> None:
        super().__init__()
        self._server, self._body = server, body
        self.start()

    def run(self) -> None:
        self.response = self._server.post("/v1/completions", **self._body)


def test_the_first_signal_lets_open_requests_finish():
    with live() as server:
        asking = Asking(server, prompt="a", max_tokens=60, ignore_eos=True)
        until(lambda: server.llm.engine.scheduler.running)
        server.uvicorn.should_exit = True
        until(lambda: server.server.open_requests.draining)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
        asking.join(30)
        assert asking.response.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_after_the_timeout_they_end_with_abort(stream: bool):
    with live(shutdown_timeout=0.1) as server:
        asking = Asking(server, **LONG, stream=stream)
        until(lambda: server.llm.engine.scheduler.running)
        server.uvicorn.should_exit = True
        asking.join(30)
        text = asking.response.text
        if stream:
            *_, last, done, _ = text.split("\n\n")
            assert done == "data: [DONE]"
            answer = json.loads(last.removeprefix("data: "))
        else:
            answer = asking.response.json()
        assert answer["choices"][0]["finish_reason"] == "abort"
        server.thread.join(30)
        server.wait_until_idle()


def test_while_it_ends_a_kept_connection_gets_a_503():
    with live() as server:
        asking = Asking(server, **{**LONG, "max_tokens": 200})
        until(lambda: server.llm.engine.scheduler.running)
        connection = server.connect("/tokenize", prompt="a")
        connection.recv(4096)
        server.server.open_requests.draining = True
        refused = server.refusal(status=503, prompt="a")
        assert refused["code"] == "shutting_down"
        connection.close()
        asking.join(30)


def test_a_watcher_of_events_does_not_hold_up_the_end():
    with live() as server:
        connection = socket.create_connection(server._listener_address)
        connection.sendall(b"GET /events?request_id=x HTTP/1.1\r\nHost: x\r\n\r\n")
        until(lambda: server.server.hub.subscribers)
        server.uvicorn.should_exit = True
        server.thread.join(10)
        assert not server.thread.is_alive()
        connection.close()


def test_clients_that_do_not_write_or_read_do_not_hold_up_the_end(caplog, monkeypatch):
    """Half a body gets a 503; a stream nobody reads is cut; there is no traceback."""
    monkeypatch.setattr(serving_run, "CLOSING_SECONDS", 0.3)
    with live() as server:
        half = socket.create_connection(server._listener_address)
        head = "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        half.sendall(f"{head}Content-Length: 500\r\n\r\n{{".encode())
        until(lambda: server.server.open_requests.count == 1)
        server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        deaf = server.connect("/v1/completions", buffer=4096, **LONG, stream=True, logprobs=20)
        until(lambda: server.llm.engine.scheduler.running)
        until(lambda: not server.llm.engine.has_unfinished_requests)
        assert server.server.open_requests.count == 2  # it is made, not sent
        monkeypatch.setattr(server.server, "settings", ServerSettings(shutdown_timeout=0.3))
        server.uvicorn.should_exit = True
        assert b" 503 " in half.recv(4096)
        server.thread.join(20)
        assert not server.thread.is_alive()
        server.wait_until_idle()
        deaf.close()
    assert not caplog.records


@contextmanager
def process(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`minifer serve` and its address."""
    command = [sys.executable, "-u", "-m", "minifer", "serve", "--model", "minifer-tiny"]
    child = subprocess.Popen(
        [*command, "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None and child.stderr is not None
        first = child.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", first)
        assert found, first + child.stderr.read()
        yield child, found[0]
    finally:
        child.kill()
        child.wait()


SIGINT = pytest.param(signal.SIGINT, marks=pytest.mark.slow)


@pytest.mark.parametrize("number", [signal.SIGTERM, SIGINT])
def test_a_signal_ends_the_process_with_status_0(number: signal.Signals, tmp_path: Path):
    """A stream that is open then is finished; the disk tier is written; nothing on stderr."""
    disk = tmp_path / "kv"
    with process("--kv-disk-path", str(disk)) as (child, url):
        body = {**LONG, "prompt": "a" * 64, "max_tokens": 40, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            child.send_signal(number)
            rest = list(lines)
        assert rest[-2] == "data: [DONE]" and '"finish_reason":"length"' in rest[-4]
        assert child.wait(30) == 0
        assert child.stderr is not None and child.stderr.read() == ""
    assert list(disk.rglob("*.safetensors"))
    assert not list(disk.rglob("*.tmp*"))


@pytest.mark.slow
def test_a_second_signal_does_not_wait():
    with process("--shutdown-timeout", "600") as (child, url):
        body = {**LONG, "max_tokens": 1000, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)
            time.sleep(0.4)
            child.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-2] == "data: [DONE]"
        assert '"finish_reason":"abort"' in rest[-4] or '"finish_reason":"length"' in rest[-4]
        assert child.wait(20) == 0


# -- the command


def test_a_port_in_use_is_one_sentence(capsys):
    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        port = str(listener.getsockname()[1])
        assert main(["serve", "--model", "minifer-tiny", "--port", port]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "in use" in error and "--port" in error


def test_a_port_taken_while_the_model_loads_is_one_sentence():
    with bind("127.0.0.1", 0) as slow, bind("127.0.0.1", slow.getsockname()[1]) as quick:
        listen(quick)
        with pytest.raises(RuntimeError, match=r"in use.*--port"):
            listen(slow)


BAD_USAGE = [
    ["--port", "70000"],
    ["--port", "x"],
    ["--max-queue", "0"],
    ["--max-num-seqs", "0"],
    ["--temperature", "1"],
    ["--model", "no/such/model"],
    ["--api-key", ""],
]


@pytest.mark.parametrize("options", BAD_USAGE)
def test_bad_usage_is_2_and_one_sentence(options: list[str], capsys, monkeypatch):
    monkeypatch.setattr(serving_run, "run", lambda *_: pytest.fail("it must not come to this"))
    assert main(["serve", "--port", "0", *options]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_host_that_does_not_exist_is_one_sentence(capsys):
    assert main(["serve", "--host", "no.such.host.invalid", "--port", "0"]) == 1
    assert "no.such.host.invalid" in capsys.readouterr().err


def test_a_missing_extra_is_named(capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("minifer.serving")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", "--model", "minifer-tiny", "--port", "0"]) == 1
    assert 'pip install "minifer[server]"' in capsys.readouterr().err


PUBLIC = {"0.0.0.0": True, "::": True, "10.0.0.5": True, "example.org": True}
LOCAL = {"127.0.0.1": False, "::1": False, "localhost": False, "127.8.8.8": False}


@pytest.mark.parametrize(("host", "expected"), (PUBLIC | LOCAL).items())
def test_public_hosts_are_known(host: str, expected: bool):
    assert is_public(host) is expected


def test_a_public_host_without_a_key_is_warned_about(capsys, monkeypatch):
    monkeypatch.setattr(serving_run, "run", lambda *_: None)
    command = ["serve", "--model", "minifer-tiny", "--port", "0", "--host", "0.0.0.0"]
    assert main(command) == 0
    assert "no API key" in capsys.readouterr().err
    monkeypatch.setenv("MINIFER_API_KEY", "sk-secret")
    assert main(command) == 0
    said = capsys.readouterr()
    assert said.err == "" and "sk-secret" not in said.out and "Authorization" in said.out


def test_the_default_model_is_called_by_its_name(capsys, monkeypatch):
    seen: list[ServerSettings] = []
    monkeypatch.setattr(serving_run, "run", lambda _, settings, *__: seen.append(settings))
    assert main(["serve", "--model", "minifer-tiny", "--port", "0", "--max-queue", "7"]) == 0
    assert seen[0].served_model_name == "minifer-tiny" and seen[0].max_queue == 7
    assert main(["serve", "--model", "tiny", "--port", "0", "--served-model-name", "x"]) == 0
    assert seen[1].served_model_name == "x"
    assert "http://127.0.0.1:" in capsys.readouterr().out


def test_an_ipv6_address_is_written_with_brackets():
    try:
        listener = bind("::1", 0)
    except RuntimeError:
        pytest.skip("no IPv6 here")
    with listener:
        assert re.fullmatch(r"http://\[::1\]:\d+", url_of(listener))
