"""`GET /kv_events?replica=NAME`: which prefixes the engine holds, for a router.

Each subscription begins with all of it, as batch 1, and goes on with what changes: server-sent
events of one encoded batch each (`minifer/routing/kv_events.py`), and events named `load` that say
how full the cache is. The engine has one watcher, so there is one subscription: a new one ends the
one before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from minifer.engine import Engine
from minifer.routing.kv_events import encode
from minifer.routing.publisher import KVEventPublisher
from minifer.serving.errors import APIError
from minifer.serving.streaming import EventStream, unless_gone

if TYPE_CHECKING:
    from minifer.serving.app import Server

PERIOD = 0.05  # seconds that a change may wait for others, to travel with them
SIGN_OF_LIFE = 1.0  # seconds between two batches, the empty ones too


class KVSubscription:
    """One router that follows this engine."""

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.publisher: KVEventPublisher | None = None
        self.ended = False

    def attach(self, engine: Engine) -> None:
        """On the engine's thread."""
        self.publisher = KVEventPublisher(engine.kv, self.replica)

    def detach(self, _: Engine) -> None:
        if self.publisher is not None:
            self.publisher.close()


async def kv_events(server: Server, request: Request) -> Response:
    """The route."""
    name = request.query_params.get("replica", "")
    if not name:
        raise APIError(400, "replica is missing: /kv_events?replica=NAME", param="replica")
    subscription = KVSubscription(name)
    before, server.kv_subscription = server.kv_subscription, subscription
    if before is not None:
        before.ended = True
    response = EventStream(_stream(server, subscription))
    response.resources.callback(_leave, server, subscription)
    try:
        await unless_gone(request.receive, server.llm.call(subscription.attach))
    except BaseException:
        response.resources.close()
        raise
    return response


def _leave(server: Server, subscription: KVSubscription) -> None:
    """Stop watching, unless another subscription has taken over."""
    if server.kv_subscription is subscription:
        server.kv_subscription = None
        server.llm.post(subscription.detach)


async def _stream(server: Server, subscription: KVSubscription) -> AsyncGenerator[bytes, None]:
    publisher = subscription.publisher
    assert publisher is not None  # the response is sent after `attach`
    quiet = SIGN_OF_LIFE
    while not subscription.ended:
        if publisher.num_pending or quiet >= SIGN_OF_LIFE:
            quiet = 0.0
            yield f"data: {encode(publisher.take())}\n\n".encode() + _load(server)
        await asyncio.sleep(PERIOD)
        quiet += PERIOD


def _load(server: Server) -> bytes:
    return f'event: load\ndata: {{"kv_usage":{server.llm.engine.kv.usage:.4f}}}\n\n'.encode()
