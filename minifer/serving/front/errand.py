"""A request on its way through replicas, until one takes it: what does not depend on the way.

::

    choose ─▶ send ─▶ 200, 400, …      what the replica says is the answer
      ▲         ├─▶ 429, 503           it is full, or going down: ask another
      └─────────┴─▶ nothing            it died: ask another
"""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.responses import Response

from minifer.routing.policy import RoutingRequest
from minifer.serving.errors import APIError
from minifer.serving.front.metrics import FrontMetrics

REPLICA_HEADER = "x-minifer-replica"
REASON_HEADER = "x-minifer-reason"
ELSEWHERE = (429, 503)  # statuses that another replica may not give
_KEPT_HEADERS = ("content-type", "retry-after", "cache-control")  # of an answer


class LostError(Exception):
    """The replica is gone, and nothing of its answer has been passed on.

    cause: a word for metrics. ran: may the request have been the reason?
    """

    def __init__(self, cause: str, ran: bool = False) -> None:
        super().__init__(cause)
        self.cause = cause
        self.ran = ran


class Upstream(Protocol):
    """A replica's answer whose status and headers have come: `httpx.Response`, or one like it."""

    status_code: int

    @property
    def headers(self) -> Mapping[str, str]: ...

    async def aread(self) -> bytes: ...

    def aiter_raw(self) -> AsyncIterator[bytes]: ...


@dataclass(frozen=True)
class Chosen:
    """The replica that has a request, and why.

    reason: the policy's, or "full" where its choice could not take the request. cached_tokens: of
    the prompt, that it will not compute if it holds what the router believes.
    """

    replica: str
    reason: str
    cached_tokens: int


class Errand(ABC):
    """One request: which replicas were asked, and what the one that is being asked says.

    chosen: the one that is asked. upstream: after `ask`, the answer whose status and headers have
    come. max_lost: replicas that may die over it.
    """

    def __init__(self, metrics: FrontMetrics, max_lost: int) -> None:
        self.metrics = metrics
        self.chosen: Chosen | None = None
        self.upstream: Upstream | None = None
        self._max_lost = max_lost
        self._num_lost = 0

    @abstractmethod
    async def ask(self) -> Upstream:
        """Ask one replica after the other until one answers.

        Raises `APIError` when none is left or takes it in time, or too many died over it.
        """

    @abstractmethod
    def first_token(self) -> None:
        """The prompt has been computed."""

    @abstractmethod
    async def close(self) -> None:
        """Leave the replica: what it still does for this request it aborts. Safe twice."""

    @abstractmethod
    def _gone(self) -> bool:
        """Note that the replica that was asked is gone. Returns whether no other can be asked."""

    # -- it dies

    async def lost(self, error: LostError) -> None:
        """The replica is gone: leave it. Raises `APIError` when that happened too often."""
        self.metrics.count("retries", self.name, error.cause)
        hopeless = self._gone()
        await self.close()
        self._num_lost += error.ran
        if hopeless or self._num_lost >= self._max_lost:
            self.metrics.count("failures", "replica_lost")
            raise replica_lost(self._num_lost)

    def broken_off(self) -> APIError:
        """The replica died after its first token."""
        self._gone()
        self.metrics.count("failures", "replica_lost")
        return replica_lost(name=self.name)

    # -- its answer

    @property
    def name(self) -> str:
        """Of the replica that is asked."""
        return self.chosen.replica if self.chosen is not None else "unknown"

    @property
    def labels(self) -> dict[str, str]:
        """Headers that say who is asked, and why."""
        if self.chosen is None:
            return {}
        return {REPLICA_HEADER: self.chosen.replica, REASON_HEADER: self.chosen.reason}

    def report(self, usage: Mapping[str, Any] | None) -> None:
        """Compare the usage that an answer states with what was expected."""
        cached = ((usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is not None and self.chosen is not None:
            self.metrics.count("cached_tokens_reported", self.name, by=cached)
            self.metrics.count("cached_tokens_compared", self.name, by=self.chosen.cached_tokens)

    def response(self, content: bytes) -> Response:
        """What the replica said, said again."""
        assert self.upstream is not None
        return said_again(self.upstream, content, self.labels)


def said_again(
    upstream: Upstream, content: bytes, labels: Mapping[str, str] | None = None
) -> Response:
    """A replica's answer as ours. labels: headers of our own."""
    headers = {name: upstream.headers[name] for name in _KEPT_HEADERS if name in upstream.headers}
    return Response(content, upstream.status_code, {**headers, **(labels or {})})


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
