"""A request on its way through Ray's replicas, until one takes it.

What differs from replicas on this machine: Ray's request router chooses (`router.py`, from what the
call says), and an answer comes as the items of a stream that Ray carries.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.datastructures import MutableHeaders

from minifer.serving.errors import APIError
from minifer.serving.front.errand import ELSEWHERE, Chosen, Errand, LostError
from minifer.serving.front.metrics import FrontMetrics
from minifer.serving.front.routes import GENERATE
from minifer.serving.ray_serve.call import Call
from minifer.serving.ray_serve.settings import RaySettings


class RayAnswer:
    """One replica's answer, as `httpx.Response` has it. Every method raises `LostError` when the
    actor, its process or its node dies, and `APIError` for what else Ray has to say."""

    def __init__(self, items: DeploymentResponseGenerator) -> None:
        self.status_code = 0
        self.headers = MutableHeaders()
        self._taken = False  # by a replica
        self._items: DeploymentResponseGenerator | None = items

    async def open(self, timeout: float) -> Chosen:
        """Wait until a replica has taken the call. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout):
            first = await self._next()
        assert isinstance(first, Chosen)
        self._taken = True
        return first

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
            raise LostError("died", ran=self._taken) from error


class RayErrand(Errand):
    """One call. handle: of the replicas' method that streams an answer."""

    upstream: RayAnswer | None

    def __init__(
        self, handle: DeploymentHandle, call: Call, settings: RaySettings, metrics: FrontMetrics
    ) -> None:
        super().__init__(metrics, settings.max_lost)
        self.call = call
        self._handle = handle
        self._settings = settings

    async def ask(self) -> RayAnswer:
        while True:
            try:
                upstream = await self._send()
            except LostError as error:
                await self.lost(error)
                continue
            if upstream.status_code not in ELSEWHERE or not self._has_another():
                return upstream
            cause = "full" if upstream.status_code == 429 else "unavailable"
            self.metrics.count("retries", self.name, cause)
            await self.close()

    async def _send(self) -> RayAnswer:
        """Raises `LostError`, and `APIError` as `ask` does."""
        wait = self._settings.wait_timeout
        self.chosen = None
        self.upstream = RayAnswer(self._handle.remote(self.call))
        try:
            self.chosen = await self.upstream.open(wait)
        except TimeoutError:
            self.metrics.count("failures", "no_replica")
            raise APIError(
                503,
                f"no replica took the request within {wait:g} seconds: try again later",
                code="no_replica",
                headers={"Retry-After": "5"},
            ) from None
        if self.call.path in GENERATE:
            self.metrics.count_request(self.chosen, self.call.request.num_tokens)
        await self.upstream.read_start()
        return self.upstream

    @property
    def name(self) -> str:
        """Of the replica that has the call, or was to get it."""
        if self.chosen is None and self.call.decision is not None:
            return self.call.decision.replica
        return super().name

    def _has_another(self) -> bool:
        """Is there a replica that was not asked yet? The one that is asked now becomes one that
        was; asked for the second time, it was the only one left."""
        return not self._gone() and any(r not in self.call.avoid for r in self.call.replicas)

    def _gone(self) -> bool:
        """Ray may send the call to a replica that it should avoid: then there is no other."""
        call, name = self.call, self.name
        if call.only is not None or name in call.avoid:
            return True
        call.avoid = (*call.avoid, name)
        return False

    def first_token(self) -> None:
        if self.call.on_first_token is not None:
            self.call.on_first_token()

    async def close(self) -> None:
        if self.upstream is not None:
            self.upstream.close()
        if self.call.on_left is not None:
            self.call.on_left()
