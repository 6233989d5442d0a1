"""A real server for tests: uvicorn on a free port, in a thread, with an engine to look into."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import uvicorn
from fakes import check_engine

from minifer.async_llm import AsyncLLM
from minifer.serving.app import Server, create_app
from minifer.serving.disaggregation.worker import KVWorker
from minifer.serving.run import GracefulServer, bind, url_of
from minifer.serving.settings import ServerSettings


class Live:
    """One running server. `settings` as in `ServerSettings`; the engine runs minifer-tiny."""

    def __init__(self, llm: AsyncLLM, worker: KVWorker | None = None, **settings: Any) -> None:
        self.llm = llm
        self.settings = ServerSettings(**settings)
        app = create_app(llm, self.settings, worker)
        self.server: Server = app.state.server
        self._listener = bind("127.0.0.1", 0)
        config = uvicorn.Config(app, lifespan="on", log_config=None, ws="none")
        config.timeout_graceful_shutdown = 2
        self.uvicorn = GracefulServer(config, self.server)
        self._listener.listen(64)
        self.url = url_of(self._listener)
        serve = self.uvicorn.serve(sockets=[self._listener])
        self.thread = threading.Thread(target=asyncio.run, args=(serve,))
        self.thread.start()
        key = self.settings.api_key or "none"
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)
        headers = {"Authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self.http.post(route, json=body)

    def complete(self, prompt: Any = "The for statement", **fields: Any) -> dict[str, Any]:
        """The answer of /v1/completions, which must be a 200; greedy unless said otherwise."""
        response = self.post("/v1/completions", **{"temperature": 0, "prompt": prompt, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def chat(self, content: Any = "hi", **fields: Any) -> dict[str, Any]:
        body = {"temperature": 0, "max_tokens": 8, "messages": user(content), **fields}
        response = self.post("/v1/chat/completions", **body)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, route: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream that must end with [DONE]."""
        with self.http.stream("POST", route, json={**body, "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def refusal(self, route: str = "/v1/completions", status: int = 400, **body: Any) -> Any:
        """The error of a request that must be refused, in OpenAI's envelope."""
        response = self.post(route, **body)
        assert response.status_code == status, response.text
        envelope = response.json()
        assert envelope.keys() == {"error"}
        assert envelope["error"].keys() == {"message", "type", "param", "code"}
        return envelope["error"]

    def connect(self, route: str, *, buffer: int = 0, **body: Any) -> socket.socket:
        """A request on a bare socket, for clients that behave badly.

        buffer: bytes that may wait there unread, about; 0: as the system has it.
        """
        text = json.dumps(body).encode()
        host, port = self._listener_address
        head = f"POST {route} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        connection = socket.socket()
        if buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.connect((host, port))
        connection.sendall(head.encode() + f"Content-Length: {len(text)}\r\n\r\n".encode() + text)
        return connection

    @property
    def _listener_address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def wait_until_idle(self) -> None:
        """Nobody is served any more: no request, no block in use, all invariants hold."""
        engine = self.llm.engine
        until(lambda: self.server.open_requests.count == 0)
        until(lambda: not engine.has_unfinished_requests and not engine._working)
        assert engine.kv.pool.num_free == engine.kv.pool.num_blocks
        check_engine(engine)

    def close(self) -> None:
        self.http.close()
        self.openai.close()
        self.uvicorn.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.llm.close()


@contextmanager
def live(
    engine: dict[str, Any] | None = None, model: str = "minifer-tiny", **settings: Any
) -> Iterator[Live]:
    """A server of its own. engine: `EngineConfig` options."""
    options = {"num_kv_blocks": 256, **(engine or {})}
    server = Live(AsyncLLM(model, **options), **settings)
    try:
        yield server
    finally:
        server.close()


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def until(holds: Any, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.005)
