"""A request on its way through replicas, until one takes it.

::

    choose ─▶ send ─▶ 200, 400, …      what the replica says is the answer
      ▲         ├─▶ 429, 503           it is full, or going down: ask another
      └─────────┴─▶ nothing            it died: ask another
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.responses import Response

from minifer.routing.policy import Decision, Role, RoutingRequest
from minifer.routing.router import Router
from minifer.routing.tracker import Assignment
from minifer.serving.errors import APIError
from minifer.serving.replicas.metrics import RouterMetrics
from minifer.serving.replicas.replica import Replica
from minifer.serving.replicas.settings import ReplicaSettings
from minifer.serving.replicas.supervisor import Supervisor

REPLICA_HEADER = "x-minifer-replica"
REASON_HEADER = "x-minifer-reason"
ANSWERING = (Role.MIXED, Role.DECODE)  # who may be sent a request
ELSEWHERE = (429, 503)  # statuses that another replica may not give
KEPT_HEADERS = ("content-type", "retry-after", "cache-control")  # of an answer that are handed on
_NEVER_RAN = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class LostError(Exception):
    """The replica is gone, and nothing of its answer has been passed on.

    cause: a word for metrics. ran: may the request have been the reason?
    """

    def __init__(self, cause: str, ran: bool = False) -> None:
        super().__init__(cause)
        self.cause = cause
        self.ran = ran


Before = Callable[["Errand"], Awaitable[Mapping[str, str]]]


@dataclass
class Fleet:
    """What is needed to send requests to the replicas of one deployment.

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


class Errand:
    """One request: which replicas were asked, and what the one that is being asked says.

    path, body: of the POST. upstream: the answer whose status and headers have come, after `ask`.
    """

    def __init__(self, fleet: Fleet, path: str, body: bytes, asked: RoutingRequest) -> None:
        self.fleet = fleet
        self.path = path
        self.body = body
        self.asked = asked
        self.replica: Replica | None = None
        self.decision: Decision | None = None
        self.upstream: httpx.Response | None = None
        self._assignment: Assignment | None = None
        self._tried: set[tuple[str, int]] = set()
        self._num_lost = 0
        self._refusal: Response | None = None
        self._at = ExitStack()  # what is counted at the replica

    async def ask(self) -> httpx.Response:
        """Ask one replica after the other until one answers.

        Raises `APIError` when none is left, or too many died over it.
        """
        while True:
            await self._choose()
            try:
                self.upstream = await self._send()
            except LostError as error:
                await self.lost(error)
                continue
            if self.upstream.status_code not in ELSEWHERE:
                return self.upstream
            await self._refused(self.upstream)

    # -- which replica

    async def _choose(self) -> None:
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
        self.replica = replica = names[decision.replica]
        self._tried.add(replica.incarnation)
        fleet.router.index.record(replica.name, self.asked.prefix_keys)
        tracker = fleet.router.tracker
        self._assignment = tracker.sent(self.asked, replica.name, decision.cached_tokens)
        self._at.enter_context(replica.serving())
        self._at.callback(tracker.finished, self._assignment)
        self._at.callback(fleet.supervisor.notify)

    def _candidates(self) -> list[Replica]:
        return [
            replica
            for replica in self.fleet.supervisor.available
            if replica.role in ANSWERING and replica.incarnation not in self._tried
        ]

    def _is_one_coming(self) -> bool:
        replicas = self.fleet.supervisor.replicas
        return any(replica.role in ANSWERING and replica.is_coming for replica in replicas)

    def _no_replica(self) -> APIError:
        if self._refusal is not None:
            self.fleet.metrics.count("failures", "full")
            return as_error(self._refusal)
        self.fleet.metrics.count("failures", "no_replica")
        return APIError(
            503,
            "no replica is there to answer: try again later",
            code="no_replica",
            headers={"Retry-After": "5"},
        )

    # -- asking it

    async def _send(self) -> httpx.Response:
        """Raises `LostError`."""
        fleet, replica, decision = self.fleet, self.replica, self.decision
        assert replica is not None and decision is not None
        fleet.metrics.count("requests", replica.name, decision.reason)
        fleet.metrics.count("prompt_tokens", replica.name, by=self.asked.num_tokens)
        fleet.metrics.count("cached_tokens_expected", replica.name, by=self.num_expected)
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

    async def lost(self, error: LostError) -> None:
        """The replica is gone: leave it. Raises `APIError` when that happened too often."""
        assert self.replica is not None
        self.fleet.supervisor.suspect(self.replica)
        self.fleet.metrics.count("retries", self.replica.name, error.cause)
        await self.close()
        self._num_lost += error.ran
        if self._num_lost >= self.fleet.settings.max_lost:
            self.fleet.metrics.count("failures", "replica_lost")
            raise replica_lost(self._num_lost)

    async def _refused(self, upstream: httpx.Response) -> None:
        """It is full or going down. What a full one says is the answer if nobody else is left."""
        assert self.replica is not None
        full = upstream.status_code == 429
        self.fleet.metrics.count("retries", self.replica.name, "full" if full else "unavailable")
        if not full:
            self.fleet.supervisor.suspect(self.replica)
        with contextlib.suppress(httpx.TransportError):
            content = await upstream.aread()
            if full:
                self._refusal = self.response(content)
        await self.close()

    # -- its answer

    @property
    def num_expected(self) -> int:
        """Prompt tokens that the replica will not compute if it holds what we believe. It computes
        at least one."""
        assert self.decision is not None
        return expected_tokens(self.asked, self.decision.cached_tokens)

    def when_left(self, function: Callable[[], object]) -> None:
        """Have something done when the replica that is asked now is left, however that comes."""
        self._at.callback(function)

    def first_token(self) -> None:
        """The prompt has been computed."""
        assert self._assignment is not None
        self.fleet.router.tracker.first_token(self._assignment)

    def report(self, usage: Mapping[str, Any] | None) -> None:
        """Compare the usage that an answer states with what was expected."""
        cached = ((usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is not None and self.replica is not None:
            name, count = self.replica.name, self.fleet.metrics.count
            count("cached_tokens_reported", name, by=cached)
            count("cached_tokens_compared", name, by=self.num_expected)

    def response(self, content: bytes) -> Response:
        """What the replica said, said again."""
        assert self.upstream is not None
        said = self.upstream.headers
        headers = {name: said[name] for name in KEPT_HEADERS if name in said}
        return Response(content, self.upstream.status_code, headers | self.labels)

    def broken_off(self) -> APIError:
        """The replica died after its first token."""
        assert self.replica is not None
        self.fleet.supervisor.suspect(self.replica)
        self.fleet.metrics.count("failures", "replica_lost")
        return replica_lost(name=self.replica.name)

    @property
    def labels(self) -> dict[str, str]:
        """Headers that say who is asked, and why."""
        if self.decision is None:
            return {}
        return {REPLICA_HEADER: self.decision.replica, REASON_HEADER: self.decision.reason}

    async def close(self) -> None:
        """Leave the replica: what it still does for this request it aborts. Safe twice."""
        self._at.close()
        if self.upstream is not None:
            await self.upstream.aclose()


def expected_tokens(asked: RoutingRequest, cached_tokens: int) -> int:
    """Prompt tokens that a replica with so many of them will not compute. It computes at least
    one, and with it its block."""
    size = asked.block_size
    return min(cached_tokens, max(0, asked.num_tokens - 1) // size * size)


def replica_lost(num_lost: int = 0, name: str = "") -> APIError:
    """So many replicas died before they answered, or the named one did in the middle of it."""
    message = f"{num_lost} replicas died while this request was there: it is not tried again"
    if name:
        message = f"{name} died while it was answering; the answer is not complete: ask again"
    return APIError(502, message, code="replica_lost")


def as_error(refusal: Response) -> APIError:
    """A replica's refusal as an exception."""
    said: dict[str, Any] = {}
    with contextlib.suppress(ValueError, AttributeError):
        said = json.loads(bytes(refusal.body)).get("error", {})
    message = said.get("message") or f"the replica answered with status {refusal.status_code}"
    kept = ("retry-after", REPLICA_HEADER, REASON_HEADER)
    return APIError(
        refusal.status_code,
        message,
        param=said.get("param"),
        code=said.get("code"),
        headers={name: refusal.headers[name] for name in kept if name in refusal.headers},
    )
