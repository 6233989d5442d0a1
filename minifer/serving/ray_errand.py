"""A request on its way through Ray's replicas, until one takes it.

The rules are those of `minifer/serving/replicas/errand.py`. What differs: Ray's request router
chooses (`ray_router.py`, from what the call says), and an answer comes as the items of a stream
that Ray carries.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.datastructures import MutableHeaders
from starlette.responses import Response

from minifer.serving.errors import APIError
from minifer.serving.ray_call import GENERATE, Accepted, Call
from minifer.serving.ray_metrics import RayMetrics
from minifer.serving.ray_settings import RaySettings
from minifer.serving.replicas.errand import (
    ELSEWHERE,
    KEPT_HEADERS,
    REASON_HEADER,
    REPLICA_HEADER,
    LostError,
    replica_lost,
)


class RayAnswer:
    """One replica's answer, as `httpx.Response` has it. Every method raises `LostError` when the
    actor, its process or its node dies, and `APIError` for what else Ray has to say."""

    def __init__(self, items: DeploymentResponseGenerator) -> None:
        self.status_code = 0
        self.headers = MutableHeaders()
        self.accepted: Accepted | None = None
        self._items: DeploymentResponseGenerator | None = items

    async def open(self, timeout: float) -> Accepted:
        """Wait until a replica has taken the call. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout):
            self.accepted = await self._next()
        assert isinstance(self.accepted, Accepted)
        return self.accepted

    async def read_start(self) -> None:
        """Wait for the status and the headers."""
        start = await self._next()
        if start is None:
            raise LostError("died", ran=True)
        self.status_code = start["status"]
        self.headers = MutableHeaders(raw=list(start["headers"]))

    async def aread(self) -> bytes:
        """The whole body."""
        return b"".join([chunk async for chunk in self.aiter_raw()])

    async def aiter_raw(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        more = True
        while more:
            message = await self._next()
            if message is None:
                raise LostError("died", ran=True)
            if chunk := message.get("body", b""):
                yield chunk
            more = message.get("more_body", False)

    def close(self) -> None:
        """What still runs at the replica for this call is aborted. Safe to call twice."""
        items, self._items = self._items, None
        if items is not None:
            items.cancel()

    async def _next(self) -> Any:
        """The next item; None after the last."""
        if self._items is None:
            return None
        try:
            return await anext(self._items)
        except StopAsyncIteration:
            self._items = None
            return None
        except BackPressureError:
            raise APIError(
                429,
                "too many requests wait for a replica: try again later",
                code="queue_full",
                headers={"Retry-After": "1"},
            ) from None
        except DeploymentUnavailableError as error:
            raise APIError(503, f"the replicas fail: {error}", code="no_replica") from error
        except RayTaskError as error:  # our own code in the replica
            kind = type(error.cause).__name__
            raise APIError(500, f"internal error: {kind}", code="internal_error") from error
        except (RayError, RayServeException) as error:
            raise LostError("died", ran=self.accepted is not None) from error


class RayErrand:
    """One call: which replicas were asked, and what the one that is being asked says.

    handle: of the replicas' method that streams an answer. upstream: after `ask`, the answer whose
    status and headers have come.
    """

    def __init__(
        self, handle: DeploymentHandle, call: Call, settings: RaySettings, metrics: RayMetrics
    ) -> None:
        self.call = call
        self.upstream: RayAnswer | None = None
        self._handle = handle
        self._settings = settings
        self._metrics = metrics
        self._num_lost = 0

    async def ask(self) -> RayAnswer:
        """Ask one replica after the other until one answers.

        Raises `APIError` when none takes the call in time, or too many died over it.
        """
        while True:
            try:
                upstream = await self._send()
            except LostError as error:
                await self.lost(error)
                continue
            if upstream.status_code not in ELSEWHERE or not self._has_another():
                return upstream
            cause = "full" if upstream.status_code == 429 else "unavailable"
            self._metrics.count("retries", self._name, cause)
            await self.close()

    async def _send(self) -> RayAnswer:
        """Raises `LostError`, and `APIError` as `ask` does."""
        wait = self._settings.wait_timeout
        self.upstream = RayAnswer(self._handle.remote(self.call))
        try:
            accepted = await self.upstream.open(wait)
        except TimeoutError:
            self._metrics.count("failures", "no_replica")
            raise APIError(
                503,
                f"no replica took the request within {wait:g} seconds: try again later",
                code="no_replica",
                headers={"Retry-After": "5"},
            ) from None
        if self.call.path in GENERATE:
            self._metrics.count_request(accepted, self.call.request.num_tokens)
        await self.upstream.read_start()
        return self.upstream

    @property
    def _name(self) -> str:
        """Of the replica that has the call, or was to get it."""
        if self.upstream is not None and self.upstream.accepted is not None:
            return self.upstream.accepted.replica
        return self.call.decision.replica if self.call.decision is not None else "unknown"

    def _has_another(self) -> bool:
        """Is there a replica that was not asked yet? The one that is asked now becomes one that
        was; asked for the second time, it was the only one left."""
        call, name = self.call, self._name
        if call.only is not None or name in call.avoid:
            return False
        call.avoid = (*call.avoid, name)
        return any(other not in call.avoid for other in call.replicas)

    async def lost(self, error: LostError) -> None:
        """The replica is gone: leave it. Raises `APIError` when that happened too often."""
        call, name = self.call, self._name
        self._metrics.count("retries", name, error.cause)
        await self.close()
        self._num_lost += error.ran
        hopeless = call.only is not None or name in call.avoid
        call.avoid = (*call.avoid, name)
        if hopeless or self._num_lost >= self._settings.max_lost:
            self._metrics.count("failures", "replica_lost")
            raise replica_lost(self._num_lost)

    # -- its answer

    def first_token(self) -> None:
        """The prompt has been computed."""
        if self.call.on_first_token is not None:
            self.call.on_first_token()

    def report(self, usage: Mapping[str, Any] | None) -> None:
        """Compare the usage that an answer states with what was expected."""
        cached = ((usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is not None and self.upstream is not None and self.upstream.accepted is not None:
            self._metrics.count("cached_tokens_reported", self._name, by=cached)
            expected = self.upstream.accepted.cached_tokens
            self._metrics.count("cached_tokens_compared", self._name, by=expected)

    def response(self, content: bytes) -> Response:
        """What the replica said, said again."""
        assert self.upstream is not None
        said = self.upstream.headers
        headers = {name: said[name] for name in KEPT_HEADERS if name in said}
        return Response(content, self.upstream.status_code, headers | self.labels)

    def broken_off(self) -> APIError:
        """The replica died after its first token."""
        self._metrics.count("failures", "replica_lost")
        return replica_lost(name=self._name)

    @property
    def labels(self) -> dict[str, str]:
        """Headers that say who is asked, and why."""
        accepted = self.upstream.accepted if self.upstream is not None else None
        if accepted is None:
            return {}
        return {REPLICA_HEADER: accepted.replica, REASON_HEADER: accepted.reason}

    async def close(self) -> None:
        """Leave the replica: what it still does for this call it aborts. Safe twice."""
        if self.upstream is not None:
            self.upstream.close()
        if self.call.on_left is not None:
            self.call.on_left()
