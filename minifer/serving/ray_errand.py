"""A request on its way through Ray's replicas, until one answers it.

The rules are those of `minifer/serving/replicas/forward.py`: a refusal for want of room is asked of
another replica, and so is everything when a replica dies before the first token of its answer.
After that an answer that breaks off ends with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from minifer.serving.errors import APIError
from minifer.serving.ray_call import GENERATE, Accepted, Call
from minifer.serving.ray_metrics import RayMetrics
from minifer.serving.ray_settings import RaySettings
from minifer.serving.replicas import sse
from minifer.serving.replicas.errand import (
    ELSEWHERE,
    REASON_HEADER,
    REPLICA_HEADER,
    as_error,
)
from minifer.serving.streaming import EventStream

_HEADERS = ("content-type", "retry-after", "cache-control", "allow", "content-security-policy")
_GOING = ("engine_stopped", "shutting_down")  # codes of a replica's last words in a stream


class _LostError(Exception):
    """The replica is gone, and of its answer nothing has been passed on."""


class Errand:
    """One call: which replicas were asked, and what the one that is being asked says.

    handle: of the replicas' method that streams an answer.
    """

    def __init__(
        self, handle: DeploymentHandle, call: Call, settings: RaySettings, metrics: RayMetrics
    ) -> None:
        self.call = call
        self.status = 0
        self.headers = MutableHeaders()
        self.accepted: Accepted | None = None
        self._handle = handle
        self._settings = settings
        self._metrics = metrics
        self._items: DeploymentResponseGenerator | None = None
        self._num_lost = 0

    async def answer(self) -> Response:
        """What a replica answers. Raises `APIError` when none does."""
        try:
            await self.ask()
            if self.headers.get("content-type", "").startswith("text/event-stream"):
                return _ForwardedStream(self)
            return await self.whole()
        except BaseException:
            self.close()
            raise

    # -- asking

    async def ask(self) -> None:
        """Ask one replica after the other until one answers.

        Raises `APIError` when none takes the request in time, or too many died over it.
        """
        while True:
            try:
                await self._send()
                if self.status not in ELSEWHERE or not self._has_another():
                    return
                cause = "full" if self.status == 429 else "unavailable"
                self._metrics.count("retries", self._name, cause)
                self._leave()
            except _LostError:
                self._lost()

    async def _send(self) -> None:
        """Hand the call to a replica and read how its answer begins. Raises `_LostError`."""
        self.accepted = None
        self._items = self._handle.remote(self.call)
        try:
            async with asyncio.timeout(self._settings.wait_timeout):
                self.accepted = await self._next()
        except TimeoutError:
            self._metrics.count("failures", "no_replica")
            raise APIError(
                503,
                f"no replica took the request within {self._settings.wait_timeout:g} seconds: try "
                "again later",
                code="no_replica",
                headers={"Retry-After": "5"},
            ) from None
        assert isinstance(self.accepted, Accepted)
        if self.call.path in GENERATE:
            self._metrics.count_request(self.accepted, self.call.request.num_tokens)
        start = await self._next()
        if start is None:
            raise _LostError
        self.status = start["status"]
        self.headers = MutableHeaders(raw=list(start["headers"]))

    async def _next(self) -> Any:
        """The next item of the answer; None after the last. Raises `_LostError` or `APIError`."""
        assert self._items is not None
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
        except (RayError, RayServeException) as error:  # actor, worker or node died
            raise _LostError from error

    @property
    def _name(self) -> str:
        """Of the replica that has the request, or was to get it."""
        if self.accepted is not None:
            return self.accepted.replica
        return self.call.decision.replica if self.call.decision is not None else "unknown"

    def _has_another(self) -> bool:
        """May a replica that was not asked yet be asked, and which one asked now not be?"""
        if self.call.only is not None or self._name in self.call.avoid:
            return False
        self.call.avoid = (*self.call.avoid, self._name)
        return any(name not in self.call.avoid for name in self.call.replicas)

    def _lost(self) -> None:
        """Note that the replica is gone. Raises `APIError` when that happened too often."""
        self._metrics.count("retries", self._name, "died")
        if self._name not in self.call.avoid:
            self.call.avoid = (*self.call.avoid, self._name)
        self._leave()
        self._num_lost += 1
        if self._num_lost >= self._settings.max_lost or self.call.only is not None:
            self._metrics.count("failures", "replica_lost")
            raise APIError(
                502,
                f"{self._num_lost} replicas died while this request was there; it is not tried "
                "again",
                code="replica_lost",
            )

    # -- the answer

    async def whole(self) -> Response:
        """An answer that comes in one piece. While it has not come, another can be asked for it."""
        while True:
            try:
                content = b"".join([chunk async for chunk in self._chunks()])
            except _LostError:
                self._lost()
                await self.ask()
                continue
            if self.status == 200 and self.headers.get("content-type") == "application/json":
                with contextlib.suppress(ValueError, AttributeError):
                    self._report(json.loads(content).get("usage"))
            headers = {name: self.headers[name] for name in _HEADERS if name in self.headers}
            return Response(content, self.status, headers | self.labels)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Its events, whole ones. Raises `APIError` when it breaks off after the first token."""
        begun = False
        while True:
            try:
                async for chunk in self._until_first_token():
                    begun = True
                    yield chunk
                return
            except _LostError:
                if begun:
                    self._metrics.count("failures", "replica_lost")
                    raise APIError(
                        502,
                        f"{self._name} died while it was answering: the answer is not complete, "
                        "ask again",
                        code="replica_lost",
                    ) from None
            self._lost()
            await self.ask()
            if self.status != 200:
                raise as_error(await self.whole())

    async def _until_first_token(self) -> AsyncGenerator[bytes, None]:
        """All events; those before the first token come together with it."""
        held: list[bytes] | None = []
        async for chunk in sse.whole_events(self._chunks()):
            if held is not None:
                held.append(chunk)
                events = sse.split(b"".join(held))
                if all(map(sse.is_opening, events)):
                    continue
                news = next(event for event in events if not sse.is_opening(event))
                if (error := sse.error_of(news)) is not None and error.get("code") in _GOING:
                    raise _LostError
                chunk, held = b"".join(held), None
                if self.call.on_first_token is not None:
                    self.call.on_first_token()
            self._report(sse.usage_in(chunk))
            yield chunk
        if held:
            yield b"".join(held)

    async def _chunks(self) -> AsyncIterator[bytes]:
        """The body. Raises `_LostError` when it breaks off."""
        more = True
        while more:
            message: Message | None = await self._next()
            if message is None:
                raise _LostError
            if chunk := message.get("body", b""):
                yield chunk
            more = message.get("more_body", False)

    def _report(self, usage: Mapping[str, Any] | None) -> None:
        """How much of the prompt the replica really held."""
        cached = ((usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is not None and self.accepted is not None:
            self._metrics.count("cached_tokens_reported", self._name, by=cached)
            expected = self.accepted.cached_tokens
            self._metrics.count("cached_tokens_compared", self._name, by=expected)

    @property
    def labels(self) -> dict[str, str]:
        """Headers that say who was asked first, and why."""
        if self.accepted is None:
            return {}
        return {REPLICA_HEADER: self.accepted.replica, REASON_HEADER: self.accepted.reason}

    # -- the end

    def _leave(self) -> None:
        """What still runs at the replica for this request is aborted."""
        if self._items is not None:
            self._items.cancel()
            self._items = None

    def close(self) -> None:
        """Safe to call twice."""
        self._leave()


class _ForwardedStream(EventStream):
    """Leaves the replica when it is over, even if it never began."""

    def __init__(self, errand: Errand) -> None:
        super().__init__(errand.stream(), headers=errand.labels)
        self._errand = errand

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._errand.close()
