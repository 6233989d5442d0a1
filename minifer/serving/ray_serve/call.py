"""One HTTP request on its way through Ray, and the ASGI application at the other end.

::

    front door ── Call ──▶ DeploymentHandle ──▶ EngineReplica ── run_app ──▶ create_app
               ◀── Chosen, then ASGI messages, each an item of Ray's stream ────┘

The replica's application is the one that `minifer serve` runs: whatever it answers, refusals and
streams included, passes through as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message

from minifer.routing.policy import Decision, RoutingRequest

log = logging.getLogger("minifer.serving.ray")

ABORT = "/-/abort"  # a path to a replica from its front door: end all open requests


@dataclass
class Call:
    """What the front door sends; `decision` and what follows are between it and the request router.

    path: as it came, with quoted characters. headers: as ASGI has them, names in lower case. body:
    JSON, or nothing.

    decision: the router's, which travels on to the replica. avoid: replicas that have failed on
    this request or refused it. only: the one that is meant, whatever a policy would say. replicas:
    all that the router knows. on_first_token, on_left: to be called, in any thread, when an answer
    has begun, and when nothing more is wanted of the replica. (Ray tells the router of the end,
    too, but late: a client's next request would find its last one counted.)
    """

    request: RoutingRequest
    method: str = "GET"
    path: str = "/"
    query: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    decision: Decision | None = None
    avoid: tuple[str, ...] = ()
    only: str | None = None
    replicas: tuple[str, ...] = ()
    on_first_token: Callable[[], object] | None = None
    on_left: Callable[[], object] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What travels; the router and what it alone reads stay in the front door's process."""
        request = replace(self.request, prefix_keys=())
        own = {"replicas": (), "on_first_token": None, "on_left": None}
        return {**vars(self), "request": request, **own}


async def run_app(app: ASGIApp, call: Call) -> AsyncGenerator[Message, None]:
    """The ASGI messages with which an application answers a call.

    Closing or cancelling the generator is a client that goes away: the application is cancelled,
    and has ended when this returns. Raises what the application raises before its answer is
    complete; what it raises afterwards is logged.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    pending = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def receive() -> Message:
        if pending:
            return pending.pop()
        await asyncio.Event().wait()  # the client stays: when it leaves, all this is cancelled
        raise AssertionError("nothing sets this event")

    async def run() -> None:
        try:
            await app(_scope(call), receive, messages.put)
        finally:
            messages.put_nowait(None)

    task = asyncio.create_task(run())
    complete = False
    try:
        while (message := await messages.get()) is not None:
            complete = message["type"] == "http.response.body" and not message.get("more_body")
            yield message
        try:
            await task
        except Exception:
            if not complete:
                raise
            log.exception("%s %s failed", call.method, call.path)
        if not complete:
            raise RuntimeError("the application ended before its answer did")
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def _scope(call: Call) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": unquote(call.path),
        "raw_path": call.path.encode(),
        "query_string": call.query,
        "root_path": "",
        "headers": call.headers,
        "client": None,
        "server": None,
    }
