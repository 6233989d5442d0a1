"""Replicas made of scripts: each request gets the next line of its replica's script."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx

from minifer.config import EngineConfig
from minifer.serving.front.routes import create_front_app
from minifer.serving.replicas.front import FleetFront
from minifer.serving.replicas.replica import Replica
from minifer.serving.replicas.run import open_deployment
from minifer.serving.replicas.settings import ReplicaSettings
from minifer.serving.settings import ServerSettings

T = TypeVar("T")
SSE = {"content-type": "text/event-stream; charset=utf-8"}
JSON = {"content-type": "application/json"}


def event(data: Any) -> bytes:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def opening(index: int = 0, name: str = "chatcmpl-x") -> bytes:
    delta = {"role": "assistant", "content": ""}
    return event({"id": name, "choices": [{"index": index, "delta": delta, "finish_reason": None}]})


def token(text: str, name: str = "chatcmpl-x") -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return event({"id": name, "choices": [choice]})


class Body(httpx.AsyncByteStream):
    """Chunks; an exception among them is raised, a function awaited. closed: by whoever reads."""

    def __init__(self, *chunks: Any) -> None:
        self.chunks = chunks
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            if isinstance(chunk, Exception):
                raise chunk
            if callable(chunk):
                await chunk()
                continue
            yield chunk

    async def aclose(self) -> None:
        self.closed = True


def gone() -> httpx.ReadError:
    """What a killed process leaves of a connection."""
    return httpx.ReadError("connection reset by peer")


def answer(text: str = "hello", status: int = 200, cached: int = 0) -> httpx.Response:
    usage = {"prompt_tokens_details": {"cached_tokens": cached}}
    body = {"choices": [{"text": text}], "usage": usage}
    return httpx.Response(status, headers=JSON, stream=Body(json.dumps(body).encode()))


def refusal(status: int, code: str, **headers: str) -> httpx.Response:
    error = {"message": f"{code}!", "type": "x", "param": None, "code": code}
    content = json.dumps({"error": error}).encode()
    return httpx.Response(status, headers={**JSON, **headers}, stream=Body(content))


def stream(*chunks: Any) -> httpx.Response:
    return httpx.Response(200, headers=SSE, stream=Body(*chunks))


class FakeProcess:
    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self.pid = pid
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.num_stops = 0

    @property
    def status(self) -> int | None:
        return self.ended.result() if self.ended.done() else None

    def end(self, status: int) -> None:
        if not self.ended.done():
            self.ended.set_result(status)

    async def wait(self) -> int:
        return await asyncio.shield(self.ended)

    async def stop(self, patience: float) -> None:
        self.num_stops += 1
        self.end(0)

    def cut_short(self) -> None:
        self.end(0)

    async def kill(self) -> None:
        self.end(-9)


class Fakes(httpx.AsyncBaseTransport):
    """All replicas of one test, and the network to them.

    scripts: replica → what it answers next to POSTs, a response or an exception, or a function that
    makes one; `answer(name)` when there is nothing left. log: (replica, path) of each POST.
    feeds: replica → the queue of what its `/kv_events` sends; without one it answers 404.
    """

    def __init__(self) -> None:
        self.scripts: dict[str, deque[Any]] = {}
        self.log: list[tuple[str, str]] = []
        self.bodies: list[bytes] = []
        self.processes: dict[str, list[FakeProcess]] = {}
        self.feeds: dict[str, asyncio.Queue[bytes]] = {}
        self.sick: set[str] = set()  # answer no health check
        self.start_errors: dict[str, list[Exception | None]] = {}
        self.pages: dict[str, str] = {}  # replica and path → what a GET brings
        self.paths: list[str] = []  # of GETs
        self.keys: list[str] = []
        self.streams: dict[str, Body] = {}  # replica → what its `/events` sends
        self.unreachable: set[str] = set()  # but for health checks
        self.may_start = asyncio.Event()
        self.may_start.set()

    def script(self, name: str, *lines: Any) -> None:
        self.scripts.setdefault(name, deque()).extend(lines)

    async def start(self, replica: Replica) -> FakeProcess:
        errors = self.start_errors.get(replica.name)
        error = errors.pop(0) if errors else None
        if error is not None:
            raise error
        await self.may_start.wait()
        pids = sum(map(len, self.processes.values()))
        process = FakeProcess(f"http://{replica.name}", 1000 + pids)
        self.processes.setdefault(replica.name, []).append(process)
        return process

    def process(self, name: str) -> FakeProcess:
        return self.processes[name][-1]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        name, path = request.url.host, request.url.path
        if self.process(name).status is not None:
            raise httpx.ConnectError("refused")
        if path == "/health":
            if name in self.sick:
                raise httpx.ReadTimeout("no answer")
            return httpx.Response(200, json={"status": "ok"})
        if path == "/kv_events":
            return self._feed(name)
        if name in self.unreachable:
            raise httpx.ConnectError("refused")
        if path == "/events":
            return httpx.Response(200, headers=SSE, stream=self.streams[name])
        if request.method == "GET":
            self.paths.append(request.url.raw_path.decode())
            page = f"page of {name}"
            if path == "/metrics":
                page = f'# TYPE x counter\nx_total{{model="m"}} {len(self.log)}\n'
            return httpx.Response(200, text=self.pages.get(name + path, page))
        self.keys.append(request.headers["authorization"])
        self.log.append((name, path))
        self.bodies.append(await request.aread())
        script = self.scripts.get(name)
        line = script.popleft() if script else answer(name)
        if callable(line):
            line = await line()
        if isinstance(line, Exception):
            raise line
        return line

    def _feed(self, name: str) -> httpx.Response:
        if name not in self.feeds:
            return httpx.Response(404)
        queue = self.feeds[name]

        async def chunks() -> AsyncIterator[bytes]:
            while True:
                yield await queue.get()

        return httpx.Response(200, headers=SSE, content=chunks())

    @property
    def asked(self) -> list[str]:
        """Replicas in the order in which they were sent requests."""
        return [name for name, _ in self.log]


class Fleeting:
    """A deployment of fakes and a client in front of it."""

    def __init__(self, fakes: Fakes, server: FleetFront) -> None:
        self.fakes = fakes
        self.server = server
        self.app = create_front_app(server)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, raise_app_exceptions=False),
            base_url="http://router",
        )

    async def complete(self, prompt: Any = "a", **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": prompt, **fields})

    async def chat(self, content: str = "hi", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    def count(self, name: str, **labels: str) -> float:
        return self.server.fleet.metrics.value(name, **labels)


@asynccontextmanager
async def fleet(
    count: int = 2,
    fakes: Fakes | None = None,
    server: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Fleeting]:
    """`count` fakes, called a, b, c …, behind a real router. settings: of the replicas."""
    fakes = fakes if fakes is not None else Fakes()
    replicas = [Replica(name) for name in "abcdefgh"[:count]]
    given = {"router": "round_robin", "health_interval": 0.01, "wait_timeout": 5.0, **settings}
    async with open_deployment(
        replicas,
        EngineConfig(model="minifer-tiny"),
        ServerSettings(**(server or {})),
        ReplicaSettings(**given),
        start=fakes.start,
        transport=fakes,
    ) as opened:
        fleeting = Fleeting(fakes, opened)
        try:
            yield fleeting
        finally:
            await fleeting.http.aclose()
            assert opened.open_requests.count == 0
            assert [r.num_open for r in opened.supervisor.replicas] == [0] * count
            states = opened.fleet.router.tracker.replicas()
            assert [s.num_requests for s in states] == [0] * count
            assert [s.prefill_tokens for s in states] == [0] * count


async def until(holds: Callable[[], Any], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.002)


def run(main: Coroutine[Any, Any, T]) -> T:
    """A test, which must leave no task behind."""

    async def checked() -> T:
        async with asyncio.timeout(60):
            result = await main
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left
        return result

    return asyncio.run(checked())
