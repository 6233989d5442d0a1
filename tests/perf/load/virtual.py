"""A clock that jumps, and an OpenAI server of which every answer's timing is known.

Times are multiples of 1/8 s: sums of them are exact.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import httpx


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time stands still while code runs and jumps to the next timer when all of it waits."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None) -> Any:
            assert timeout is not None, "everything waits, and for nothing"
            self.now += timeout
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


def run_virtually(main: Any) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


Step = tuple[float, bytes | None]  # seconds to wait, then bytes to send; None: cut the connection


class FakeServer(httpx.AsyncBaseTransport):
    """Answers POSTs with what `script(body, number)` yields; remembers bodies and load.

    A script yields `Step`s, or an `httpx.Response`.
    """

    def __init__(self, script: Callable[[dict[str, Any], int], Iterable[Step]]) -> None:
        self.script = script
        self.bodies: list[dict[str, Any]] = []
        self.arrived: list[float] = []
        self.headers: list[httpx.Headers] = []
        self.paths: list[str] = []
        self.in_flight = self.most_in_flight = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.paths.append(request.url.path)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "toy"}]})
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": [5, 7, 5, 11], "count": 4})
        self.bodies.append(json.loads(await request.aread()))
        self.headers.append(request.headers)
        self.arrived.append(asyncio.get_running_loop().time())
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        steps = self.script(self.bodies[-1], len(self.bodies) - 1)
        if isinstance(steps, httpx.Response):
            self.in_flight -= 1
            return steps
        return httpx.Response(200, stream=_Stream(self, steps))


class _Stream(httpx.AsyncByteStream):
    def __init__(self, server: FakeServer, steps: Iterable[Step]) -> None:
        self.server, self.steps = server, steps

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for delay, data in self.steps:
            await asyncio.sleep(delay)
            if data is None:
                raise httpx.ReadError("cut")
            yield data

    async def aclose(self) -> None:
        self.server.in_flight -= 1


def event(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload, ensure_ascii=False).encode() + b"\n\n"


def text(piece: str, finish: str | None = None) -> bytes:
    """A chunk of /v1/completions."""
    return event({"choices": [{"index": 0, "text": piece, "finish_reason": finish}]})


def delta(finish: str | None = None, **fields: Any) -> bytes:
    """A chunk of /v1/chat/completions."""
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})


def usage(prompt: int, output: int, cached: int | None = None) -> bytes:
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": output}
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return event({"choices": [], "usage": counts})


DONE = b"data: [DONE]\n\n"


def answer(first: float, gaps: Iterable[float], prompt: int = 4, cached: int | None = 0):
    """One token a chunk: the first after `first` seconds, each next after a gap."""
    delays = [first, *gaps]
    last = len(delays) - 1
    for i, delay in enumerate(delays):
        yield delay, text("x", "length" if i == last else None)
    yield 0, usage(prompt, len(delays), cached) + DONE
