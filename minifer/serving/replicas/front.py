"""The way to replicas on this machine: each is a server of its own, and is spoken to over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from minifer.routing.policy import RoutingRequest
from minifer.serving.errors import APIError
from minifer.serving.front.errand import said_again
from minifer.serving.front.forward import answer_of
from minifer.serving.front.prompt import PromptReader
from minifer.serving.front.routes import Front
from minifer.serving.replicas.fleet import Fleet, FleetErrand
from minifer.serving.replicas.metrics import is_exact
from minifer.serving.replicas.replica import Replica
from minifer.serving.replicas.watching import Watchers
from minifer.serving.settings import ServerSettings

ASK_SECONDS = 35.0  # for an answer that needs no generation, or one token


class FleetFront(Front):
    """Before the replicas of a fleet."""

    def __init__(self, fleet: Fleet, reader: PromptReader, settings: ServerSettings) -> None:
        super().__init__(reader, settings, fleet.metrics, len(fleet.supervisor.replicas))
        self.fleet = fleet
        self.supervisor = fleet.supervisor
        self.watchers = Watchers(fleet.supervisor, fleet.http, fleet.headers)

    async def generate(self, path: str, body: bytes, asked: RoutingRequest) -> Response:
        return await answer_of(FleetErrand(self.fleet, path, body, asked))

    async def ask(self, path: str, body: bytes | None = None) -> Response:
        """Of those that are healthy, the one that has the least to do; else the next."""
        for replica in sorted(self.supervisor.available, key=lambda r: r.num_open):
            try:
                answer = await self._ask(replica, path, body)
            except httpx.TransportError:
                self.supervisor.suspect(replica)
                continue
            if answer.status_code != 503:
                return said_again(answer, answer.content)
        raise APIError(
            503, "no replica is there to answer", code="no_replica", headers={"Retry-After": "5"}
        )

    async def ask_all(self, path: str) -> dict[str, Response | APIError]:
        replicas = self._healthy()
        asking = (self._ask(replica, path) for replica in replicas)
        answers = await asyncio.gather(*asking, return_exceptions=True)
        return {
            replica.name: said_again(answer, answer.content)
            if isinstance(answer, httpx.Response)
            else APIError(502, type(answer).__name__, code="replica_lost")
            for replica, answer in zip(replicas, answers, strict=True)
        }

    async def _ask(self, replica: Replica, path: str, body: bytes | None = None) -> httpx.Response:
        """Raises `httpx.TransportError`."""
        headers = self.fleet.headers
        if body is not None:
            headers["Content-Type"] = "application/json"
        return await self.fleet.http.request(
            "GET" if body is None else "POST",
            replica.url + path,
            content=body,
            headers=headers,
            timeout=ASK_SECONDS,
        )

    def _healthy(self) -> list[Replica]:
        if not self.supervisor.available:
            raise APIError(503, "no replica is healthy", code="no_replica")
        return self.supervisor.available

    async def health(self) -> Response:
        """What the supervisor knows: no replica is asked."""
        self._healthy()
        return JSONResponse({"status": "ok"})

    async def states(self) -> dict[str, Any]:
        router = self.fleet.router
        return {
            "replicas": [
                {**replica.to_dict(), "kv_is_exact": is_exact(router, replica.name)}
                for replica in self.supervisor.replicas
            ]
        }

    async def events(self, request: Request) -> Response:
        return await self.watchers.watch(request, self.settings.max_subscribers)

    # -- the end

    @property
    def num_watchers(self) -> int:
        return self.watchers.count

    def close_watchers(self) -> None:
        self.watchers.close()

    def abort_all(self) -> None:
        self.supervisor.cut_short()
