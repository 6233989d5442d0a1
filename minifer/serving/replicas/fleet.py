"""The replicas of one deployment on this machine, and a request's way through them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
from starlette.responses import Response

from minifer.routing.policy import Decision, Role, RoutingRequest
from minifer.routing.router import Router
from minifer.routing.tracker import Assignment
from minifer.serving.errors import APIError
from minifer.serving.front.errand import (
    ELSEWHERE,
    Chosen,
    Errand,
    LostError,
    as_error,
    expected_tokens,
)
from minifer.serving.replicas.metrics import RouterMetrics
from minifer.serving.replicas.replica import Replica
from minifer.serving.replicas.settings import ReplicaSettings
from minifer.serving.replicas.supervisor import Supervisor

_ANSWERING = (Role.MIXED, Role.DECODE)  # who may be sent a request
_NEVER_RAN = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)

Before = Callable[["FleetErrand"], Awaitable[Mapping[str, str]]]


@dataclass
class Fleet:
    """What is needed to send requests to the replicas.

    key: the replicas' API key. before: called before a replica is asked; headers to send along (a
    deployment may have something done elsewhere first).
    """

    supervisor: Supervisor
    router: Router
    http: httpx.AsyncClient
    settings: ReplicaSettings
    metrics: RouterMetrics
    key: str
    before: Before | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Of every request to a replica."""
        return {"Authorization": f"Bearer {self.key}", "Accept-Encoding": "identity"}


class FleetErrand(Errand):
    """path, body: of the POST. decision: the router's, of the replica that is asked."""

    upstream: httpx.Response | None

    def __init__(self, fleet: Fleet, path: str, body: bytes, asked: RoutingRequest) -> None:
        super().__init__(fleet.metrics, fleet.settings.max_lost)
        self.fleet = fleet
        self.path = path
        self.body = body
        self.asked = asked
        self.decision: Decision | None = None
        self._replica: Replica | None = None
        self._assignment: Assignment | None = None
        self._tried: set[tuple[str, int]] = set()
        self._refusal: Response | None = None
        self._at = ExitStack()  # what is counted at the replica

    async def ask(self) -> httpx.Response:
        while True:
            replica, chosen = await self._choose()
            try:
                self.upstream = await self._send(replica, chosen)
            except LostError as error:
                await self.lost(error)
                continue
            if self.upstream.status_code not in ELSEWHERE:
                return self.upstream
            await self._refused(replica, self.upstream)

    # -- which replica

    async def _choose(self) -> tuple[Replica, Chosen]:
        """Take a replica that has not been asked, waiting a while for one that is coming."""
        fleet = self.fleet
        candidates = self._candidates()
        if not candidates and self._refusal is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(fleet.settings.wait_timeout):
                    await fleet.supervisor.until(
                        lambda: bool(self._candidates()) or not self._is_one_coming()
                    )
            candidates = self._candidates()
        if not candidates:
            raise self._no_replica()
        names = {replica.name: replica for replica in candidates}
        others = [state.name for state in fleet.router.tracker.replicas()]
        exclude = {name for name in others if name not in names}
        self.decision = decision = fleet.router.decide(self.asked, exclude=exclude)
        self._replica = replica = names[decision.replica]
        expected = expected_tokens(self.asked, decision.cached_tokens)
        self.chosen = chosen = Chosen(replica.name, decision.reason, expected)
        self._tried.add(replica.incarnation)
        self._assignment = fleet.router.send(self.asked, decision)
        self._at.enter_context(replica.serving())
        self._at.callback(fleet.router.tracker.finished, self._assignment)
        self._at.callback(fleet.supervisor.notify)
        return replica, chosen

    def _candidates(self) -> list[Replica]:
        return [
            replica
            for replica in self.fleet.supervisor.available
            if replica.role in _ANSWERING and replica.incarnation not in self._tried
        ]

    def _is_one_coming(self) -> bool:
        replicas = self.fleet.supervisor.replicas
        return any(replica.role in _ANSWERING and replica.is_coming for replica in replicas)

    def _no_replica(self) -> APIError:
        if self._refusal is not None:
            self.metrics.count("failures", "full")
            return as_error(self._refusal)
        self.metrics.count("failures", "no_replica")
        return APIError(
            503,
            "no replica is there to answer: try again later",
            code="no_replica",
            headers={"Retry-After": "5"},
        )

    # -- asking it

    async def _send(self, replica: Replica, chosen: Chosen) -> httpx.Response:
        """Raises `LostError`."""
        fleet = self.fleet
        self.metrics.count_request(chosen, self.asked.num_tokens)
        headers = {**fleet.headers, "Content-Type": "application/json"}
        if fleet.before is not None:
            headers |= await fleet.before(self)
        try:
            request = fleet.http.build_request(
                "POST", replica.url + self.path, content=self.body, headers=headers
            )
            return await fleet.http.send(request, stream=True)
        except (*_NEVER_RAN, RuntimeError):  # nobody listens there any more
            raise LostError("unreachable") from None
        except httpx.TransportError:
            raise LostError("died", ran=True) from None

    async def _refused(self, replica: Replica, upstream: httpx.Response) -> None:
        """It is full or going down. What a full one says is the answer if nobody else is left."""
        full = upstream.status_code == 429
        self.metrics.count("retries", replica.name, "full" if full else "unavailable")
        if not full:
            self.fleet.supervisor.suspect(replica)
        with contextlib.suppress(httpx.TransportError):
            content = await upstream.aread()
            if full:
                self._refusal = self.response(content)
        await self.close()

    def _gone(self) -> bool:
        """Another one may come as long as `_choose` waits for it."""
        assert self._replica is not None
        self.fleet.supervisor.suspect(self._replica)
        return False

    # -- its answer

    def when_left(self, function: Callable[[], object]) -> None:
        """Have something done when the replica that is asked now is left, however that comes."""
        self._at.callback(function)

    def first_token(self) -> None:
        assert self._assignment is not None
        self.fleet.router.tracker.first_token(self._assignment)

    async def close(self) -> None:
        self._at.close()
        if self.upstream is not None:
            await self.upstream.aclose()
